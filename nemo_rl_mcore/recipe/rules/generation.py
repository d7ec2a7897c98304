"""What the generation engine cannot do, and what it is asked for that the model lacks."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models.engine_sizes import largest_weight_bytes
from nemo_rl_mcore.recipe.rules.feature import Rules


def _stop_ids(policy: PolicyConfig) -> Iterator[Problem]:
    vocabulary = policy.model.vocab_size
    foreign = [stop for stop in policy.generation.stop_token_ids or () if not 0 <= stop < vocabulary]
    if foreign:
        yield Problem(
            "too-large",
            "generation.stop_token_ids",
            f"{foreign} is outside 0 to {vocabulary - 1}, the ids of policy.model.vocab_size: {vocabulary}",
            "remove them, or raise vocab_size" if policy.weights is None else "remove them",
            ("model.vocab_size",),
        )


def _filters(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield filters of an engine that reports log-probabilities after them."""
    generation = policy.generation
    if generation.engine.reports_before_filters:
        return
    for key, value, neutral in (("top_p", generation.top_p, 1.0), ("top_k", generation.top_k, None)):
        if value != neutral:
            yield Problem(
                "incompatible",
                f"generation.{key}",
                f"{value} does not go with generation.backend: {generation.backend}, whose log-probabilities are those "
                "after the filter while training computes them before it",
                f"set {key}: {'null' if neutral is None else neutral}, or backend: embedded",
                ("generation.backend",),
            )


def _buckets(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a bucket without room for a weight, where weights are sent."""
    given = policy.generation.refit_bucket_bytes
    if not policy.generation.decodes_on_ranks and given is not None and given < largest_weight_bytes(policy):
        yield Problem(
            "too-small",
            "generation.refit_bucket_bytes",
            f"{given} is below the {largest_weight_bytes(policy)} bytes of the largest weight",
            "set it to null, or raise it",
            ("model",),
        )


def _transport(config: RunConfig) -> Iterator[Problem]:
    """Yield a way for weights to travel that these machines lack, where they travel."""
    generation = config.policy.generation
    if generation.decodes_on_ranks:
        return
    if config.cluster.on_cpu and generation.refit_transport in ("cuda_ipc", "nccl"):
        yield Problem(
            "requires",
            "policy.generation.refit_transport",
            f"{generation.refit_transport} needs GPUs, and cluster.gpus_per_node is 0",
            "set it to null: shared_memory on one machine",
            ("policy.generation.backend", "cluster.gpus_per_node"),
        )
    if generation.refit_transport == "shared_memory" and config.cluster.num_nodes > 1:
        yield Problem(
            "incompatible",
            "policy.generation.refit_transport",
            f"shared_memory is that of one machine, and cluster.num_nodes is {config.cluster.num_nodes}",
            "set it to null",
            ("policy.generation.backend", "cluster.num_nodes"),
        )
    apart = not config.cluster.on_cpu and not generation.colocated.enabled
    if apart and generation.refit_transport == "cuda_ipc":
        yield Problem(
            "requires",
            "policy.generation.refit_transport",
            "cuda_ipc needs engines on the ranks' GPUs, and colocated.enabled is false",
            "set it to null: nccl",
            ("policy.generation.colocated.enabled",),
        )


RULES = Rules(
    of_policies=(_stop_ids, _filters, _buckets),
    of_runs=(_transport,),
)
