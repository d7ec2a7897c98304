"""Configuration of training that does not wait for a step's answers."""

from collections.abc import Iterator
from typing import Literal

from nemo_rl_mcore.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Seconds,
    StrictModel,
)


class AsyncRolloutsConfig(StrictModel):
    """Engines answer the prompts of later steps while the ranks train; a group is the answers to one prompt."""

    enabled: bool = False
    """Whether sampling and training go on side by side."""
    max_trajectory_age_steps: NonNegativeInt = 1
    """Training steps that a group may be older than the weights it trains; 0 keeps the synchronous pace (ours)."""
    order: Literal["in_order", "as_completed"] = "in_order"
    """In which order groups train (ours): that of their draw, or as they are answered, none older than allowed."""
    max_generation_failures: NonNegativeInt = 0
    """Failures in a row, over all groups, that are answered by trying again; the next one ends the run."""
    in_flight_weight_updates: bool = True
    """Give engines new weights while they answer; false first waits until no group is being answered."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Read begun answers again with new weights; vLLM always does, the embedded engine else keeps its cache."""
    min_groups_for_streaming_train: PositiveInt | None = None
    """Groups at least that a step trains on as soon as they are there; null waits for the whole step."""
    max_inflight_prompts: PositiveInt | None = None
    """Groups that are being answered at most; null is (max_trajectory_age_steps + 1) * num_prompts_per_step."""
    rollout_timeout_s: Seconds | None = None
    """Time in which a group must be answered, each turn, or it is given up and tried again (ours); null: no limit."""
    stall_timeout_s: Seconds | None = None
    """Time without an answered group or a finished step that ends the run; saves and validations do not count."""
    keep_groups: bool | None = None
    """Write the groups of each step into the folder of the log, which `replay` trains on (ours); null: yes."""
    keep_groups_gb: PositiveFloat = 10.0
    """Disk for kept groups, 1e9 bytes each (ours): the oldest are removed, none that is newer than the last checkpoint.

    Without checkpoints the first steps are kept, and no more than that: a replay begins with them.
    """

    @property
    def off_policy(self) -> bool:
        """Return whether groups may be older than the weights that they train."""
        return self.enabled and self.max_trajectory_age_steps > 0

    def problems(self) -> Iterator[Problem]:
        """Yield a stall that is told before a slow group is given up."""
        rollout, stall = self.rollout_timeout_s, self.stall_timeout_s
        if self.enabled and rollout is not None and stall is not None and stall <= rollout:
            yield Problem(
                "too-small",
                "stall_timeout_s",
                f"{stall:g} is not above rollout_timeout_s: {rollout:g}, so that a slow group would end the run before "
                "it is given up",
                "raise it, or lower rollout_timeout_s",
                ("rollout_timeout_s",),
            )
