"""Batches, tokenizers and sources of prompts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict

__all__ = ["BatchedDataDict"]


def __getattr__(name: str) -> object:
    # On demand: the preflight reads tokenizers and prompts, and must not load torch.
    if name == "BatchedDataDict":
        from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict

        return BatchedDataDict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
