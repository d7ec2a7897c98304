"""Configuration of rotary positions beyond the context that a model was trained on first."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import Float, NonNegativeFloat, PositiveFloat, Problem, Size, StrictModel

_OF_YARN = ("beta_slow", "beta_fast", "mscale", "mscale_all_dim", "truncate")


class RopeScalingConfig(StrictModel):
    """Rotary frequencies stretched for long contexts."""

    rope_type: Literal["llama3", "yarn"] = "llama3"
    """How: as Llama 3.1 and later, or by YaRN, which also makes the attention more peaked."""
    factor: Annotated[Float, Field(gt=0, le=1e6)]
    """Frequencies of the slowest rotations are divided by it."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: rotations with at most this many turns in the original context count as slow."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: rotations with at least this many turns in the original context stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: rotations with at most this many turns in the original context count as slow."""
    beta_fast: PositiveFloat = 32.0
    """yarn: rotations with at least this many turns in the original context stay as they are."""
    mscale: NonNegativeFloat = 1.0
    """yarn with multi_latent_attention: how much the factor adds to the rotated parts of queries and keys."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """The same: how much it adds to whole queries and keys, of which mscale leaves the rotated parts out."""
    truncate: bool = True
    """yarn: round the first and the last of the channel pairs between slow and fast outwards (gpt-oss does not)."""
    original_max_position_embeddings: Size
    """The original context: the longest sequence before the stretching."""

    read_unless = (
        *((key, "rope_type", "yarn") for key in ("low_freq_factor", "high_freq_factor")),
        *((key, "rope_type", "llama3") for key in _OF_YARN),
    )

    @property
    def scales(self) -> bool:
        """Return whether queries and keys are scaled otherwise than in a model without latent attention."""
        return (self.mscale, self.mscale_all_dim) != (1.0, 0.0)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that its kind has, in config.json too."""
        turns = (
            ("low_freq_factor", "high_freq_factor")
            if self.rope_type == "llama3"
            else ("beta_fast", "beta_slow")
        )
        scales = ("mscale", "mscale_all_dim") if self.scales else ()
        exact = () if self.truncate else ("truncate",)
        return ("factor", *turns, *scales, *exact, "original_max_position_embeddings")

    @property
    def slow_and_fast(self) -> tuple[float, float]:
        """Return the turns in the original context up to which rotations are slow, and from which on they are fast."""
        if self.rope_type == "yarn":
            return self.beta_slow, self.beta_fast
        return self.low_freq_factor or 1.0, self.high_freq_factor or 1.0

    def problems(self) -> Iterator[Problem]:
        """Yield factors that are missing, or leave nothing between slow and fast rotations."""
        if self.rope_type == "yarn":
            if self.factor < 1:
                yield Problem(
                    "too-small", "factor", f"{self.factor} is below 1 with rope_type: yarn", "raise it"
                )
            if self.beta_slow >= self.beta_fast:
                what = f"{self.beta_slow} is not below beta_fast: {self.beta_fast}"
                yield Problem("too-large", "beta_slow", what, "lower it", ("beta_fast",))
            if self.scales and not (self.mscale and self.mscale_all_dim):
                what = f"{self.mscale} with mscale_all_dim: {self.mscale_all_dim} is read otherwise by others"
                yield Problem("not-supported", "mscale", what, "set both, or neither", ("mscale_all_dim",))
            return
        for key in ("low_freq_factor", "high_freq_factor"):
            if getattr(self, key) is None:
                yield Problem("missing", key, "missing with rope_type: llama3", "set it", ("rope_type",))
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            yield Problem(
                "too-large",
                "low_freq_factor",
                f"{self.low_freq_factor} is not below high_freq_factor: {self.high_freq_factor}",
                "lower it",
                ("high_freq_factor",),
            )
