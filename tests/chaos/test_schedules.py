"""Random schedules of faults: some on the fake trainer each time, two on real ranks, one with `-m exhaustive`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_trainer import FakeTrainer, OneDeath
from random_schedules import fake_run, fake_schedule, real_schedule
from refusals import refused

from nemo_rl_mcore.driver.algorithms.algorithm import StepOutcome
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer
from nemo_rl_mcore.driver.rollouts import ledger
from nemo_rl_mcore.driver.rollouts.events import read_events
from nemo_rl_mcore.driver.rollouts.ledger import AsCompleted, LedgerError


@pytest.mark.quick_cases("0", "1", "2", "3", "4", "5")
@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_each_group_is_trained_once(seed, tmp_path):
    problems, line = fake_schedule(seed, tmp_path)
    assert not problems, line


WHOLE, STREAMED = ("train", 0, None), ("finish_train_step", 0, 1)
"""Where the optimizer steps, the staleness and the groups of a chunk."""


@pytest.mark.parametrize(
    ("algorithm", "age", "chunk", "point", "nth", "again"),
    [
        ("grpo", None, None, "train", 6, 2),
        ("grpo", 0, None, "train", 6, 2),
        ("grpo", 0, 1, "finish_train_step", 6, 2),
        ("dpo", 1, None, "train", 6, 2),
        ("distillation", 0, None, "train", 6, 2),
        ("distillation", 1, None, "get_topk_logits", 6, 2),
        ("ppo", None, None, "train", 21, 4),  # the critic, in its first pass of step 6; each step has two
        ("ppo", 0, None, "train", 22, 5),  # the policy, after it
        ("ppo", 1, None, "train", 24, 6),  # in its last
    ],
)
def test_a_death_has_what_no_checkpoint_holds_done_once_more(
    algorithm, age, chunk, point, nth, again, tmp_path
):
    problems, line = fake_run(tmp_path, OneDeath(point, nth), age, chunk, algorithm)
    assert not problems, line
    assert f"1 faults, {again} steps again, 1 starts" in line


def fake_run_with_a_slow_group(folder):
    """The second one of a run as completed, which others overtake."""
    return fake_run(folder, OneDeath("respond", 2, "very slow"), 1, None, "grpo", "as_completed")


def test_a_slow_group_is_overtaken_and_trained_in_time(tmp_path):
    problems, line = fake_run_with_a_slow_group(tmp_path)
    assert not problems, line
    chunks = [
        event.chunks for event in read_events(tmp_path / "log/groups.jsonl") if event.kind == "finished"
    ]
    assert [1 in chunk for [chunk] in chunks][:2] == [False, True]


class WaitsForNobody(AsCompleted):
    def _free_places(self, groups, room):
        return [room.groups] * (room.max_age + 1)


def test_an_order_that_does_not_wait_leaves_a_slow_group_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "ORDERS", {"as_completed": WaitsForNobody()})
    with refused("left-behind", [1], by=LedgerError):
        fake_run_with_a_slow_group(tmp_path)


def skip_rows(trainer, train, data, *others, **keys):
    again = trainer.loads and not trainer.updates
    return train(trainer, data.slice(2, data.size) if again else data, *others, **keys)


def keep_weights(trainer, load, folder, **keys):
    before = trainer.weights
    load(trainer, folder, **keys)
    trainer.weights = before


def forget(trainer, save, folder, **keys):
    trainer.weights = "others"
    save(trainer, folder, **keys)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "wrongly", "how"),
    [
        ("train", skip_rows, WHOLE),
        ("train_microbatch", skip_rows, STREAMED),
        ("load_checkpoint", keep_weights, WHOLE),
        ("save_checkpoint", forget, WHOLE),
    ],
)
def test_a_model_that_comes_back_wrongly_is_told(method, wrongly, how, tmp_path, monkeypatch):
    rightly = getattr(FakeTrainer, method)
    monkeypatch.setattr(
        FakeTrainer, method, lambda self, *args, **keys: wrongly(self, rightly, *args, **keys)
    )
    point, age, chunk = how
    problems, line = fake_run(tmp_path, OneDeath(point, 6), age, chunk)
    assert problems, line


def redo_without_a_group(algorithm, redo, step):
    whole = algorithm.rollouts.known_step(step)
    chunks = [(groups[1:], batches[1:]) for groups, batches in whole.known]
    fewer = SimpleNamespace(known_step=lambda of: replace(whole, known=chunks))
    return redo(replace(algorithm, rollouts=fewer), step)


def redo_another(algorithm, redo, step):
    return redo(algorithm, 9 - step)


def redo_nothing(algorithm, redo, step):
    return StepOutcome({}, [None], None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrongly", [redo_without_a_group, redo_another, redo_nothing])
def test_a_product_that_redoes_wrongly_is_told(wrongly, tmp_path, monkeypatch):
    rightly = GRPOTrainer.redo
    monkeypatch.setattr(GRPOTrainer, "redo", lambda self, step: wrongly(self, rightly, step))
    problems, line = fake_run(tmp_path, OneDeath("train", 6), 0, None)
    assert problems, line


@pytest.mark.exhaustive_cases("0")
@pytest.mark.parametrize("seed", [0, 1])
def test_real_ranks_and_engines_keep_the_invariants(seed, tmp_path):
    problems, line = real_schedule(seed, tmp_path)
    assert not problems, line
