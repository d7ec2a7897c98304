"""The state machine of the split step, on a fake backend that writes down what it was asked."""

import math

import pytest
from fake_backend import FakeBackend, SumOfRewards, rows
from refusals import refused

from nemo_rl_mcore.losses.base import EPSILON, LossType
from nemo_rl_mcore.rank.train_step import EMPTY_STEP, Phase, TrainStep, TrainStepError


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


@pytest.mark.parametrize(
    ("calls", "phase", "remedy"),
    [
        (["microbatch"], "idle", "begin_train_step"),
        (["finish"], "idle", "begin_train_step"),
        (["begin", "begin"], "open", "abort_train_step"),
        (["begin", "finish", "microbatch"], "idle", "begin_train_step"),
        (["begin", "abort", "finish"], "idle", "begin_train_step"),
    ],
)
def test_calls_out_of_order_say_what_to_call(calls, phase, remedy):
    backend = FakeBackend()
    step = TrainStep(backend)
    actions = {
        "begin": lambda: step.begin(SumOfRewards(), gbs=4, mbs=2),
        "microbatch": lambda: step.microbatch(rows([1.0])),
        "finish": step.finish,
        "abort": step.abort,
    }
    for call in calls[:-1]:
        actions[call]()
    with refused(f"step-is-{phase}", remedy, by=TrainStepError):
        actions[calls[-1]]()


def test_calls_out_of_order_are_told_in_the_words_that_callers_of_nemo_rl_look_for():
    step, _ = begun()
    with pytest.raises(RuntimeError, match="already open"):
        step.begin(SumOfRewards(), gbs=4, mbs=2)
    step.abort()
    with pytest.raises(RuntimeError, match="no train step open"):
        step.finish()


def test_a_failure_inside_the_optimizer_says_reload_the_checkpoint():
    step, backend = begun()
    step.microbatch(rows([1.0]))
    backend.fail_at = "optimizer"
    with pytest.raises(RuntimeError, match="injected"):
        step.finish()
    for _ in range(2):
        with refused("weights-unknown", by=TrainStepError):
            step.abort()


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


def test_identifiers_make_calls_idempotent():
    step, backend = begun(step_id="seven")
    step.microbatch(rows([1.0]), chunk_id="a")
    with refused("chunk-repeated", "'a'", by=TrainStepError):
        step.microbatch(rows([1.0]), chunk_id="a")
    assert step.phase is Phase.OPEN
    result = step.finish()
    assert result.totals.valid_seqs == 1.0
    assert step.finish() is result
    assert backend.calls.count("optimizer") == 1
    with refused("step-committed", "seven", by=TrainStepError):
        step.begin(SumOfRewards(), gbs=4, mbs=2, step_id="seven")
    step.begin(SumOfRewards(), gbs=4, mbs=2, step_id="eight")


@pytest.mark.parametrize("fail_at", ["forward_backward", "reduce", "lr", "scale", "finalize", "norm"])
def test_a_failure_leaves_failed_whose_only_exit_is_abort(fail_at):
    step, backend = begun()
    step.microbatch(rows([1.0]))
    backend.fail_at = fail_at
    with pytest.raises(RuntimeError, match="injected"):
        step.microbatch(rows([1.0])) if fail_at == "forward_backward" else step.finish()
    assert step.phase is Phase.FAILED
    for call in (
        step.finish,
        lambda: step.microbatch(rows([1.0])),
        lambda: step.begin(SumOfRewards(), gbs=1, mbs=1),
    ):
        with refused("step-is-failed", "abort_train_step", by=TrainStepError):
            call()
    backend.fail_at, backend.calls = None, []
    step.abort()
    assert backend.calls == ["zero_grad", "restore"]
    assert backend.synchronised
    assert step.phase is Phase.IDLE
    step.begin(SumOfRewards(), gbs=4, mbs=2)


def test_finish_after_an_abort_does_not_answer_for_an_older_step():
    step, _ = begun(step_id="one")
    step.microbatch(rows([1.0]))
    step.finish()
    step.begin(SumOfRewards(), gbs=4, mbs=2, step_id="two")
    step.abort()
    with refused("step-is-idle", "begin_train_step", by=TrainStepError):
        step.finish()
    step.begin(SumOfRewards(), gbs=4, mbs=2, step_id="two")
