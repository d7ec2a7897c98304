"""Loss functions: sums over a batch, each with a named denominator, divided once.

Shapes: B rows, S tokens. A next-token tensor is [B,S-1]; its column i belongs to token i+1.
A sequence is a row or, where the batch has `episode_index`, all rows of an episode.
Masked positions are replaced by zero before any arithmetic, so NaN or infinity there affects neither values nor
gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from nemo_rl_mcore.data.batched_data_dict import EPISODE, BatchedDataDict
from nemo_rl_mcore.data.columns import Column, ColumnKind
from nemo_rl_mcore.errors import RefusedError

EPSILON = 1e-8
Count = Tensor | float | int


class LossType(Enum):
    """The unit that the gradient of a loss is averaged over."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """The model outputs that a loss function reads: the class of `outputs` in its `sums`."""

    LOGPROB = "logprob"  # TokenOutputs
    VALUE = "value"  # ValueOutputs
    DISTILLATION = "distillation"  # DistillationOutputs


# The batch columns that a pass reads to compute the outputs of a distillation loss.
_OF_TEACHER = tuple(
    Column(key, "the comparison with the teacher", kind, shape, of_next_token=True, optional=optional)
    for key, kind, shape, optional in (
        ("teacher_topk_indices", ColumnKind.TOKEN_IDS, "BSK", False),
        ("teacher_topk_logits", ColumnKind.BELOW_INFINITY, "BSK", False),
        ("teacher_logsumexp", ColumnKind.FINITE, "BS", False),
        # The top k of the whole vocabulary leave no tail.
        ("teacher_tail_logmass", ColumnKind.BELOW_INFINITY, "BS", True),
    )
)


class MetricKind(Enum):
    """The rule for combining a metric over parts of a batch, and its final divisor."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"  # a sum that is never divided
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class TokenOutputs:
    """Model outputs for the tokens of a batch: [B,S-1] fp32, column i for token i+1.

    logprobs and entropy are those of the filtered distribution; logprobs is -inf for tokens outside top_k or top_p.
    unfiltered: log-probabilities under the whole vocabulary; None without filters.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    unfiltered: Tensor | None = None


@dataclass(frozen=True)
class ValueOutputs:
    """A critic's values: [B,S] fp32, column t for the state before token t."""

    values: Tensor


@dataclass(frozen=True)
class TopKLogprobs:
    """Log-probabilities under the full vocabulary at k ids, [B,S-1,k], column i for token i+1.

    tail_logmass: [B,S-1], the log of the probability of all other ids; if None, one minus the k ids' sum is used.
    """

    logprobs: Tensor
    tail_logmass: Tensor | None = None


@dataclass(frozen=True)
class DistillationOutputs:
    """Student and teacher at the teacher's k most probable ids, and the student at the batch's own tokens."""

    student: TopKLogprobs
    teacher: TopKLogprobs
    tokens: TokenOutputs | None = None


@dataclass(frozen=True)
class MetricSum:
    """A metric of part of a batch: a 0-d detached tensor; without values, a minimum is +inf, a maximum -inf."""

    value: Tensor
    kind: MetricKind


@dataclass(frozen=True)
class LossSums:
    """A loss before its division (0-d, with its gradient) and its metrics; row_table: [B, N], never summed."""

    loss: Tensor
    metrics: dict[str, MetricSum]
    row_table: Tensor | None = None


def require(data: Mapping[str, Tensor], key: str, needed_by: str) -> Tensor:
    """Return `data[key]`, or raise a ValueError that names the key and the setting that needs it."""
    if key not in data:
        raise RefusedError(
            f"the batch has no {key!r}, which {needed_by} needs; it has {sorted(data)}", code="missing-column"
        )
    return data[key]


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of `values * mask`, where NaN and infinity under a zero mask count as zero."""
    return (torch.where(mask != 0, values, 0.0) * mask).sum(dim=dim)


@dataclass(frozen=True)
class Masks:
    """The masks of a batch in the next-token frame, and the reductions over them.

    tokens [B,S-1] is `token_mask[:, 1:]`, samples [B] is `sample_mask`, valid [B,S-1] is their product; same_episode
    [B,B] marks rows that are one sequence. For a critic `first_column` is 0: the frame is [B,S].
    """

    tokens: Tensor
    samples: Tensor
    valid: Tensor
    first_column: int = 1
    same_episode: Tensor | None = None

    @classmethod
    def of(cls, data: BatchedDataDict, dtype: torch.dtype = torch.float32, *, first_column: int = 1) -> Self:
        tokens = require(data, "token_mask", "every loss")[:, first_column:].to(dtype)
        samples = require(data, "sample_mask", "every loss").to(dtype)
        episodes = data.get(EPISODE)
        same = None if episodes is None else episodes[:, None] == episodes
        return cls(tokens, samples, tokens * samples[:, None], first_column, same)

    @property
    def sequences(self) -> Tensor:
        """`sample_mask` [B], counted once per sequence: 0 on all of an episode's rows except its first."""
        if self.same_episode is None:
            return self.samples
        return self.samples * ~self.same_episode.tril(-1).any(dim=-1)

    def keep(self, values: Tensor, name: str) -> Tensor:
        """Return [B,S-1] `values` with zero wherever no token counts; ValueError, with `name`, for any other shape."""
        if values.shape != self.valid.shape:
            rows, columns = self.valid.shape
            raise RefusedError(
                f"{name} has shape {list(values.shape)}, but token_mask [{rows}, {columns + self.first_column}] "
                f"makes it [{rows}, {columns}]",
                code="column-shape",
            )
        return torch.where(self.valid != 0, values, 0.0)

    def read(self, data: BatchedDataDict, key: str, needed_by: str) -> Tensor:
        """Return `data[key]` in this frame, with zero wherever no token counts."""
        return self.keep(require(data, key, needed_by)[:, self.first_column :], key)

    def token_sum(self, values: Tensor) -> Tensor:
        return masked_sum(values, self.valid)

    def token_metric(self, values: Tensor) -> MetricSum:
        """Return the metric that is the mean of [B,S-1] `values` over the valid tokens."""
        return MetricSum(self.token_sum(values), MetricKind.TOKENS)

    def over_sequence(self, values: Tensor) -> Tensor:
        """Return [B], the sum of [B] `values` over the rows of each row's sequence."""
        if self.same_episode is None:
            return values
        return torch.where(self.same_episode, values, 0.0).sum(dim=-1)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return [B], the mean of [B,S-1] `values` over the token mask of each row's sequence."""
        total = self.over_sequence(masked_sum(values, self.tokens, dim=-1))
        return total / (self.over_sequence(self.tokens.sum(dim=-1)) + EPSILON)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return the sum of [B] `values`, which are equal on the rows of an episode, over the valid sequences."""
        return masked_sum(values, self.sequences)

    def reduce(self, values: Tensor, loss_type: LossType) -> Tensor:
        """Return the sum to differentiate: over tokens, or over each sequence's mean over tokens."""
        if loss_type is LossType.TOKEN_LEVEL:
            return self.token_sum(values)
        return self.sequence_sum(self.sequence_mean(values))

    def extrema(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest valid entry of [B,S-1] `values`; +inf and -inf when there is none."""
        if values.numel() == 0:
            return values.new_full((), torch.inf), values.new_full((), -torch.inf)
        counts = self.valid != 0
        least = torch.where(counts, values, torch.inf).min()
        return least, torch.where(counts, values, -torch.inf).max()


def valid_counts(data: BatchedDataDict) -> tuple[Tensor, Tensor]:
    """Return (valid sequences, valid tokens) of a batch, 0-d fp64: the counts that losses are divided by."""
    masks = Masks.of(data, torch.float64)
    return masks.sequences.sum(), masks.valid.sum()


def gradient_kind(loss_type: LossType) -> MetricKind:
    """Return the kind of metric that has the gradient's divisor."""
    return MetricKind.TOKENS if loss_type is LossType.TOKEN_LEVEL else MetricKind.SEQUENCES


def normalize(total: Tensor, kind: MetricKind, global_valid_seqs: Count, global_valid_toks: Count) -> Tensor:
    """Return a sum divided by the global count of its kind + 1e-8, in its own dtype; other kinds stay as they are."""
    counts = {MetricKind.TOKENS: global_valid_toks, MetricKind.SEQUENCES: global_valid_seqs}
    if kind not in counts:
        return total
    return (total / (counts[kind] + EPSILON)).to(total.dtype)


def divide(
    sums: Mapping[str, MetricSum], global_valid_seqs: Count, global_valid_toks: Count
) -> dict[str, float]:
    """Return the reported numbers, with one synchronization: sums divided by their kind's global count."""
    if not sums:
        return {}
    counts = global_valid_seqs, global_valid_toks
    divided = [normalize(one.value, one.kind, *counts).to(torch.float64) for one in sums.values()]
    stacked: list[float] = torch.stack(divided).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return dict(zip(sums, stacked, strict=True))


class LossFunction(ABC):
    """Base class of losses over a model's outputs for a batch.

    A subclass sets which outputs it reads (`input_type`) and the unit its gradient is averaged over (`loss_type`), and
    computes sums; for any split of a batch by samples, the sums of the parts combine to the sums of the whole.
    """

    loss_type: LossType
    input_type: LossInputType
    use_fused_linear_logprobs: bool = False
    rows_per_sample: int = 1
    """Number of consecutive rows that belong together, such as chosen and rejected answer, and are never separated."""
    needs_entropy: bool = False
    """True if `sums` reads `TokenOutputs.entropy`."""
    needs_tokens: bool = False
    """True if `sums` reads `DistillationOutputs.tokens`."""
    gives_row_table: bool = False
    """True if the sums include a `row_table`."""
    custom_name: str | None = None
    """Key and path of a custom class, for its error messages."""
    own_columns: Sequence[Column] = ()
    """A built-in loss's batch columns besides the masks and a teacher's outputs."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the batch columns that the loss reads besides the masks; a subclass adds its own to the tuple."""
        of_teacher = _OF_TEACHER if self.input_type is LossInputType.DISTILLATION else ()
        return (*of_teacher, *self.own_columns)

    @abstractmethod
    def sums(self, outputs: Any, data: BatchedDataDict) -> LossSums:
        """Return the un-normalised loss and metrics, without synchronizing; `input_type` names the class of outputs."""

    def divide(
        self, sums: LossSums, global_valid_seqs: Count, global_valid_toks: Count
    ) -> tuple[Tensor, dict[str, float]]:
        """Return a loss and its metrics as floats, divided by the global counts; results for a batch's parts add up."""
        counts = global_valid_seqs, global_valid_toks
        loss = normalize(sums.loss, gradient_kind(self.loss_type), *counts)
        return loss, divide(sums.metrics, *counts)


class TokenLossFunction(LossFunction):
    """A loss computed from the log-probabilities of a batch's own tokens."""

    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict,
        global_valid_seqs: Count,
        global_valid_toks: Count,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the result of `divide`, for next_token_logprobs and entropy [B,S-1]."""
        sums = self.sums(TokenOutputs(next_token_logprobs, entropy), data)
        return self.divide(sums, global_valid_seqs, global_valid_toks)
