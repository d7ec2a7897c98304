"""Keys with two spellings: either is read, and two that contradict each other are refused."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.feature import Rules


def _of_the_policy(policy: PolicyConfig) -> Iterator[Problem]:
    megatron, optimizer = policy.megatron_cfg, policy.megatron_cfg.optimizer
    in_bf16 = policy.precision == "bfloat16"
    copies = (
        ("megatron_cfg.pipeline_dtype", megatron.pipeline_dtype, "precision", policy.precision),
        ("megatron_cfg.optimizer.bf16", optimizer.bf16, "precision", in_bf16),
        ("megatron_cfg.optimizer.clip_grad", optimizer.clip_grad, "max_grad_norm", policy.max_grad_norm),
    )
    for key, copy, source, value in copies:
        if copy is not None and copy != value:
            yield Problem(
                "contradicts",
                key,
                f"{str(copy).lower()} contradicts policy.{source}: {getattr(policy, source)}",
                f"remove it, or set it to {str(value).lower()}",
                (source,),
            )


def _seed(config: RunConfig) -> Iterator[Problem]:
    name, seed = config.algorithm, config.loop.seed
    if seed is not None and seed != config.seed:
        yield Problem(
            "contradicts",
            f"{name}.seed",
            f"{seed} contradicts seed: {config.seed}",
            f"remove {name}.seed; the seed of a run is the top-level seed",
            ("seed",),
        )


RULES = Rules(of_policies=(_of_the_policy,), of_runs=(_seed,))
