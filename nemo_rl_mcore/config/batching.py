"""Configuration of microbatches that are sized by tokens: dynamic batching and sequence packing."""

from dataclasses import dataclass
from typing import Literal

from nemo_rl_mcore.config.base import PositiveInt, StrictModel


class TokenBudgetConfig(StrictModel):
    """How many tokens a microbatch may hold."""

    enabled: bool = False
    """Whether microbatches are sized this way; train_micro_batch_size and logprob_batch_size then cut nothing."""
    train_mb_tokens: PositiveInt | None = None
    """Tokens of a training microbatch; null is max_total_sequence_length times the rows of train_micro_batch_size."""
    logprob_mb_tokens: PositiveInt | None = None
    """Tokens of a log-probability microbatch; null is max_total_sequence_length * logprob_batch_size."""
    sequence_length_round: PositiveInt = 64
    """A microbatch's padded length is rounded up to a multiple of this where the budget has room."""


class SequencePackingConfig(TokenBudgetConfig):
    """Several samples in one row without padding; a sample sees no token of another one."""

    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing"] = (
        "modified_first_fit_decreasing"
    )
    """How samples are assigned to rows; both names mean first-fit decreasing."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Samples of like length in one microbatch, as many as a token budget takes, padded to its own longest one."""


@dataclass(frozen=True)
class TokenBudgets:
    """The token budgets of a policy: the section they come from, and their values.

    packed: whether rows of the batch share rows of the model; else each has a row of its own.
    train_by_rows: whether `train` was left out of the section, and is that of samples of one row.
    """

    section: str
    packed: bool
    train: int
    logprob: int
    length_round: int
    train_by_rows: bool = False

    def of_training(self, rows_per_sample: int) -> int:
        """The tokens of a training microbatch for a loss whose samples have so many rows."""
        return self.train * rows_per_sample if self.train_by_rows else self.train
