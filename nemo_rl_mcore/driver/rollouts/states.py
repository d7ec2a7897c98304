"""Name the states of groups and of the train step of a run, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nemo_rl_mcore.errors import CodedError


class GroupState(Enum):
    """State of a group. It is live while INFLIGHT, READY or LEASED; TRAINED and DROPPED are for good.

    DROPPED are groups that cannot be answered, and answered ones that nothing is trained on.
    """

    PENDING = "pending"
    INFLIGHT = "inflight"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class StepState(Enum):
    """State of the train step: IDLE, OPEN, FINISHING, COMMITTED until its weights are published, IDLE again."""

    IDLE = "idle"
    OPEN = "open"
    FINISHING = "finishing"
    COMMITTED = "committed"


class LedgerError(CodedError, RuntimeError):
    """An event that the state does not allow, or a state that cannot be: a mistake of the controller or an engine."""


@dataclass(frozen=True)
class Limits:
    """Of a run. max_age: versions that a group may be behind when it is trained. max_attempts: that may fail.

    spare: groups that may be asked for beyond those of the steps, for dynamic sampling to leave some out.
    order: a name of `order.ORDERS`.
    groups_key, age_key: where a recipe of the run's algorithm sets the first two, for messages.
    """

    groups_per_step: int
    max_age: int
    last_step: int
    max_attempts: int
    spare: int = 0
    order: str = "in_order"
    groups_key: str = "num_prompts_per_step"
    age_key: str = "max_trajectory_age_steps"

    def __post_init__(self) -> None:
        least = (
            ("groups_per_step", self.groups_per_step, 1),
            ("max_age", self.max_age, 0),
            ("last_step", self.last_step, 0),
            ("max_attempts", self.max_attempts, 1),
            ("spare", self.spare, 0),
        )
        for name, value, lowest in least:
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")


@dataclass
class Group:
    """A group that is neither trained nor dropped. min_version: a lower bound of its tokens' versions."""

    position: int
    attempt: int = 0
    failures: int = 0
    min_version: int = 0
    state: GroupState = GroupState.PENDING
