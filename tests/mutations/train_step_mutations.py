"""Break the train step in memory, one known mistake at a time, and show which check of the test suite catches it.

    .venv/bin/python tests/mutations/train_step_mutations.py

Prints a table, mutation -> check. The exit status is 1 if a mutation survives its checks, or a check fails unmutated.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nemo_rl_mcore.losses.base import valid_counts
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals
from nemo_rl_mcore.rank.train_step import TrainStep

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations.harness import Check, Mutation, run_table

ROUNDING = 1e-5
SKIPPED = {"no valid sample in the step": [], "the loss is nan": []}


def _small_errors(answers: list[Any]) -> bool:
    return all(max(errors) < ROUNDING for errors in answers)


def _overlaps(in_flight: list[list[int]]) -> bool:
    """In each step but the first, in the last backward pass and no other."""
    return all(passes[-1] and not any(passes[:-1]) for passes in in_flight[1:])


SPLIT = Check(
    "test_backend_contract", "holds", ("a_split_step_is_the_whole_one", "megatron", None), lambda found: True
)
SKIP = Check("test_failure_injection", "traces_of_skipped_steps", ({},), lambda found: found == [SKIPPED])
TRACES = Check("test_failure_injection", "traces_after_a_chunk", (), lambda found: found == [{}])
MACHINE = Check("test_step_machine", "random_sequences_of_calls", (), lambda found: found[0][1] > 0)
GRADIENT = Check("test_step_gradients", "gradient_errors", ({}, True, (3,)), _small_errors)
GRADIENT_2 = Check(GRADIENT.module, GRADIENT.function, GRADIENT.args, GRADIENT.passes, ranks=2)
OVERLAP = Check(
    "test_overlapped_grad_sync",
    "compared",
    ({},),
    lambda found: all(rank[:2] == ([], 0.0) and _overlaps(rank[2]) for rank in found),
    ranks=2,
)
OVERLAP_FAILURE = Check(
    "test_overlapped_grad_sync", "traces_after_a_backward_pass", (), lambda found: found == [{}, {}], ranks=2
)


# The mutations. Each is applied in a rank's process, which has Megatron; the process that reports has not.


def finalize_per_chunk() -> AbstractContextManager[Any]:
    once = TrainStep.microbatch

    def microbatch(self: TrainStep, *args: Any) -> None:
        once(self, *args)
        self._backend.finalize_gradients()

    return patch.object(TrainStep, "microbatch", microbatch)


def missing_division() -> AbstractContextManager[Any]:
    return _backend_without("scale_gradients")


@contextmanager
def mean_of_chunk_means() -> Iterator[None]:
    from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend

    added, scaled, chunks = MegatronTrainBackend.forward_backward, MegatronTrainBackend.scale_gradients, 0

    def forward_backward(self: MegatronTrainBackend, data: Any, *args: Any) -> Any:
        nonlocal chunks
        chunks += 1
        buffers = [buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers]
        before = [buffer.clone() for buffer in buffers]
        sums = added(self, data, *args)
        _, tokens = valid_counts(data)
        for buffer, old in zip(buffers, before, strict=True):
            buffer.sub_(old).div_(max(float(tokens), 1.0)).add_(old)
        return sums

    def scale_gradients(self: MegatronTrainBackend, factor: float) -> None:
        nonlocal chunks
        scaled(self, 1.0 / chunks)
        chunks = 0

    with (
        patch.object(MegatronTrainBackend, "forward_backward", forward_backward),
        patch.object(MegatronTrainBackend, "scale_gradients", scale_gradients),
    ):
        yield


def forgotten_finalize() -> AbstractContextManager[Any]:
    return _backend_without("finalize_gradients")


def hooks_never_restored() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend

    @contextmanager
    def hold_back(self: MegatronTrainBackend) -> Iterator[None]:
        config = self.config
        config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = None, nullcontext, None
        with ExitStack() as stack:
            for chunk in self._wrapped:
                stack.enter_context(chunk.no_sync())
            yield

    return patch.object(MegatronTrainBackend, "deferred_grad_sync", hold_back)


def scheduler_advances_on_a_skipped_step() -> AbstractContextManager[Any]:
    update = TrainStep._update

    def advancing(self: TrainStep, step: Any, totals: Any) -> Any:
        outcome = update(self, step, totals)
        if not outcome.update_successful:
            self._backend.scheduler.step(step.gbs)
        return outcome

    return patch.object(TrainStep, "_update", advancing)


def finalize_without_reduction() -> AbstractContextManager[Any]:
    from megatron.core.distributed import DistributedDataParallel

    return patch.object(DistributedDataParallel, "finish_grad_sync", _nothing)


def counts_of_one_rank() -> AbstractContextManager[Any]:
    reduce = LocalSums.reduce
    return patch.object(
        LocalSums, "reduce", lambda self, _gather: reduce(self, lambda numbers: numbers[None])
    )


def begin_without_zero_grad() -> AbstractContextManager[Any]:
    return _step_without("begin", "zero_grad")


def abort_without_zero_grad() -> AbstractContextManager[Any]:
    return _step_without("abort", "zero_grad")


def abort_without_rng_restore() -> AbstractContextManager[Any]:
    return _backend_without("restore")


def repeated_chunk_is_added() -> AbstractContextManager[Any]:
    microbatch = TrainStep.microbatch
    return patch.object(
        TrainStep,
        "microbatch",
        lambda self, data, _chunk_id=None, *check: microbatch(self, data, None, *check),
    )


def empty_step_is_stepped() -> AbstractContextManager[Any]:
    count = StepTotals.denominator
    return patch.object(StepTotals, "denominator", lambda self, loss_type: max(count(self, loss_type), 1.0))


def hooks_act_in_every_microbatch() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import train_backend

    held_back = train_backend._HeldBack
    return patch.object(held_back, "__enter__", held_back.__exit__)


def reductions_started_twice() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import train_backend

    def start(groups: list[Any]) -> None:
        for group in groups:
            group.start_grad_sync()

    return patch.object(train_backend, "start_reductions", start)


def reduced_before_the_division() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import train_backend

    return patch.object(train_backend, "_multiplied_by", lambda *_args: nullcontext())


def reductions_in_flight_are_forgotten() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import train_backend
    from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend

    clear = MegatronTrainBackend.zero_grad

    def forgetful(self: MegatronTrainBackend) -> None:
        with patch.object(train_backend, "bucket_groups", lambda _chunks: []):
            clear(self)

    return patch.object(MegatronTrainBackend, "zero_grad", forgetful)


def _nothing(*_args: Any, **_options: Any) -> None: ...


def _backend_without(call: str) -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend

    return patch.object(MegatronTrainBackend, call, _nothing)


def _step_without(step_call: str, backend_call: str) -> AbstractContextManager[Any]:
    """The step's call as it is, but for a call of the backend that it leaves out."""
    whole = getattr(TrainStep, step_call)

    def without(self: TrainStep, *args: Any, **options: Any) -> Any:
        with patch.object(self._backend, backend_call, _nothing):
            return whole(self, *args, **options)

    return patch.object(TrainStep, step_call, without)


MUTATIONS = (
    Mutation(finalize_per_chunk, (SPLIT, GRADIENT_2)),
    Mutation(missing_division, (SPLIT, GRADIENT)),
    Mutation(mean_of_chunk_means, (SPLIT,)),
    Mutation(forgotten_finalize, (SPLIT, GRADIENT_2)),
    Mutation(hooks_never_restored, (TRACES,)),
    Mutation(scheduler_advances_on_a_skipped_step, (SKIP,)),
    Mutation(finalize_without_reduction, (SPLIT, GRADIENT_2)),
    Mutation(counts_of_one_rank, (SPLIT, GRADIENT_2)),
    Mutation(begin_without_zero_grad, (SPLIT, GRADIENT)),
    Mutation(abort_without_zero_grad, (TRACES,)),
    Mutation(abort_without_rng_restore, (TRACES,)),
    Mutation(repeated_chunk_is_added, (MACHINE,)),
    Mutation(empty_step_is_stepped, (SKIP,)),
    Mutation(hooks_act_in_every_microbatch, (OVERLAP,)),
    Mutation(reductions_started_twice, (OVERLAP,)),
    Mutation(reduced_before_the_division, (OVERLAP,)),
    Mutation(reductions_in_flight_are_forgotten, (OVERLAP_FAILURE,)),
)


if __name__ == "__main__":
    sys.exit(run_table(MUTATIONS))
