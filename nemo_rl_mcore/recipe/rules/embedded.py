"""What embedded engines of their own cannot do."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.engines import EmbeddedConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models import missing_family
from nemo_rl_mcore.recipe.rules.feature import Rules


def _engines(config: RunConfig) -> Iterator[Problem]:
    """Yield what keeps embedded engines of their own from getting weights, or GPUs."""
    policy, resources = config.policy, config.policy.generation.colocated.resources
    embedded = policy.generation.engine
    if not isinstance(embedded, EmbeddedConfig) or policy.generation.decodes_on_ranks:
        return
    # Of weights that are named, the key that names them is told.
    if policy.model_name is None and (reason := missing_family(policy.model)):
        # An asynchronous run would send whoever sets it to true back to false.
        on_ranks = f"{config.asynchrony_key}.enabled: false and colocated.enabled: true"
        remedy = f"set {on_ranks if config.asynchronous else 'it to true'}"
        yield Problem(
            "not-supported",
            "policy.generation.colocated.enabled",
            f"false sends weights by the names of a family, and {reason}",
            remedy if policy.weights else f"change policy.model, or {remedy}",
            ("policy.model", "policy.generation.backend"),
        )
    engines, nodes = embedded.engines, resources.num_nodes or 1
    if config.cluster.on_cpu:
        return
    key = "policy.generation.colocated.resources"
    if resources.gpus_per_node is None and nodes > 1:
        yield Problem(
            "missing",
            f"{key}.num_nodes",
            f"{nodes} with gpus_per_node: null does not say how many engines each has",
            "set gpus_per_node, or remove num_nodes",
            (f"{key}.gpus_per_node",),
        )
    elif resources.gpus_per_node is not None and resources.gpus_per_node * nodes != engines:
        gpus = resources.gpus_per_node * nodes
        yield Problem(
            "contradicts",
            "policy.generation.embedded_cfg.engines",
            f"{engines} is not the {gpus} GPUs of {key}, and each engine has one",
            f"set it to {gpus}, or remove the section resources",
            (key,),
        )


RULES = Rules(of_runs=(_engines,))
