"""A loss's declarations of the tensors it reads; batches are checked against them before they are sent."""

from dataclasses import dataclass
from enum import Enum


class ColumnKind(Enum):
    """Allowed values at unmasked tokens."""

    FINITE = "floating-point numbers that are finite"
    BELOW_INFINITY = "floating-point numbers, -inf among them (a probability of 0)"
    # Not checked: a step whose loss is then not finite is skipped and reported.
    NUMBERS = "numbers"
    TOKEN_IDS = "ids of the vocabulary"


@dataclass(frozen=True)
class Column:
    """A tensor that a loss reads from a batch.

    needed_by: the setting or term that reads it, for messages.
    shape: B rows, S columns of input_ids, K choices per token; K is the same in all of a loss's tensors.
    of_next_token: column i describes token i + 1 instead of token i.
    optional: the tensor may be missing.
    """

    key: str
    needed_by: str
    kind: ColumnKind = ColumnKind.FINITE
    shape: str = "BS"
    of_next_token: bool = False
    optional: bool = False
