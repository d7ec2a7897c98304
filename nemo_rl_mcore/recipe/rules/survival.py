"""What a run needs to survive the loss of ranks and machines."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules
from nemo_rl_mcore.recipe.rules.parallelism import OF_THE_LAYOUT

_RESTARTS = "cluster.max_trainer_restarts"
_ELASTIC = "cluster.elastic"
_CHECKPOINTS = "checkpointing.enabled"


def _restarts(config: RunConfig) -> Iterator[Problem]:
    restarts = config.cluster.max_trainer_restarts
    if restarts and not config.checkpointing.enabled:
        yield Problem(
            "requires",
            _RESTARTS,
            f"{restarts} has new ranks begin at the last checkpoint, and {_CHECKPOINTS} is false",
            f"set {_CHECKPOINTS}: true, or {_RESTARTS}: 0",
            (_CHECKPOINTS,),
        )


def _shrinking(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.elastic == "none":
        return
    if cluster.num_nodes == 1:
        yield _no_shrinking("has no machine to do without: cluster.num_nodes is 1", "cluster.num_nodes")
    elif not cluster.max_trainer_restarts:
        yield Problem(
            "requires",
            _ELASTIC,
            f"shrink restarts ranks on the machines that are left, and {_RESTARTS} is 0",
            f"set {_RESTARTS} to 1 or more, or {_ELASTIC}: none",
            (_RESTARTS,),
        )
    elif _engines_on_gpus_of_ranks(config):
        yield _no_shrinking(
            "does not go with engines on the GPUs of the ranks (policy.generation.colocated.enabled: true), whose "
            "number is fixed",
            "policy.generation.colocated.enabled",
            "policy.generation.backend",
            "cluster.gpus_per_node",
        )


def _engines_on_gpus_of_ranks(config: RunConfig) -> bool:
    generation = config.policy.generation
    return generation.colocated.enabled and not generation.decodes_on_ranks and not config.cluster.on_cpu


def no_fewer_machines(config: RunConfig) -> Problem:
    """Return the refusal of a recipe that may shrink, and passes the rules on no smaller number of machines."""
    return _no_shrinking(
        f"finds no number of machines below cluster.num_nodes: {config.cluster.num_nodes} whose ranks make whole "
        "copies of the model, among which the batch divides",
        *OF_THE_LAYOUT,
        "policy.train_global_batch_size",
    )


def _no_shrinking(reason: str, *related: str) -> Problem:
    return Problem("incompatible", _ELASTIC, f"shrink {reason}", f"set {_ELASTIC}: none", related)


RULES = Rules(of_runs=(_restarts, _shrinking))
