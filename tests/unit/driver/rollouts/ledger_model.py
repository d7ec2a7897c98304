"""What must be true of a Ledger, kept beside it from the events alone: nothing here is asked of the Ledger."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from nemo_rl_mcore.driver.rollouts.events import Token
from nemo_rl_mcore.driver.rollouts.ledger import Limits, StepState


@dataclass
class LedgerModel:
    """valid, void: attempts, the former with the version published at their dispatch. oldest: version of a group.

    first: the version of the start. chunks: of the open step. steps: chunks of every finished one.
    """

    limits: Limits
    first: int
    valid: dict[Token, int] = field(default_factory=dict)
    void: list[Token] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    oldest: dict[int, int] = field(default_factory=dict)
    chunks: list[list[int]] = field(default_factory=list)
    steps: dict[int, list[list[int]]] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    phase: StepState = StepState.IDLE
    saved_at: int = 0

    def __post_init__(self):
        self.version = self.published = self.saved_at = self.first

    @property
    def leased(self) -> set[int]:
        return {p for chunk in self.chunks for p in chunk}

    @property
    def trained(self) -> list[int]:
        return [p for chunks in self.steps.values() for chunk in chunks for p in chunk]

    def may_dispatch(self) -> bool:
        n = self.limits.groups_per_step
        live = len(self.valid) + len(self.ready) + len(self.leased)
        steps = min(self.limits.max_age + self.published + 1, self.limits.last_step)
        early = self.phase in (StepState.IDLE, StepState.OPEN) and self.version < self.limits.last_step
        spare = self.limits.spare if early else 0
        return live + self.version * n < steps * n + spare

    def next_to_dispatch(self) -> int:
        taken = {token.position for token in self.valid} | self.ready | self.leased
        return next(p for p in self.not_dropped() if p not in taken.union(self.trained))

    def next_to_train(self) -> Iterator[int]:
        """The groups that the open step takes before any other, without end."""
        done = self.leased.union(self.trained)
        return (p for p in self.not_dropped() if p not in done)

    def not_dropped(self) -> Iterator[int]:
        return (p for p in count(self.first * self.limits.groups_per_step) if p not in self.dropped)

    def commit(self, token: Token, oldest: int) -> None:
        self.retire(token)
        self.ready.add(token.position)
        self.oldest[token.position] = oldest

    def fail(self, token: Token, reason: str) -> bool:
        """Whether the group is dropped."""
        self.retire(token)
        failures = self.failures[token.position] = self.failures.get(token.position, 0) + 1
        if failures < self.limits.max_attempts:
            return False
        self.dropped[token.position] = reason
        return True

    def leave_out(self, position: int, reason: str) -> None:
        self.ready.remove(position)
        self.dropped[position] = reason

    def retire(self, token: Token) -> None:
        del self.valid[token]
        self.void.append(token)

    def lease(self, chunk: list[int]) -> None:
        self.ready -= {*chunk}
        self.chunks.append(chunk)

    def finish(self) -> None:
        self.version += 1
        self.steps[self.version], self.chunks, self.phase = self.chunks, [], StepState.COMMITTED

    def give_up(self) -> None:
        self.ready |= self.leased
        self.chunks, self.phase = [], StepState.IDLE

    def to_redo(self) -> list[int]:
        return [step for step in self.steps if step > self.saved_at]

    def copy(self) -> "LedgerModel":
        return copy.deepcopy(self)

    def resumed(self, void: list[Token]) -> "LedgerModel":
        """This model as that of a run which goes on from here; void: what was dispatched in vain since."""
        model = self.copy()
        model.valid, model.void, model.saved_at = {}, void, self.version
        model.published, model.phase = self.version, StepState.IDLE  # engines are given what was saved
        return model
