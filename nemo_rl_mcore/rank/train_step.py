"""The split train step: a transaction of begin, any number of chunks, then finish or abort.

Chunks add un-normalised loss sums and local gradients. The step's number of tokens (or sequences) is known only at the
end, so `finish` divides by it, reduces the gradients once and runs the optimizer. `whole` has all rows at once and
has the number in advance: it may divide and reduce within the backward pass, with bit-identical results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import batched
from typing import Any, Protocol

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.errors import CodedError, RefusedError
from nemo_rl_mcore.losses.base import EPSILON, LossFunction, LossInputType
from nemo_rl_mcore.rank.agreement import UnequalCallsError
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals

EMPTY_STEP = "no valid sample in the step"
"""The skip reason of a step without a valid sample; other reasons name a number that is not finite."""
COMMITTED_IDS_KEPT = 64
"""Number of step_ids that are kept, in checkpoints too."""


class TrainStepError(CodedError, RuntimeError):
    """A split-step call out of order, or a step with an unknown outcome; the message names the call to make."""


class UnequalChunksError(UnequalCallsError):
    """Ranks received different calls: a chunk was sent to only some of them."""


class Phase(Enum):
    """State of a step. `abort` is the only way out of FAILED."""

    IDLE = "idle"
    OPEN = "open"
    FAILED = "failed"


def out_of_order(call: str, phase: Phase) -> TrainStepError:
    """Return the error for a call that this phase does not allow, in the wording that NeMo RL's callers match."""
    remedies = {
        Phase.IDLE: "no train step open; call begin_train_step first",
        Phase.OPEN: "a train step is already open; call finish_train_step or abort_train_step first",
        Phase.FAILED: "the step failed; call abort_train_step first",
    }
    return TrainStepError(f"{call}: {remedies[phase]}", code=f"step-is-{phase.value}")


@dataclass(frozen=True)
class OptimizerOutcome:
    """lr and wd are the values that the step used, before the scheduler advanced."""

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


@dataclass(frozen=True)
class BatchSizes:
    """Rows in an optimizer step over all data-parallel ranks, and in a microbatch; both whole samples.

    Recipes count samples, of which a loss may have several rows each. An episode of several rows counts as one row.
    """

    gbs: int
    mbs: int
    rows_per_sample: int

    @classmethod
    def of(cls, policy: PolicyConfig, loss_fn: LossFunction, gbs: int | None, mbs: int | None) -> BatchSizes:
        """Return the given sizes in rows, or those of the config, converted from samples.

        Raises ValueError for a size that is not a positive multiple of the rows per sample, and for a fused loss if the
        model's head is not.
        """
        # The loss has this switch only for callers of NeMo RL; the model's config decides.
        fused = policy.megatron_cfg.use_fused_linear_logprobs
        if loss_fn.use_fused_linear_logprobs and not fused and loss_fn.input_type is LossInputType.LOGPROB:
            raise RefusedError(
                f"{type(loss_fn).__name__} was made with use_fused_linear_logprobs=True, and this model computes "
                "unfused: set policy.megatron_cfg.use_fused_linear_logprobs: true, or leave the argument out",
                code="fused-loss",
            )
        rows = loss_fn.rows_per_sample
        gbs = policy.train_global_batch_size * rows if gbs is None else gbs
        mbs = policy.train_micro_batch_size * rows if mbs is None else mbs
        for name, size in (("gbs", gbs), ("mbs", mbs)):
            if size < 1 or size % rows:
                raise RefusedError(
                    f"{name} {size} is not a positive multiple of the {rows} rows of a sample of "
                    f"{type(loss_fn).__name__}",
                    code="rows-per-sample",
                )
        return cls(gbs, mbs, rows)

    def of_shard(self, shards: int) -> int:
        """Return a step's rows per shard; ValueError if a sample would be split."""
        if self.gbs % (shards * self.rows_per_sample):
            raise RefusedError(
                f"gbs {self.gbs} does not divide into {shards} data-parallel ranks, {self.rows_per_sample} "
                "rows a sample",
                code="data-parallel-split",
            )
        return self.gbs // shards

    def steps(self, data: BatchedDataDict, shards: int = 1) -> list[BatchedDataDict]:
        """Split `data`, one of `shards` equal shards, into the rows of each step; ValueError if rows are left over."""
        rows, samples = self.of_shard(shards), data.samples(self.rows_per_sample)
        size, unit = len(samples) * self.rows_per_sample, "episodes" if EPISODE in data else "rows"
        if not size or size % rows:
            raise RefusedError(
                f"{size} {unit} are not a multiple of the {rows} that one step takes (gbs {self.gbs} over {shards} "
                "data-parallel ranks)",
                code="rows-per-step",
            )
        steps = batched(samples, rows // self.rows_per_sample)
        return [data.slice(step[0].start, step[-1].stop) for step in steps]


class TrainStepBackend(Protocol):
    """A train step's interface to the framework that holds the model.

    Inside `deferred_grad_sync` backward passes only add to local gradients; `finalize_gradients` reduces them over all
    ranks, once.
    """

    overlaps_grad_sync: bool
    """True if whole steps reduce within their backward pass, by `reduce_counts` and `overlapped_grad_sync`."""

    def called_together(self, call: str) -> AbstractContextManager[None]:
        """Return a context, without a collective inside, for validating a call; an error inside is raised on all ranks.

        All ranks enter it with the same call, or raise UnequalChunksError.
        """
        ...

    def done_together(self, call: str) -> AbstractContextManager[None]:
        """Return a context that, at its end, raises one rank's error on all ranks."""
        ...

    def snapshot(self) -> Any:
        """Return the state that a step changes besides weights and gradients: random generators, counters, biases."""
        ...

    def restore(self, snapshot: Any) -> None: ...
    def zero_grad(self) -> None: ...
    def deferred_grad_sync(self) -> AbstractContextManager[None]: ...

    def reduce_counts(self, data: BatchedDataDict) -> StepTotals:
        """Return the counts that `reduce` will return for these rows, without metrics."""
        ...

    def overlapped_grad_sync(self, factor: float) -> AbstractContextManager[bool]:
        """Multiply gradients by `factor` and start their reduction in a `forward_backward`'s last backward pass.

        Yields False, on all ranks, if it cannot: the gradients must then be scaled afterwards. `finalize_gradients` and
        `zero_grad` finish a started reduction, even one that failed on a single rank.
        """
        ...

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, micro_batch_size: int
    ) -> LocalSums:
        """Add the gradients of the rows' un-normalised loss, and return this rank's sums."""
        ...

    def reduce(self, sums: LocalSums) -> StepTotals:
        """Sum over the data-parallel ranks; every rank gets the same result."""
        ...

    def scale_gradients(self, factor: float) -> None: ...
    def finalize_gradients(self) -> None: ...

    def gradient_norm(self) -> float:
        """Return the gradient norm over all ranks before clipping; inf or NaN if any gradient is."""
        ...

    def optimizer_step(self, increment: int) -> bool:
        """Clip, update the weights and, if they were updated, advance the scheduler by `increment` samples."""
        ...

    def learning_rate_and_weight_decay(self) -> tuple[float, float]: ...


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


class TrainStep:
    """One step at a time: IDLE -> begin -> OPEN -> finish -> IDLE; an exception leads to FAILED, and abort to IDLE.

    After a failure inside the optimizer the weights are unknown: abort raises, and a checkpoint must be reloaded.
    """

    def __init__(self, backend: TrainStepBackend, committed_ids: Iterable[str] = ()):
        self.phase = Phase.IDLE
        self.updates = 0
        """Number of committed steps, including skipped ones."""
        self.committed_ids = tuple(committed_ids)[-COMMITTED_IDS_KEPT:]
        """The last step_ids, oldest first; none of them can be opened again."""
        self._backend = backend
        self._step: _OpenStep | None = None
        self._resources = ExitStack()
        self._last_result: StepResult | None = None  # of the step just committed, if it had an id

    def begin(
        self,
        loss_fn: LossFunction,
        *,
        gbs: int,
        mbs: int,
        step_id: str | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a step with zero gradients; `prepare` is called before, and if it raises, no step is open.

        gbs: rows per step, by which the scheduler advances, in samples. mbs: rows per microbatch.
        Raises TrainStepError if a step is open, or `step_id` is one of the last COMMITTED_IDS_KEPT.
        """
        with self._backend.called_together("begin_train_step"):
            self._require(Phase.IDLE, "begin_train_step")
            if step_id is not None and step_id in self.committed_ids:
                raise TrainStepError(
                    f"step_id {step_id!r} is already committed; begin_train_step needs a new step_id",
                    code="step-committed",
                )
            prepare()
            self._open(loss_fn, gbs, mbs, step_id)
        self.phase = Phase.OPEN

    def microbatch(
        self,
        data: BatchedDataDict,
        chunk_id: str | None = None,
        check: Callable[[LossFunction], None] = lambda _loss_fn: None,
    ) -> None:
        """Add the gradients and sums of a chunk of rows.

        If `check` or a repeated `chunk_id` raises an error, nothing is added and the step stays open.
        """
        with self._backend.called_together("train_microbatch"):
            step = self._require(Phase.OPEN, "train_microbatch")
            if chunk_id is not None and chunk_id in step.chunk_ids:
                raise TrainStepError(
                    f"chunk_id {chunk_id!r} was already added to this step; send each chunk once",
                    code="chunk-repeated",
                )
            check(step.loss_fn)
        self.phase = Phase.FAILED  # until the chunk is added on all ranks
        with self._backend.done_together("train_microbatch"):
            step.sums.add(self._backend.forward_backward(data, step.loss_fn, step.mbs))
        if chunk_id is not None:
            step.chunk_ids.add(chunk_id)
        self.phase = Phase.OPEN

    def finish(self) -> StepResult:
        """Divide, reduce, update the weights and close the step.

        A repeated call after a step with an id returns the same result.
        """
        with self._backend.called_together("finish_train_step"):
            if self.phase is Phase.IDLE and self._last_result is not None:
                return self._last_result
            step = self._require(Phase.OPEN, "finish_train_step")
        return self._commit(step)

    def whole(self, data: BatchedDataDict, loss_fn: LossFunction, *, gbs: int, mbs: int) -> StepResult:
        """Begin, add one chunk and finish, in a call that all ranks make; they synchronize after the chunk.

        With an overlapped reduction they also synchronize before the chunk, since every rank must then take part.
        """
        self._require(Phase.IDLE, "begin_train_step")
        backend = self._backend
        with backend.done_together("train"):
            step = self._open(loss_fn, gbs, mbs, None)
            if not backend.overlaps_grad_sync:
                step.sums.add(backend.forward_backward(data, loss_fn, mbs))
        if backend.overlaps_grad_sync:
            count = backend.reduce_counts(data).denominator(loss_fn.loss_type)
            with backend.done_together("train"):
                # Without a valid sample the divisor would be 0.
                sync = (
                    nullcontext(False)
                    if count == 0
                    else backend.overlapped_grad_sync(1.0 / (count + EPSILON))
                )
                with sync as scaled:
                    step.sums.add(backend.forward_backward(data, loss_fn, mbs))
                step.scaled = scaled
        return self._commit(step)

    def abort(self) -> None:
        """Drop the open or failed step and undo its changes; TrainStepError once the optimizer has started."""
        if self._step is None:
            return
        if self._step.optimizer_began:
            raise TrainStepError(
                "the step failed after the optimizer began to step, so the weights are unknown: reload the checkpoint",
                code="weights-unknown",
            )
        self.phase = Phase.FAILED  # until everything is restored: a failed abort can be repeated
        self._resources.close()
        self._backend.zero_grad()
        self._backend.restore(self._step.snapshot)
        self._step, self.phase = None, Phase.IDLE

    def _open(self, loss_fn: LossFunction, gbs: int, mbs: int, step_id: str | None) -> _OpenStep:
        step = _OpenStep(loss_fn, gbs, mbs, step_id, time.monotonic(), self._backend.snapshot())
        self._step, self._last_result = step, None
        self.phase = Phase.FAILED  # until the step is open on all ranks
        self._backend.zero_grad()
        self._resources.enter_context(self._backend.deferred_grad_sync())
        return step

    def _commit(self, step: _OpenStep) -> StepResult:
        self.phase = Phase.FAILED  # until the step is committed
        totals = self._backend.reduce(step.sums)
        outcome = self._update(step, totals)
        if not outcome.update_successful:
            # `finalize_gradients` has updated the experts' biases: a skipped step must not change anything.
            self._backend.restore(step.snapshot)
        result = StepResult(totals, outcome, time.monotonic() - step.started)
        self._step, self.phase = None, Phase.IDLE
        self.updates += 1
        if step.step_id is not None:
            self.committed_ids = (*self.committed_ids, step.step_id)[-COMMITTED_IDS_KEPT:]
            self._last_result = result
        return result

    def _update(self, step: _OpenStep, totals: StepTotals) -> OptimizerOutcome:
        backend = self._backend
        lr, wd = backend.learning_rate_and_weight_decay()
        kept = OptimizerOutcome(update_successful=False, grad_norm=0.0, lr=lr, wd=wd)
        count = totals.denominator(step.loss_fn.loss_type)
        if count == 0:
            # Adam's momentum would still move the weights.
            self._resources.close()
            return replace(kept, skip_reason=EMPTY_STEP)
        if not step.scaled:
            backend.scale_gradients(1.0 / (count + EPSILON))
        self._resources.close()
        backend.finalize_gradients()
        grad_norm = backend.gradient_norm()
        kept = replace(kept, grad_norm=grad_norm)
        if not math.isfinite(totals.metrics["loss"]):
            return replace(kept, skip_reason=f"the loss is {totals.metrics['loss']}")
        if not math.isfinite(grad_norm):
            return replace(kept, skip_reason=f"the gradient norm is {grad_norm}")
        step.optimizer_began = True
        # The scheduler counts samples, of which a loss may have several rows each.
        samples = step.gbs // step.loss_fn.rows_per_sample
        return replace(kept, update_successful=backend.optimizer_step(samples))

    def _require(self, phase: Phase, call: str) -> _OpenStep:
        if self.phase is not phase:
            raise out_of_order(call, self.phase)
        return self._step  # type: ignore[return-value]  # begin's caller ignores it
