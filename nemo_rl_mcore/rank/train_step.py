"""The split train step: a transaction of begin, any number of chunks, then finish or abort.

Chunks add un-normalised loss sums and local gradients. The step's number of tokens (or sequences) is known only at the
end, so the division by it, the one reduction of gradients and the optimizer all belong to `finish`. `whole` has all
rows at once and so knows it before: it may divide and reduce within the backward pass, which gives the same bits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.errors import CodedError
from nemo_rl_mcore.losses.base import EPSILON, LossFunction
from nemo_rl_mcore.rank.agreement import UnequalCallsError
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals

EMPTY_STEP = "no valid sample in the step"
"""Why a step with nothing to train on did not update the weights; other reasons name a number that is not finite."""
COMMITTED_IDS_KEPT = 64
"""How many step_ids are remembered, also by a checkpoint."""


class TrainStepError(CodedError, RuntimeError):
    """A split-step call out of order, or a step whose outcome is unknown; the message says what to call."""


class UnequalChunksError(UnequalCallsError):
    """The ranks were called differently: one adds a chunk to the step that another does not."""


class Phase(Enum):
    """Where a step stands. FAILED has one exit, abort."""

    IDLE = "idle"
    OPEN = "open"
    FAILED = "failed"


def out_of_order(call: str, phase: Phase) -> TrainStepError:
    """Return the error of a call that this phase does not allow, in words that callers of NeMo RL look for."""
    said = {
        Phase.IDLE: "no train step open; call begin_train_step first",
        Phase.OPEN: "a train step is already open; call finish_train_step or abort_train_step first",
        Phase.FAILED: "the step failed; call abort_train_step first",
    }
    return TrainStepError(f"{call}: {said[phase]}", code=f"step-is-{phase.value}")


@dataclass(frozen=True)
class OptimizerOutcome:
    """What an optimizer step did. lr and wd are those it used, before the scheduler advanced."""

    update_successful: bool
    grad_norm: float
    lr: float
    wd: float
    skip_reason: str | None = None


@dataclass(frozen=True)
class StepResult:
    """A finished step: its totals, the optimizer's outcome and the seconds since begin."""

    totals: StepTotals
    outcome: OptimizerOutcome
    elapsed: float


class TrainStepBackend(Protocol):
    """What a step needs of the framework that holds the model."""

    def called_together(self, call: str) -> AbstractContextManager[None]:
        """Return a context that all ranks enter with the same call, or all of them raise UnequalChunksError.

        Inside a call is judged, and each rank raises where one did. It holds no collective.
        """
        ...

    def done_together(self, call: str) -> AbstractContextManager[None]:
        """Return a context that all ranks leave together: each raises where one did inside."""
        ...

    def snapshot(self) -> Any:
        """State outside weights and gradients that a step changes: random generators, counters, biases."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Set the state back that `snapshot` returned."""
        ...

    def zero_grad(self) -> None:
        """Clear all gradients."""
        ...

    def deferred_grad_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes add to local gradients and reduce nothing."""
        ...

    overlaps_grad_sync: bool
    """Whether whole steps reduce within their backward pass; if not, the two calls for that are never made."""

    def reduce_counts(self, data: BatchedDataDict) -> StepTotals:
        """Return what `reduce` will say of these rows' counts, without their metrics; the same result on every rank."""
        ...

    def overlapped_grad_sync(self, factor: float) -> AbstractContextManager[bool]:
        """Inside, the last backward pass of a `forward_backward` multiplies gradients by `factor` and begins to reduce.

        False where it does not, on all ranks: then they are still to be scaled. `finalize_gradients` ends a reduction,
        and so does `zero_grad`; one that has failed on a rank alone is no obstacle to either.
        """
        ...

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int
    ) -> LocalSums:
        """Add the gradients of the rows' un-normalised loss; return its sums on this rank."""
        ...

    def reduce(self, sums: LocalSums) -> StepTotals:
        """Sum over the data-parallel ranks; the same result on every rank."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply the local gradients."""
        ...

    def finalize_gradients(self) -> None:
        """Reduce the gradients over all ranks, once."""
        ...

    def gradient_norm(self) -> float:
        """Return the norm of the reduced gradients over all ranks, before clipping; inf or NaN if any gradient is."""
        ...

    def optimizer_step(self, increment: int) -> bool:
        """Clip, update the weights and, if they were updated, advance the scheduler by `increment` samples."""
        ...

    def learning_rate_and_weight_decay(self) -> tuple[float, float]:
        """Return the values that the next optimizer step uses."""
        ...


@dataclass
class _OpenStep:
    loss_fn: LossFunction
    gbs: int
    mbs: int
    step_id: str | None
    started: float
    snapshot: Any
    sums: LocalSums = field(default_factory=LocalSums)
    chunk_ids: set[str] = field(default_factory=set[str])
    scaled: bool = False
    optimizer_began: bool = False

    @property
    def samples(self) -> int:
        """Return what the scheduler advances by: recipes count samples, whatever rows a loss makes of them."""
        return self.gbs // self.loss_fn.rows_per_sample


class TrainStep:
    """One step at a time: IDLE -> begin -> OPEN -> finish -> IDLE; an exception leaves FAILED, whose exit is abort.

    A failure after the optimizer began to step has an unknown outcome: then abort raises, and says to reload.
    """

    def __init__(self, backend: TrainStepBackend, committed_ids: Iterable[str] = ()):
        self._backend = backend
        self._step: _OpenStep | None = None
        self._phase = Phase.IDLE
        self._resources = ExitStack()
        self.updates = 0
        """Steps committed, skipped ones too."""
        self._committed_ids = deque(committed_ids, maxlen=COMMITTED_IDS_KEPT)
        self._last_result: StepResult | None = None  # of the step just committed, if it had an id

    @property
    def phase(self) -> Phase:
        """Return where the step stands."""
        return self._phase

    @property
    def committed_ids(self) -> tuple[str, ...]:
        """Return the step_ids that cannot be opened again: of the last steps that had one, the oldest first."""
        return tuple(self._committed_ids)

    def begin(
        self,
        loss_fn: LossFunction,
        *,
        gbs: int,
        mbs: int,
        step_id: str | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a step with cleared gradients; `mbs` rows run at once.

        prepare: called where a step may be opened; what it raises leaves none open.

        The scheduler will advance by the samples of `gbs` rows.
        Raises TrainStepError when a step is open, or when `step_id` is one of the last COMMITTED_IDS_KEPT committed.
        """
        with self._backend.called_together("begin_train_step"):
            self._require(Phase.IDLE, "begin_train_step")
            if step_id is not None and step_id in self._committed_ids:
                raise TrainStepError(
                    f"step_id {step_id!r} is already committed; begin_train_step needs a new step_id",
                    code="step-committed",
                )
            prepare()
            self._open(loss_fn, gbs, mbs, step_id)
        self._phase = Phase.OPEN

    def microbatch(
        self,
        data: BatchedDataDict,
        chunk_id: str | None = None,
        check: Callable[[LossFunction], None] = lambda _loss_fn: None,
    ) -> None:
        """Add the gradients and sums of a chunk of rows.

        A repeated `chunk_id` is a TrainStepError; it adds nothing and leaves the step open. So does what `check`
        raises, which is asked about the rows first.
        """
        with self._backend.called_together("train_microbatch"):
            step = self._require(Phase.OPEN, "train_microbatch")
            if chunk_id is not None and chunk_id in step.chunk_ids:
                raise TrainStepError(
                    f"chunk_id {chunk_id!r} was already added to this step; send each chunk once",
                    code="chunk-repeated",
                )
            check(step.loss_fn)
        self._phase = Phase.FAILED  # until the whole chunk is added, on all ranks
        with self._backend.done_together("train_microbatch"):
            self._add(step, data)
        if chunk_id is not None:
            step.chunk_ids.add(chunk_id)
        self._phase = Phase.OPEN

    def finish(self) -> StepResult:
        """Divide, reduce, update the weights, close the step; after a committed step with an id, its result again."""
        with self._backend.called_together("finish_train_step"):
            if self._phase is Phase.IDLE and self._last_result is not None:
                return self._last_result
            step = self._require(Phase.OPEN, "finish_train_step")
        return self._commit(step)

    def whole(self, data: BatchedDataDict, loss_fn: LossFunction, *, gbs: int, mbs: int) -> StepResult:
        """Begin, one chunk and finish, for ranks that were called together: they meet once, when the chunk is added.

        Where the reduction overlaps they meet before it too: from then on each of them takes part in it.
        """
        self._require(Phase.IDLE, "begin_train_step")
        with self._backend.done_together("train"):
            step = self._open(loss_fn, gbs, mbs, None)
            if not self._backend.overlaps_grad_sync:
                self._add(step, data)
        if self._backend.overlaps_grad_sync:
            self._add_overlapped(step, data)
        return self._commit(step)

    def abort(self) -> None:
        """Drop the open or failed step and restore what it changed; nothing to do when idle.

        Raises TrainStepError when the optimizer had begun to step: the weights may be half updated.
        """
        if self._step is None:
            return
        if self._step.optimizer_began:
            raise TrainStepError(
                "the step failed after the optimizer began to step, so the weights are unknown: reload the checkpoint",
                code="weights-unknown",
            )
        self._phase = Phase.FAILED  # until all is restored: an abort that failed can be called again
        self._resources.close()
        self._backend.zero_grad()
        self._backend.restore(self._step.snapshot)
        self._step, self._phase = None, Phase.IDLE

    def _open(self, loss_fn: LossFunction, gbs: int, mbs: int, step_id: str | None) -> _OpenStep:
        step = _OpenStep(loss_fn, gbs, mbs, step_id, time.monotonic(), self._backend.snapshot())
        self._step, self._last_result = step, None
        self._phase = Phase.FAILED  # until the step is wholly open, on all ranks
        self._backend.zero_grad()
        self._resources.enter_context(self._backend.deferred_grad_sync())
        return step

    def _add(self, step: _OpenStep, data: BatchedDataDict) -> None:
        step.sums.add(self._backend.forward_backward(data, step.loss_fn, step.mbs))

    def _add_overlapped(self, step: _OpenStep, data: BatchedDataDict) -> None:
        backend = self._backend
        count = backend.reduce_counts(data).denominator(step.loss_fn.loss_type)
        with backend.done_together("train"):
            if count == 0:
                self._add(step, data)
                return
            with backend.overlapped_grad_sync(_factor(count)) as scaled:
                self._add(step, data)
            step.scaled = scaled

    def _commit(self, step: _OpenStep) -> StepResult:
        self._phase = Phase.FAILED  # until the step is committed
        totals = self._backend.reduce(step.sums)
        outcome = self._update(step, totals)
        if not outcome.update_successful:
            # Finalising the gradients has moved the biases of experts: a step that is skipped moves nothing.
            self._backend.restore(step.snapshot)
        result = StepResult(totals, outcome, time.monotonic() - step.started)
        self._step, self._phase = None, Phase.IDLE
        self.updates += 1
        if step.step_id is not None:
            self._committed_ids.append(step.step_id)
            self._last_result = result
        return result

    def _update(self, step: _OpenStep, totals: StepTotals) -> OptimizerOutcome:
        backend = self._backend
        lr, wd = backend.learning_rate_and_weight_decay()
        kept = OptimizerOutcome(update_successful=False, grad_norm=0.0, lr=lr, wd=wd)
        count = totals.denominator(step.loss_fn.loss_type)
        if count == 0:
            # Adam would still move the weights, by its momentum.
            self._resources.close()
            return replace(kept, skip_reason=EMPTY_STEP)
        if not step.scaled:
            backend.scale_gradients(_factor(count))
        self._resources.close()
        backend.finalize_gradients()
        grad_norm = backend.gradient_norm()
        kept = replace(kept, grad_norm=grad_norm)
        if not math.isfinite(totals.metrics["loss"]):
            return replace(kept, skip_reason=f"the loss is {totals.metrics['loss']}")
        if not math.isfinite(grad_norm):
            return replace(kept, skip_reason=f"the gradient norm is {grad_norm}")
        step.optimizer_began = True
        return replace(kept, update_successful=backend.optimizer_step(step.samples))

    def _require(self, phase: Phase, call: str) -> _OpenStep:
        if self._phase is not phase:
            raise out_of_order(call, self._phase)
        return self._step  # type: ignore[return-value]  # begin's caller ignores it


def _factor(count: float) -> float:
    return 1.0 / (count + EPSILON)
