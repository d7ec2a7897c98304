"""Configuration of an engine of either kind, and what its kind can do.

Whoever asks what an engine can do asks its section. A further engine is a section here or in a file of its own, its
name in `generation.GenerationConfig.backend`, and a folder in nemo_rl_mcore/generation for its processes.
"""

from typing import ClassVar

from nemo_rl_mcore.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel


class EngineConfig(StrictModel):
    """What the sections of all engines have in common."""

    noun: ClassVar[str]
    """Of one engine, for people."""
    may_be_the_ranks: ClassVar[bool] = False
    """With colocated.enabled the training ranks answer, and no engine is started."""
    sleeps: ClassVar[bool] = False
    """On GPUs that it shares with the ranks, it gives them its memory while they train."""
    reports_before_filters: ClassVar[bool] = False
    """Its log-probabilities are those before top_p and top_k, as training computes them."""
    always_rereads: ClassVar[bool] = False
    """It recomputes its cache when weights change, whatever the recipe says."""
    needs_family: ClassVar[bool] = False
    """It runs models of known Hugging Face families alone."""
    package: ClassVar[str | None] = None
    """The Python package that it needs."""

    max_restarts: NonNegativeInt = 0
    """Times in a run that an engine which died or hangs is restarted, all engines together (ours)."""
    restart_backoff_s: Seconds = 1.0
    """Time before an engine that died is restarted; it doubles with each restart, up to a minute (ours)."""
    start_timeout_s: Seconds = 600.0
    """Deadline of an engine's start (ours)."""
    call_timeout_s: Seconds = 1800.0
    """Deadline of a batch, and of an engine's acknowledgement of a bucket of weights (ours)."""

    @property
    def required_for_groups(self) -> str | None:
        """Return the key of this section that is to be true for groups to be answered one by one; None if they are."""
        return None

    def number_format(self, of_training: str) -> str | None:
        """Return the format in which code of its own computes; None where Megatron's does, in that of training."""
        return None


class EmbeddedConfig(EngineConfig):
    """The embedded engines of their own (ours); read when backend is embedded and colocated.enabled is false."""

    noun = "embedded engine"
    may_be_the_ranks = True
    reports_before_filters = True

    engines: PositiveInt = 1
    """Processes, each with the whole model, on a GPU of its own where there are some; each answers a share."""
