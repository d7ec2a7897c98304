"""What an asynchronous run has under way at most, and what its driver keeps."""

from dataclasses import dataclass

from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.recipe.rules.asynchronous import remarks

_BYTES_PER_TOKEN = 40
"""Of a sample in the driver, and where it is kept: ids, masks, log-probabilities, versions, as tensors."""


@dataclass(frozen=True)
class AsyncPlan:
    """Groups, each the answers to one prompt, and the bytes of all that the driver may hold at a time.

    kept_groups: those that were trained on since the last checkpoint, where there are some. step_bytes, disk_bytes: on
    disk, for a replay: of a step, and of all at most; 0 where the run keeps none.
    """

    max_age: int
    groups_per_step: int
    min_groups_per_chunk: int
    max_inflight_groups: int
    max_live_groups: int
    in_flight_weight_updates: bool
    kept_groups: int
    driver_bytes: int
    step_bytes: int
    disk_bytes: int
    remarks: tuple[str, ...]


def plan_asynchronous(config: RunConfig) -> AsyncPlan | None:
    """Return the plan of an asynchronous run; None for one that takes turns."""
    if not config.asynchronous:
        return None
    saving = config.checkpointing
    steps = min(saving.save_period, config.loop.max_num_steps) if saving.enabled else 0
    kept = steps * config.prompts_per_step
    tokens = config.generations_per_prompt * config.policy.max_total_sequence_length
    step_bytes = config.prompts_per_step * tokens * _BYTES_PER_TOKEN if config.keeps_groups else 0
    most = max(int(config.asynchrony.keep_groups_gb * 1e9), steps * step_bytes)
    return AsyncPlan(
        max_age=config.max_age,
        groups_per_step=config.prompts_per_step,
        min_groups_per_chunk=config.min_groups_per_chunk,
        max_inflight_groups=config.max_inflight_groups,
        max_live_groups=config.max_live_groups,
        in_flight_weight_updates=config.asynchrony.in_flight_weight_updates,
        kept_groups=kept,
        driver_bytes=(kept + config.max_live_groups) * tokens * _BYTES_PER_TOKEN,
        step_bytes=step_bytes,
        disk_bytes=min(most, config.loop.max_num_steps * step_bytes),
        remarks=tuple(remarks(config)),
    )
