"""Cut a batch into microbatches of equal shape, as pipeline schedules need them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict


def make_microbatches(
    data: BatchedDataDict, micro_batch_size: int, sequence_multiple: int = 1
) -> list[BatchedDataDict]:
    """Split the rows in order into microbatches of exactly `micro_batch_size` rows, at least one.

    Only tensors travel. The last microbatch is filled up with rows of zeros: their sample_mask is 0, so they count in
    no sum. Columns of the [B, S, ...] tensors are padded with zeros to a multiple of `sequence_multiple` (sequence
    parallelism splits the sequence evenly).
    """
    tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
    length = tensors["input_ids"].shape[1]
    missing_columns = -length % sequence_multiple
    missing_rows = -data.size % micro_batch_size if data.size else micro_batch_size
    padded = BatchedDataDict(
        {
            key: _pad(value, missing_rows, missing_columns if _has_columns(value, length) else 0)
            for key, value in tensors.items()
        }
    )
    return [padded.slice(i, i + micro_batch_size) for i in range(0, padded.size, micro_batch_size)]


def _has_columns(value: Tensor, length: int) -> bool:
    return value.ndim > 1 and value.shape[1] == length


def _pad(value: Tensor, rows: int, columns: int) -> Tensor:
    if columns:
        value = pad(value, (0, 0) * (value.ndim - 2) + (0, columns))
    return pad(value, (0, 0) * (value.ndim - 1) + (0, rows)) if rows else value
