"""The state machine of the split step, on a fake backend that writes down what it was asked.

Any sequence of calls and failures, against a small model of the documented table of phases; and single steps.
"""

import copy
import math
from functools import partial

import pytest
import torch
from fake_backend import FakeBackend, InjectedError, SumOfRewards, rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.losses import ClippedPGLossFn, DPOLossFn, NLLLossFn
from nemo_rl_mcore.losses.base import EPSILON, LossType
from nemo_rl_mcore.rank.train_step import EMPTY_STEP, BatchSizes, Phase, TrainStep, TrainStepError
from nemo_rl_mcore.recipe.load import load_config


def begun(loss_type=LossType.TOKEN_LEVEL, **options):
    backend = FakeBackend()
    step = TrainStep(backend)
    step.begin(SumOfRewards(loss_type), gbs=4, mbs=2, **options)
    return step, backend


@pytest.mark.parametrize(
    ("loss_type", "count"), [(LossType.TOKEN_LEVEL, 6.0), (LossType.SEQUENCE_LEVEL, 3.0)]
)
def test_uneven_chunks_are_divided_once_by_the_whole_count(loss_type, count):
    step, backend = begun(loss_type)
    step.microbatch(rows([1.0]))
    step.microbatch(rows([2.0, 6.0]))
    result = step.finish()
    assert backend.factors == [pytest.approx(1 / (count + EPSILON))]
    assert result.totals.metrics["loss"] == pytest.approx(9 / 6)
    assert (result.totals.valid_seqs, result.totals.valid_toks) == (3.0, 6.0)
    assert backend.calls == [
        *("snapshot", "zero_grad", "defer", "forward_backward", "forward_backward"),
        *("reduce", "lr", "scale", "finalize", "norm", "optimizer"),
    ]
    assert backend.samples == 4
    assert (result.outcome.lr, result.outcome.wd, result.outcome.grad_norm) == (0.5, 0.25, 2.0)
    assert step.phase is Phase.IDLE


@pytest.mark.parametrize(
    ("loss_type", "count"), [(LossType.TOKEN_LEVEL, 9.0), (LossType.SEQUENCE_LEVEL, 3.0)]
)
def test_a_whole_step_that_overlaps_is_divided_before_its_backward_pass(loss_type, count):
    backend = FakeBackend()
    backend.overlaps_grad_sync = True
    result = TrainStep(backend).whole(rows([1.0, 2.0, 6.0], tokens=4), SumOfRewards(loss_type), gbs=4, mbs=2)
    assert backend.factors == [1 / (count + EPSILON)]
    assert backend.calls == [
        *("snapshot", "zero_grad", "defer", "counts", "overlap", "forward_backward"),
        *("reduce", "lr", "finalize", "norm", "optimizer"),
    ]
    assert result.outcome.update_successful


def test_a_whole_step_without_a_valid_sample_reduces_nothing():
    backend = FakeBackend()
    backend.overlaps_grad_sync = True
    result = TrainStep(backend).whole(rows([1.0], valid=False), SumOfRewards(), gbs=4, mbs=2)
    assert result.outcome.skip_reason == EMPTY_STEP
    assert (backend.factors, backend.finalized) == ([], 0)


def test_calls_out_of_order_are_told_in_the_words_that_callers_of_nemo_rl_look_for():
    step, _ = begun()
    with pytest.raises(RuntimeError, match="already open"):
        step.begin(SumOfRewards(), gbs=4, mbs=2)
    step.abort()
    with pytest.raises(RuntimeError, match="no train step open"):
        step.finish()


@pytest.mark.parametrize("chunks", [[], [rows([1.0, 2.0], valid=False)]], ids=["no-chunk", "masked"])
def test_an_empty_step_never_reaches_the_optimizer(chunks):
    step, backend = begun()
    for chunk in chunks:
        step.microbatch(chunk)
    result = step.finish()
    assert result.outcome.skip_reason == EMPTY_STEP
    assert not result.outcome.update_successful
    assert not {"scale", "finalize", "optimizer"} & set(backend.calls)
    assert backend.synchronised


def test_a_loss_or_gradient_that_is_not_finite_is_skipped_with_its_reason():
    step, backend = begun()
    step.microbatch(rows([math.nan]))
    assert step.finish().outcome.skip_reason == "the loss is nan"
    step.begin(SumOfRewards(), gbs=4, mbs=2)
    step.microbatch(rows([1.0]))
    backend.norm = math.inf
    assert step.finish().outcome.skip_reason == "the gradient norm is inf"
    assert "optimizer" not in backend.calls
    step.begin(SumOfRewards(), gbs=4, mbs=2)


# Any sequence


STEP_IDS = st.sampled_from([None, "one", "two", "three"])
CHUNK_IDS = st.sampled_from([None, "a", "b"])
LATE = st.booleans()
IN_FINISH = ("reduce", "lr", "scale", "defer", "finalize", "norm", "optimizer", "restore")


class TrainStepMachine(RuleBasedStateMachine):
    """`phase`, `committed` and the like are the model; every row has a reward of its own, so rows can be told apart."""

    def __init__(self):
        super().__init__()
        self.backend = FakeBackend()
        self.step = TrainStep(self.backend)
        self.phase = Phase.IDLE
        self.step_id = None
        self.chunk_ids = set()
        self.rewards = []
        self.valid = 0
        self.unknown_outcome = False
        self.committed = set()
        self.last_result = None
        self.updates = []
        self.draws_at_begin = 0
        self.next_reward = 1.0

    # Calls

    @rule(
        step_id=STEP_IDS, fail_at=st.sampled_from([None, None, "snapshot", "zero_grad", "defer"]), late=LATE
    )
    def begin(self, step_id, fail_at, late):
        if fail_at == "defer":
            late = False  # late, it fails on leaving, and begin only enters
        call = lambda: self.step.begin(SumOfRewards(), gbs=4, mbs=2, step_id=step_id)  # noqa: E731
        if self.phase is not Phase.IDLE or step_id in self.committed:
            self._refused(call, "step-committed" if self.phase is Phase.IDLE else self._out_of_order)
            return
        self.draws_at_begin = self.backend.draws
        failed = self._call(call, fail_at, late)
        if failed and fail_at == "snapshot":
            return
        self.phase = Phase.FAILED if failed else Phase.OPEN
        self.step_id, self.chunk_ids, self.rewards, self.valid = step_id, set(), [], 0
        self.last_result = None

    @rule(
        count=st.integers(0, 3),
        valid=st.booleans(),
        chunk_id=CHUNK_IDS,
        fail_at=st.sampled_from([None, None, None, "forward_backward"]),
        late=LATE,
    )
    def microbatch(self, count, valid, chunk_id, fail_at, late):
        rewards = [self.next_reward + i for i in range(count)]
        call = lambda: self.step.microbatch(rows(rewards, valid=valid), chunk_id)  # noqa: E731
        if self.phase is not Phase.OPEN or chunk_id in self.chunk_ids:
            self._refused(call, "chunk-repeated" if self.phase is Phase.OPEN else self._out_of_order)
            return
        self.next_reward += count
        if self._call(call, fail_at, late):
            self.phase = Phase.FAILED
            return
        self.rewards += rewards
        self.valid += count * valid
        self.chunk_ids |= {chunk_id} - {None}

    @rule(
        norm=st.sampled_from([2.0, 2.0, float("nan"), float("inf")]),
        fail_at=st.sampled_from([*[None] * 4, *IN_FINISH]),
        late=LATE,
    )
    def finish(self, norm, fail_at, late):
        if fail_at == "defer":
            late = True
        if self.phase is Phase.IDLE and self.last_result is not None:
            before = self._everything()
            assert self.step.finish() is self.last_result
            assert self._everything() == before
            return
        if self.phase is not Phase.OPEN:
            self._refused(self.step.finish, self._out_of_order)
            return
        self.backend.norm = norm
        calls = len(self.backend.calls)
        results = []
        failed = self._call(lambda: results.append(self.step.finish()), fail_at, late)
        updated = "optimizer" in self.backend.calls[calls:]
        assert not updated or (self.valid and norm == 2.0)
        if failed:
            self.phase, self.unknown_outcome = Phase.FAILED, updated
            if updated and late:
                self.updates.append(self.rewards)
            return
        self._committed(results[0], norm)

    def _committed(self, result, norm):
        skipped = EMPTY_STEP if not self.valid else None if norm == 2.0 else f"the gradient norm is {norm}"
        assert result.outcome.skip_reason == skipped
        assert result.outcome.update_successful == (skipped is None)
        assert result.totals.valid_seqs == self.valid
        if skipped is None:
            self.updates.append(self.rewards)
        else:
            assert self.backend.draws == self.draws_at_begin
        self.phase = Phase.IDLE
        if self.step_id is not None:
            self.committed.add(self.step_id)
            self.last_result = result

    @rule(fail_at=st.sampled_from([None, None, "defer", "zero_grad", "restore"]), late=LATE)
    def abort(self, fail_at, late):
        if fail_at == "defer":
            late = True
        if self.unknown_outcome:
            self._refused(self.step.abort, "weights-unknown")
        elif self.phase is Phase.IDLE:
            before = self._everything()
            self.step.abort()
            assert self._everything() == before
        elif self._call(self.step.abort, fail_at, late):
            self.phase = Phase.FAILED
        else:
            self.phase = Phase.IDLE
            assert self.backend.gradient == []
            assert self.backend.draws == self.draws_at_begin

    @precondition(lambda self: self.unknown_outcome)
    @rule()
    def reload(self):
        """The remedy that abort names: a new process."""
        self.__init__()

    # The model's side

    def _call(self, call, fail_at, late):
        """Whether the call failed, which it may only where it was told to."""
        self.backend.fail_at, self.backend.fail_late = fail_at, late
        try:
            call()
        except InjectedError:
            return True
        finally:
            self.backend.fail_at = None
        return False

    @property
    def _out_of_order(self):
        return f"step-is-{self.phase.value}"

    def _refused(self, call, code):
        before = self._everything()
        with refused(code, by=TrainStepError):
            call()
        assert self._everything() == before

    def _everything(self):
        step = {
            name: value for name, value in vars(self.step).items() if name not in ("_backend", "_resources")
        }
        # From Python 3.13 on, dataclasses that hold one NaN are not equal; their texts are.
        step["_last_result"] = repr(step["_last_result"])
        return copy.deepcopy((vars(self.backend), step))

    @invariant()
    def the_phase_is_the_tables(self):
        assert self.step.phase is self.phase

    @invariant()
    def reduction_is_held_back_exactly_while_open(self):
        if self.phase is not Phase.FAILED:
            assert self.backend.synchronised == (self.phase is Phase.IDLE)

    @invariant()
    def an_open_step_holds_its_own_rows_once(self):
        if self.phase is Phase.OPEN:
            assert self.backend.gradient == self.rewards

    @invariant()
    def each_commit_updates_once_and_no_row_is_trained_twice(self):
        assert self.backend.updates == self.updates
        assert self.backend.samples == 4 * len(self.updates)
        trained = [reward for update in self.updates for reward in update]
        assert len(trained) == len(set(trained))


TestTrainStepMachine = TrainStepMachine.TestCase
TestTrainStepMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# Rows and samples: what a recipe counts, what the API counts, and what is no whole sample


@pytest.fixture(scope="module")
def policy():
    """64 samples in a step, 32 in a microbatch."""
    return load_config("examples/configs/dpo_cpu.yaml").policy


@pytest.mark.parametrize(
    ("loss_fn", "given", "wanted"),
    [
        (NLLLossFn(), (None, None), (64, 32)),
        (DPOLossFn({}), (None, None), (128, 64)),
        (DPOLossFn({}), (8, None), (8, 64)),
        (DPOLossFn({}), (None, 2), (128, 2)),
        (NLLLossFn(), (7, 3), (7, 3)),
    ],
)
def test_the_config_counts_samples_and_the_api_rows(policy, loss_fn, given, wanted):
    sizes = BatchSizes.of(policy, loss_fn, *given)
    assert (sizes.gbs, sizes.mbs) == wanted


@pytest.mark.parametrize("loss", [NLLLossFn, partial(DPOLossFn, {}), partial(ClippedPGLossFn, {})])
def test_a_loss_that_expects_the_fused_head_needs_a_model_with_one(policy, loss):
    BatchSizes.of(policy, loss(use_fused_linear_logprobs=True), None, None)
    megatron = policy.megatron_cfg.model_copy(update={"use_fused_linear_logprobs": False})
    unfused = policy.model_copy(update={"megatron_cfg": megatron})
    BatchSizes.of(unfused, loss(), None, None)
    with refused("fused-loss", "policy.megatron_cfg.use_fused_linear_logprobs: true"):
        BatchSizes.of(unfused, loss(use_fused_linear_logprobs=True), None, None)


@pytest.mark.parametrize(
    ("given", "name"), [((3, 2), "gbs 3"), ((4, 1), "mbs 1"), ((0, 2), "gbs 0"), ((4, -2), "mbs -2")]
)
def test_sizes_that_part_a_pair_are_refused(policy, given, name):
    with refused("rows-per-sample", name, 2, "DPOLossFn"):
        BatchSizes.of(policy, DPOLossFn({}), *given)


def test_a_shard_holds_whole_pairs(policy):
    sizes = BatchSizes.of(policy, DPOLossFn({}), 12, 2)
    assert sizes.of_shard(3) == 4
    with refused("data-parallel-split", "gbs 12", 4, 2):
        sizes.of_shard(4)


def test_steps_take_every_row(policy):
    data, sizes = BatchedDataDict(row=torch.arange(6)), BatchSizes.of(policy, NLLLossFn(), 6, 1)
    assert [step["row"].tolist() for step in sizes.steps(data, 2)] == [[0, 1, 2], [3, 4, 5]]
    for size in (0, 5):
        with refused("rows-per-step", size, 3, "gbs 6", 2):
            sizes.steps(data.slice(0, size), 2)


def open_step(rows_per_sample):
    backend = FakeBackend()
    step = TrainStep(backend)
    step.begin(SumOfRewards(rows_per_sample=rows_per_sample), gbs=8, mbs=2)
    return step, backend


@pytest.mark.parametrize(("rows_per_sample", "samples"), [(1, 8), (2, 4), (4, 2)])
def test_the_schedule_advances_by_samples(rows_per_sample, samples):
    step, backend = open_step(rows_per_sample)
    step.microbatch(rows([1.0] * 8))
    step.finish()
    assert backend.samples == samples
