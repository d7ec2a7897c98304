"""How many logits the forward pass of the fused log-probabilities may leave to the backward pass."""

from dataclasses import dataclass
from typing import Literal

_AUTO_LIMIT = 2**30
_AUTO_BYTES_PER_LOGIT = 1


@dataclass(frozen=True)
class LogitsCache:
    """A budget of bytes for each microbatch: `limit`, and `bytes_per_logit` of its logits if that is less.

    `auto` is one byte for each logit of a microbatch, at most 1 GiB: a quarter of its logits in float32, while the
    unfused path holds them, their gradient and copies of both. It is made of the tokens that are trained on and of this
    rank's rows of the vocabulary alone, not of the memory that happens to be free, so that the same panels are kept in
    every run, on every machine, and in the memory plan. Never do the logits of all tokens and ids exist at once: a
    logit takes two bytes at least, and panels are kept whole or not at all. The limit keeps the default harmless where
    microbatches are long.
    """

    limit: int
    bytes_per_logit: int | None = None

    @classmethod
    def of(cls, given: int | Literal["auto"]) -> "LogitsCache":
        """Return the budget that a recipe names: `auto`, or a count of bytes."""
        return cls(_AUTO_LIMIT, _AUTO_BYTES_PER_LOGIT) if given == "auto" else cls(given)

    def most(self, logits: int) -> int:
        """Return the bytes that a microbatch of so many logits may keep; more than they take, if the recipe says so."""
        return self.limit if self.bytes_per_logit is None else min(self.limit, logits * self.bytes_per_logit)
