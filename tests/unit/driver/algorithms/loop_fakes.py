"""The loop over fakes of an algorithm, its models and the engine; something may happen in the middle of a step."""

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from algorithm_fakes import FakeModel, Notes, recipe

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.algorithm import StepOutcome
from nemo_rl_mcore.driver.algorithms.loop import TrainingLoop
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.rollouts.scheduler import Step

BATCH = BatchedDataDict(
    rewards=torch.tensor([1.0]), prompt_index=torch.tensor([7]), sample_index=torch.tensor([0])
)
Events = dict[tuple[str, int], Callable[[], object]]
"""What happens in the middle of which part of which step."""


@dataclass
class FakeAlgorithm:
    """Reports the number of its step, and as many optimizer steps as `reasons` has for it."""

    calls: list[str]
    reasons: dict[int, list[str | None]] = field(default_factory=dict)
    events: Events = field(default_factory=dict)

    @property
    def collector(self):
        return SimpleNamespace(generation=FakeEngine(self.calls))

    @contextmanager
    def open_step(self, number):
        yield Step(number)

    def judge(self, step):
        self.calls.append(f"step {step.number}")
        self._meet("prepare", step.number)

    def update(self, opened, judged):
        step = opened.number
        self._meet("update", step)
        return StepOutcome(
            {"train/number": float(step), "train/loss": float(step)}, self.reasons.get(step, [None]), BATCH
        )

    def redo(self, step):
        self.calls.append(f"redo {step}")
        self._meet("redo", step)
        return StepOutcome({"train/loss": float(step)}, [None], BATCH)

    def checkpointed(self, step): ...

    def validate(self, step):
        self.calls.append(f"validate {step}")
        self._meet("validate", step)
        return {"validation/number": float(step)}

    def _meet(self, part, step):
        if (event := self.events.get((part, step))) is not None:
            event()
            self.calls.append(f"{part} {step} goes on")


class FakeEngine:
    def __init__(self, calls):
        self.calls = calls

    def update_weights(self, version):
        self.calls.append(f"weights {version}")

    def offload(self):
        self.calls.append("asleep")


@dataclass
class LoopRun:
    """A run, which `go` starts: what was called, in which order, and what was noted."""

    config: object
    checkpoints: RunCheckpoints
    algorithm: FakeAlgorithm
    notes: Notes
    models: dict[str, FakeModel]

    @property
    def calls(self):
        return self.algorithm.calls

    def go(self):
        engine = FakeEngine(self.calls)
        loop = TrainingLoop(self.config, self.algorithm, self.models, engine, self.notes, self.checkpoints)
        deque(loop.steps(), maxlen=0)  # to its end


def loop_run(loop=None, checkpoints=None, reasons=None, events=None, algorithm="grpo", **top):
    calls = []
    config = recipe(algorithm, **{algorithm: {"max_num_steps": 3} | (loop or {})}, **top)
    models = {"policy": FakeModel(calls, "policy"), "value": FakeModel(calls, "value")}
    fake = FakeAlgorithm(calls, reasons or {}, events or {})
    return LoopRun(config, checkpoints or RunCheckpoints(), fake, Notes(), models)
