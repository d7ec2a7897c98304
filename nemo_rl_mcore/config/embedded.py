"""Configuration of embedded engines that are processes of their own."""

from nemo_rl_mcore.config.base import NonNegativeInt, PositiveInt, Seconds, StrictModel


class EmbeddedConfig(StrictModel):
    """The embedded engines of their own (ours); read when backend is embedded and colocated.enabled is false."""

    engines: PositiveInt = 1
    """Processes, each with the whole model, on a GPU of its own where there are some; each answers a share."""
    max_restarts: NonNegativeInt = 0
    """Times in a run that an engine which died or hangs is started anew, all engines together."""
    restart_backoff_s: Seconds = 1.0
    """Time before an engine that died is started anew; it doubles with each restart, up to a minute."""
    start_timeout_s: Seconds = 600.0
    """Deadline of an engine's start."""
    call_timeout_s: Seconds = 1800.0
    """Deadline of a batch, and of an engine's acknowledgement of a bucket of weights."""
