"""What an asynchronous run has under way at most, and what its driver keeps."""

from dataclasses import dataclass

from nemo_rl_mcore.config.master import GRPOMasterConfig, RunConfig
from nemo_rl_mcore.config.rules.asynchronous import remarks

_BYTES_PER_TOKEN = 40
"""Of a sample in the driver: ids, masks, log-probabilities, versions, as tensors."""


@dataclass(frozen=True)
class AsyncPlan:
    """Groups, each the answers to one prompt, and the bytes of all that the driver may hold at a time.

    kept_groups: those that were trained on since the last checkpoint, where there are some.
    """

    max_age: int
    groups_per_step: int
    min_groups_per_chunk: int
    max_inflight_groups: int
    max_live_groups: int
    in_flight_weight_updates: bool
    kept_groups: int
    driver_bytes: int
    remarks: tuple[str, ...]


def plan_asynchronous(config: RunConfig) -> AsyncPlan | None:
    """The plan of an asynchronous run; None for one that takes turns."""
    if not isinstance(config, GRPOMasterConfig) or not config.asynchronous:
        return None
    loop, saving = config.grpo, config.checkpointing
    steps = min(saving.save_period, loop.max_num_steps) if saving.enabled else 0
    kept = steps * loop.num_prompts_per_step
    tokens = loop.num_generations_per_prompt * config.policy.max_total_sequence_length
    return AsyncPlan(
        max_age=loop.async_grpo.max_trajectory_age_steps,
        groups_per_step=loop.num_prompts_per_step,
        min_groups_per_chunk=loop.min_groups_per_chunk,
        max_inflight_groups=loop.max_inflight_groups,
        max_live_groups=loop.max_live_groups,
        in_flight_weight_updates=loop.async_grpo.in_flight_weight_updates,
        kept_groups=kept,
        driver_bytes=(kept + loop.max_live_groups) * tokens * _BYTES_PER_TOKEN,
        remarks=tuple(remarks(config)),
    )
