"""How much faster an asynchronous run is, by how old groups may be: discrete events on the ledger, without any model.

  python benchmarks/async_simulation.py
  python benchmarks/async_simulation.py --slots 32 --tail 1.2

The time of a rollout is Pareto distributed: most are short, few are very long. Engines answer `slots` groups at a time;
the trainer takes a step's groups one by one as they come, in order, and then publishes at once. Printed are seconds a
step, how many times as fast as with groups of age 0 that is, and the share of time in which the trainer works.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from nemo_rl_mcore.driver.rollouts.events import Segment, Token
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, Limits, StepState

LONGEST = 30
"""The longest rollout, in shortest ones: where a run cuts its responses."""


@dataclass(frozen=True)
class Run:
    """rollout_s: the shortest rollout. train_s: a step. tail: the exponent of Pareto's distribution."""

    max_age: int
    groups: int
    slots: int
    steps: int
    tail: float
    rollout_s: float
    train_s: float

    def duration(self, position: int) -> float:
        """Seconds that a group takes, the same in every run."""
        drawn = random.Random(f"rollout {position}").paretovariate(self.tail)
        return self.rollout_s * min(drawn, LONGEST)


@dataclass
class Simulation:
    """The clock, what will happen when, and who is busy."""

    run: Run
    now: float = 0.0
    trained_s: float = 0.0
    training: bool = False
    generating: int = 0
    waiting: deque[Token] = field(default_factory=deque)
    future: list[tuple[float, int, Token | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(self.run.groups, self.run.max_age, self.run.steps, max_attempts=1)
        self.ledger = Ledger(limits, lambda event: None)

    def simulate(self) -> None:
        self.start_what_can()
        while self.future:
            self.now, _, token = heapq.heappop(self.future)
            if token is None:
                self.training = False
            else:
                self.generating -= 1
                # Versions do not matter here: that of the dispatch is allowed, and so is any that came since.
                self.ledger.commit(token, [Segment(0, self.ledger.version)])
            self.start_what_can()
        assert self.ledger.version == self.run.steps

    def start_what_can(self) -> None:
        self.train()
        while self.ledger.may_dispatch():
            self.waiting.append(self.ledger.dispatch())
        while self.waiting and self.generating < self.run.slots:
            token = self.waiting.popleft()
            self.generating += 1
            self.happens_in(self.run.duration(token.position), token)

    def train(self) -> None:
        """Begin with the groups that are there, and end the step when it has had them all."""
        ledger = self.ledger
        if self.training:
            return
        if ledger.step is StepState.OPEN and not ledger.room():
            ledger.finishing()
            ledger.finish()
            ledger.publish()
            ledger.forget(ledger.version)
        if ledger.step is StepState.IDLE and ledger.version < self.run.steps:
            ledger.begin()
        if chunk := ledger.leasable():
            ledger.lease(chunk)
            seconds = self.run.train_s * len(chunk) / self.run.groups
            self.training = True
            self.trained_s += seconds
            self.happens_in(seconds, None)

    def happens_in(self, seconds: float, token: Token | None) -> None:
        heapq.heappush(self.future, (self.now + seconds, -1 if token is None else token.position, token))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--groups", type=int, default=16, help="groups of a step")
    parser.add_argument("--slots", type=int, default=16, help="groups that the engines answer at a time")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tail", type=float, default=1.5)
    parser.add_argument("--rollout_s", type=float, default=0.1)
    parser.add_argument("--train_s", type=float, default=0.1)
    asked = vars(parser.parse_args())
    first = None
    print(f"{'max age':>8} {'s a step':>10} {'times':>8} {'trainer':>8}")
    for age in asked.pop("ages"):
        simulation = Simulation(Run(max_age=age, **asked))
        simulation.simulate()
        a_step = simulation.now / asked["steps"]
        first = first or a_step
        print(f"{age:8} {a_step:10.3f} {first / a_step:8.2f} {simulation.trained_s / simulation.now:8.2f}")


if __name__ == "__main__":
    main()
