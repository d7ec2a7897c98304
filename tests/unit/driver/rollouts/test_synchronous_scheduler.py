"""Sampling and training in turn: which groups are asked for in one call, and what becomes of those of no use."""

import pytest
import torch
from fake_engines import FakeDraw
from ledger_machine import check
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.ledger import ORDERS, GroupState, Ledger, Limits, StepState
from nemo_rl_mcore.driver.rollouts.scheduler import EQUAL_REWARDS, SURPLUS, SynchronousScheduler
from nemo_rl_mcore.errors import RunStoppedError

N = 3


class TurnDraw(FakeDraw):
    """Answers at once; a group says at which position it stands. equal: those of equal rewards, in any step."""

    def __init__(self, calls, equal=()):
        super().__init__(N)
        self.calls, self.equal, self.fails_at = calls, {*equal}, None

    def play_now(self, groups):
        asked = [self._position(group) for group in groups]
        self.calls.append(("answer", groups[0].step, asked))
        if self.fails_at in asked:
            self.fails_at = None
            raise ValueError(f"group {asked}")
        return [self._answers(position) for position in asked]

    def unused_for(self, group):
        return EQUAL_REWARDS if int(group["input_ids"][0, 0]) in self.equal else None

    def _position(self, group):
        step, place = group.prompt
        return (step - 1) * self.groups_per_step + place

    def _answers(self, position):
        rows = torch.full((2, 4), position)
        return BatchedDataDict(
            input_ids=rows, generation_logprobs=rows.float(), input_lengths=rows[:, 0] * 0 + 4
        )


class TurnEngine:
    def __init__(self, calls):
        self.calls = calls

    def update_weights(self, version):
        self.calls.append(("weights", version))

    def offload(self):
        self.calls.append("asleep")


class Turns:
    """A scheduler with what it called, and its events."""

    def __init__(self, equal=(), *, per_round=N, spare=0, most_unused=None, order="in_order", last_step=5):
        self.calls, self.events = [], []
        limits = Limits(N, 0, last_step, max_attempts=1, spare=spare, order=order)
        self.draw = TurnDraw(self.calls, equal)
        ledger, engine = Ledger(limits, self.events.append), TurnEngine(self.calls)
        self.scheduler = SynchronousScheduler(
            *(ledger, {}, engine, self.draw), most_unused=most_unused, groups_per_round=per_round
        )
        self.ledger = ledger

    def train(self):
        """Train a step, publish its weights; what it reports."""
        number = self.ledger.version + 1
        with self.scheduler.open_step(number) as step:
            rollout = step.whole()
            self.calls.append(("train", sorted({*rollout.batch["input_ids"][:, 0].tolist()})))
            step.finishing()
            reported = step.finish()
        self.scheduler.update_weights(number)
        check(self.ledger)
        return reported

    def told(self, kind):
        return [event for event in self.events if event.kind == kind]

    def unused(self):
        rollouts = self.scheduler.take_unused()
        return [int(rollout.batch["input_ids"][0, 0]) for rollout in rollouts]


def sampling(equal, *, rounds=9, per_round=N, **more):
    """With dynamic sampling, as `start.scheduler_of` and `start.limits_of` set it up."""
    return Turns(equal, per_round=per_round, spare=per_round - 1, most_unused=rounds * per_round - N, **more)


def test_a_step_asks_once_and_the_engine_sleeps_before_the_ranks_train():
    run = Turns()
    for _ in range(2):
        assert run.train() == {}
    assert run.calls == [
        *(("answer", 1, [0, 1, 2]), "asleep", ("train", [0, 1, 2]), ("weights", 1)),
        *(("answer", 2, [3, 4, 5]), "asleep", ("train", [3, 4, 5]), ("weights", 2)),
    ]
    assert run.unused() == []


def test_the_prompts_of_a_step_are_drawn_when_it_is_open_and_forgotten_behind():
    run = Turns()
    for _ in range(5):
        run.train()
        assert len(run.scheduler._drawn.steps) <= 1
    assert run.draw.steps == [1, 2, 3, 4, 5]
    assert not run.ledger.may_dispatch()


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_equal_rewards_are_left_out_and_the_next_move_up_in_a_further_round(order):
    run = sampling([1, 2], order=order)
    reported = run.train()
    # The noise of a prompt is that of the step that drew it: a call for each.
    asked = [("answer", 1, [0, 1, 2]), ("answer", 2, [3, 4, 5])]
    assert run.calls[:4] == [*asked, "asleep", ("train", [0, 3, 4])]
    unused = [(event.position, event.reason) for event in run.told("unused")]
    assert unused == [(1, EQUAL_REWARDS), (2, EQUAL_REWARDS)]
    assert reported == {"train/dynamic_sampling_rounds": 2.0, "train/dynamic_sampling_kept": N / (N + 2)}
    assert run.ledger.dropped == {EQUAL_REWARDS: 2}


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_round_has_beyond_the_step_is_told_and_answered_again_by_the_next(order):
    run = sampling([1], per_round=2 * N, order=order)
    first = run.train()
    asked = [("answer", 1, [0, 1, 2]), ("answer", 2, [3, 4, 5])]
    assert run.calls[:4] == [*asked, "asleep", ("train", [0, 2, 3])]
    assert first == {"train/dynamic_sampling_rounds": 1.0, "train/dynamic_sampling_kept": N / (N + 1)}
    assert [event.token.position for event in run.told("cancelled") if event.reason == SURPLUS] == [4, 5]
    assert run.unused() == [1, 4, 5]
    assert run.unused() == []
    del run.calls[:]
    run.train()
    assert [call[2] for call in run.calls if call[0] == "answer"] == [[4, 5], [6, 7, 8], [9]]
    assert ("train", [4, 5, 6]) in run.calls
    attempts = [event.token.attempt for event in run.told("committed") if event.token.position in (4, 5)]
    assert attempts == [2, 2]


def test_a_round_may_be_smaller_than_the_step():
    run = sampling([], per_round=2)
    assert run.train()["train/dynamic_sampling_rounds"] == 2.0
    assert [call[2] for call in run.calls if call[0] == "answer"] == [[0, 1], [2], [3]]


def test_a_long_run_of_dynamic_sampling_holds_the_prompts_of_few_steps():
    run = sampling([one for one in range(1000) if one % 3 == 1], last_step=50)
    for _ in range(50):
        run.train()
        assert len(run.scheduler._drawn.steps) <= 3
        run.unused()
    trained = [position for call in run.calls if call[0] == "train" for position in call[1]]
    assert trained == [one for one in range(1000) if one % 3 != 1][: 50 * N]


def test_too_few_groups_of_use_end_the_run_by_its_code():
    run = sampling([*range(100)], rounds=2)
    with refused("too-few-groups", "step 1:", N + 1, "num_prompts_per_step", by=RunStoppedError):
        run.train()
    assert run.ledger.step is StepState.IDLE
    assert "asleep" not in run.calls


def test_as_many_as_the_rounds_allow_are_left_out():
    run = sampling([*range(N)], rounds=2)
    assert run.train()["train/dynamic_sampling_kept"] == 0.5


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_call_that_fails_gives_all_groups_of_the_round_back(fails_at):
    run = sampling([], per_round=2 * N)
    run.draw.fails_at = fails_at
    run.draw.equal = {0}
    with pytest.raises(ValueError, match="group"):
        run.train()
    assert run.ledger.count(GroupState.INFLIGHT) == 0
    assert run.ledger.step is StepState.IDLE
    check(run.ledger)
    run.train()
    assert ("train", [1, 2, 3]) in run.calls
