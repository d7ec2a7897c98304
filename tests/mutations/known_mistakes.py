"""Known mistakes, made in memory one at a time, each with the checks of the test suite that may catch it.

A mistake is made in a rank's process, which has Megatron; the process that reports has not. The tests of
tests/distributed/test_mutations.py run them.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nemo_rl_mcore.config import AdvantageEstimatorConfig, ClippedPGLossConfig
from nemo_rl_mcore.driver.algorithms import advantages
from nemo_rl_mcore.driver.algorithms.advantages import GroupStatistics, make_advantage_estimator
from nemo_rl_mcore.losses.base import valid_counts
from nemo_rl_mcore.ops._groups import all_gather_rows
from nemo_rl_mcore.ops.sampling import SamplingParams
from nemo_rl_mcore.rank.sums import LocalSums, StepTotals
from nemo_rl_mcore.rank.train_step import TrainStep
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker


@dataclass(frozen=True)
class Check:
    """A function of a test file, or of a table, as it runs on gloo ranks, and what is expected of the results."""

    module: str
    function: str
    args: tuple[Any, ...]
    passes: Callable[[list[Any]], bool]
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.module}.{self.function}, {self.ranks} rank{'s' * (self.ranks > 1)}"


@dataclass(frozen=True)
class Mutation:
    apply: Callable[[], AbstractContextManager[Any]]
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__

    @property
    def file(self) -> str:
        return inspect.unwrap(self.apply).__code__.co_filename


def run_check(mistake: tuple[str, str] | None, module: str, function: str, args: tuple[Any, ...]) -> Any:
    """In a rank: the check's function under the mutation of this file and name."""
    for folder in (Path(__file__).parent, Path(__file__).parents[1]):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    made: AbstractContextManager[Any] = nullcontext()
    if mistake is not None:
        file, name = mistake
        made = getattr(importlib.import_module(Path(file).stem), name)()
    with made:
        return getattr(importlib.import_module(module), function)(*args)


def failure(ranks: Callable[[int], Any], check: Check, mutation: Mutation | None = None) -> str | None:
    mistake = None if mutation is None else (mutation.file, mutation.name)
    try:
        answers = ranks(check.ranks).run(run_check, mistake, check.module, check.function, check.args)
    except AssertionError as error:  # a rank raised
        lines = str(error).splitlines()
        return next((line for line in reversed(lines) if "Error" in line or "Failed" in line), lines[-1])
    return None if check.passes(answers) else f"found {answers}"


def caught_by(ranks: Callable[[int], Any], mutation: Mutation) -> tuple[Check, str] | None:
    for check in mutation.checks:
        reason = failure(ranks, check, mutation)
        if reason is not None:
            return check, reason
    return None


# The train step

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


# Context parallelism


def _equal(answers: list[Any]) -> bool:
    return all(difference < 1e-5 for difference in answers)


ROWS, PACKED, EXPERTS = (
    Check("test_microbatching", "against_data_parallel", (way, experts), _equal, ranks=2)
    for way, experts in (("rows-8", False), ("packing-29", False), ("rows-2", True))
)


def gradients_of_keys_and_values_twice() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import batching, layer_specs

    def twice(*args: Any, **kwargs: Any) -> Any:
        gathered = batching.gather_in_order(*args, **kwargs)
        if gathered.requires_grad:
            gathered.register_hook(lambda gradient: 2 * gradient)
        return gathered

    return patch.object(layer_specs, "gather_in_order", twice)


def gradients_of_whole_losses_summed() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import batching

    plain = batching.gather_in_order
    return patch.object(
        batching,
        "gather_in_order",
        lambda local, borders, **_: plain(local, borders, grad_of_every_rank_is_whole=False),
    )


def context_ranks_counted_as_data_parallel() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import parallel_groups

    return patch.object(
        parallel_groups,
        "gather_over_data_parallel_ranks",
        lambda numbers: all_gather_rows(numbers[None], parallel_groups.group("data_context")),
    )


def contiguous_slices() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import batching, layer_specs

    def contiguous(borders: tuple[int, ...], ranks: int) -> torch.Tensor:
        return torch.arange(borders[-1]).view(ranks, -1)

    stack = ExitStack()
    for module in (batching, layer_specs):
        stack.enter_context(patch.object(module, "zigzag", contiguous))
    return stack


def borders_of_packed_samples_forgotten() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import layer_specs

    return patch.object(layer_specs, "bisect_right", lambda _borders, _position: 1)


def balance_counted_for_each_context_rank() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import parallel_groups

    plain = parallel_groups.group
    return patch.object(
        parallel_groups, "group", lambda kind: plain("tensor" if kind == "tensor_context" else kind)
    )


def rotary_positions_of_the_other_rank() -> AbstractContextManager[Any]:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    from nemo_rl_mcore.rank.megatron import batching

    def of_the_other(positions: Any, _dimension: int, _group: Any) -> Any:
        ranks = batching.parallel_groups.group("context")
        other = (ranks.rank() + 1) % ranks.size()
        return positions[batching.zigzag((0, len(positions)), ranks.size())[other]]

    return patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", of_the_other)


# Features that meet


def _close(found: Any, wanted: Any, tolerance: float) -> bool:
    return bool(abs(found - wanted).max() <= tolerance)


DEVIATION = Check(
    "known_mistakes", "advantage_of_the_only_winner", (), lambda found: abs(found[0] - 0.9) < 1e-6
)
BALANCE = Check(
    "test_moe",
    "balancing_gradient_and_oracle",
    ("aux_loss", False, 2, (3, 5)),
    lambda found: _close(*found[0], 2e-6),
)
PREDICTION = Check(
    "test_mtp", "gradients_and_oracle", (False, 2, (3, 5)), lambda found: max(found[0][0].values()) < 1e-4
)
REFERENCE = Check(
    "test_backend_contract",
    "holds",
    ("the_temperature_divides_the_logits", "megatron", None),
    lambda _found: True,
)


def advantage_of_the_only_winner() -> float:
    """One answer of eight earns 1, the others 0.1 each."""
    rewards = torch.tensor([0.1] * 7 + [1.0])
    estimator = make_advantage_estimator(AdvantageEstimatorConfig(), ClippedPGLossConfig())
    advantages = estimator.compute_advantage(
        prompt_ids=torch.zeros(8).long(), rewards=rewards, mask=torch.ones(8, 2)
    )
    return float(advantages[-1, 0])


def deviation_by_cancelling_sums() -> AbstractContextManager[Any]:
    """The mean of squares less the square of the mean, with the row taken out of the sums of its group."""

    def statistics(_prompt_ids: Any, rewards: Any, *, leave_one_out: bool) -> GroupStatistics:
        rewards = rewards.double()
        count = len(rewards) - 1
        mean = (rewards.sum() - rewards) / count
        of_squares = (rewards.square().sum() - rewards.square()) / count
        variance = (of_squares - mean.square()).clamp(min=0) * count / (count - 1)
        return GroupStatistics(baseline=mean, std=variance.sqrt())

    return patch.object(advantages, "group_statistics", statistics)


def _scaled_terms(**factors: float) -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron.auxiliary_losses import AuxiliaryLosses

    terms = AuxiliaryLosses.terms

    def scaled(self: AuxiliaryLosses, *args: Any) -> Any:
        right = terms(self, *args)
        return right and replace(right, **{name: getattr(right, name) * by for name, by in factors.items()})

    return patch.object(AuxiliaryLosses, "terms", scaled)


def balance_of_experts_scaled_twice() -> AbstractContextManager[Any]:
    return _scaled_terms(router=2.0)


def prediction_layers_scaled_twice() -> AbstractContextManager[Any]:
    return _scaled_terms(prediction=2.0)


def reference_read_at_another_temperature() -> AbstractContextManager[Any]:
    """The reference's log-probabilities at the sampling temperature, whatever the worker was told."""
    read = MegatronPolicyWorker.get_reference_policy_logprobs

    def at_sampling(self: MegatronPolicyWorker, **given: Any) -> Any:
        forward = self.backend.forward
        passes = replace(forward.passes, sampling=SamplingParams(self.policy.generation.temperature))
        with patch.dict(forward.__dict__, passes=passes):
            return read(self, **given)

    return patch.object(MegatronPolicyWorker, "get_reference_policy_logprobs", at_sampling)


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
    Mutation(repeated_chunk_is_added, (SPLIT,)),
    Mutation(empty_step_is_stepped, (SKIP,)),
    Mutation(hooks_act_in_every_microbatch, (OVERLAP,)),
    Mutation(reductions_started_twice, (OVERLAP,)),
    Mutation(reduced_before_the_division, (OVERLAP,)),
    Mutation(reductions_in_flight_are_forgotten, (OVERLAP_FAILURE,)),
    Mutation(gradients_of_keys_and_values_twice, (ROWS,)),
    Mutation(gradients_of_whole_losses_summed, (ROWS,)),
    Mutation(context_ranks_counted_as_data_parallel, (ROWS,)),
    Mutation(contiguous_slices, (ROWS,)),
    Mutation(borders_of_packed_samples_forgotten, (PACKED,)),
    Mutation(balance_counted_for_each_context_rank, (EXPERTS,)),
    Mutation(rotary_positions_of_the_other_rank, (ROWS,)),
    Mutation(deviation_by_cancelling_sums, (DEVIATION,)),
    Mutation(balance_of_experts_scaled_twice, (BALANCE,)),
    Mutation(prediction_layers_scaled_twice, (PREDICTION,)),
    Mutation(reference_read_at_another_temperature, (REFERENCE,)),
)
