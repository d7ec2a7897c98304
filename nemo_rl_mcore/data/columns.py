"""What a loss reads of a batch, as a declaration: a batch can then be judged before it is sent anywhere."""

from dataclasses import dataclass
from enum import Enum


class ColumnKind(Enum):
    """Which values a tensor may hold, judged where a token counts; elsewhere anything may stand."""

    FINITE = "floating-point numbers that are finite"
    BELOW_INFINITY = "floating-point numbers, -inf among them (a probability of 0)"
    # Not judged: a product of them that is not finite makes a step that is skipped and reported.
    NUMBERS = "numbers"
    TOKEN_IDS = "ids of the vocabulary"


@dataclass(frozen=True)
class Column:
    """A tensor that a loss reads of a batch.

    needed_by: the setting or term that reads it, for the message when it is missing.
    shape: B rows, S columns of input_ids, K choices a token, the same K in all columns of a loss.
    of_next_token: column i is about token i + 1, not about token i.
    optional: may be missing.
    """

    key: str
    needed_by: str
    kind: ColumnKind = ColumnKind.FINITE
    shape: str = "BS"
    of_next_token: bool = False
    optional: bool = False
