"""Configuration of the processes in which environments run."""

from nemo_rl_mcore.config.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Seconds,
    StrictModel,
    StrTuple,
)


class EnvPoolConfig(StrictModel):
    """The processes in which the environment runs, so that what becomes of one costs its episodes at most (ours)."""

    size: NonNegativeInt | None = None
    """Processes; 0 asks the environment where the loop runs. Null: 1 for env.math, rewards and custom, else 0."""
    timeout_s: Seconds = 120.0
    """Deadline of a reply, to up to 8 answers at once; a process that passes it is killed, and another one started."""
    num_cpus: NonNegativeFloat = 0.0
    """CPUs that Ray keeps for each process; 0 keeps none, so that processes share those of the ranks."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that Ray keeps for each process besides those of ranks and engines, such as for a reward model; a share of
    one, or whole ones. 0 hides all GPUs from it."""
    start_timeout_s: Seconds = 300.0
    """Deadline of a process's start."""
    retries: NonNegativeInt = 2
    """Times that an answer without a reply is shown to the environment again, and each of them alone; then its
    episode is dropped."""
    max_drop_rate: Fraction = 0.0
    """Share of the episodes of a step, or of a batch of a validation, that may be dropped; above it the run ends."""
    variables: StrTuple = ()
    """Names of environment variables of the driver that the processes see besides those of ranks, such as the key of a
    service; neither Ray nor a log is told their values."""
