"""Declarations of the tensors that a loss reads, used to check a batch before it is sent."""

from dataclasses import dataclass
from enum import Enum


class ColumnKind(Enum):
    """The values that a tensor may hold at unmasked tokens."""

    FINITE = "floating-point numbers that are finite"
    BELOW_INFINITY = "floating-point numbers, -inf among them (a probability of 0)"
    # Not checked: if a product of such numbers is not finite, the step is skipped and reported.
    NUMBERS = "numbers"
    TOKEN_IDS = "ids of the vocabulary"


@dataclass(frozen=True)
class Column:
    """A tensor that a loss reads from a batch.

    needed_by: the setting or term that reads it, for the message when it is missing.
    shape: B rows, S columns of input_ids, K choices per token; K is the same in all of a loss's tensors.
    of_next_token: whether column i describes token i + 1 instead of token i.
    optional: whether the tensor may be missing.
    """

    key: str
    needed_by: str
    kind: ColumnKind = ColumnKind.FINITE
    shape: str = "BS"
    of_next_token: bool = False
    optional: bool = False
