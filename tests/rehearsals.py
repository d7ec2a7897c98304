"""Recipes that are rehearsed in tests."""

from functools import cache
from pathlib import Path

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.recipe.load import load_config

REPO = Path(__file__).parents[1]
THEIRS = REPO / "tests/fixtures/nemo_rl"


@cache
def _plain() -> RunConfig:
    return load_config(REPO / "examples/configs/quickstart/grpo_7B_8gpu.yaml")


def with_layout(world: int = 1, virtual: int | None = None, **sizes: int) -> RunConfig:
    """A recipe with another layout; nothing is checked of it."""
    config = _plain()
    keys = {
        "tensor_model_parallel_size": sizes.get("tensor", 1),
        "pipeline_model_parallel_size": sizes.get("pipeline", 1),
        "context_parallel_size": sizes.get("context", 1),
        "expert_model_parallel_size": sizes.get("expert", 1),
        "sequence_parallel": bool(sizes.get("sequence")),
        "virtual_pipeline_model_parallel_size": virtual,
    }
    megatron = config.policy.megatron_cfg.model_copy(update=keys)
    policy = config.policy.model_copy(update={"megatron_cfg": megatron})
    cluster = config.cluster.model_copy(update={"gpus_per_node": world})
    return config.model_copy(update={"policy": policy, "cluster": cluster})
