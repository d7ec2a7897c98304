"""The recipe of a run that goes on with fewer machines than it began with."""

from nemo_rl_mcore.config.base import collect_problems
from nemo_rl_mcore.config.master import RunConfig


def shrunk(config: RunConfig, nodes: int) -> RunConfig | None:
    """The recipe with the largest number of machines, at most `nodes` and fewer than its own, that its rules allow.

    They are those of loading: the model must fit, and the batch divide by the copies that are left. None where no such
    number of machines passes.
    """
    for fewer in range(min(nodes, config.cluster.num_nodes - 1), 0, -1):
        smaller = _on(config, num_nodes=fewer)
        if _passes(smaller):
            return smaller
    return None


def shrinks(config: RunConfig) -> bool:
    """Whether some smaller number of machines would do; True too for a recipe that breaks rules with all of them."""
    return not _passes(config) or shrunk(config, config.cluster.num_nodes - 1) is not None


def _passes(config: RunConfig) -> bool:
    # What is asked of a recipe that may shrink is not asked of the one that it shrinks to.
    return not any(collect_problems(_on(config, elastic="none")))


def _on(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})
