"""Random schedules of faults: some on the fake trainer each time, two on real ranks, one with `-m exhaustive`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_trainer import FakeTrainer, OneDeath
from random_schedules import fake_run, fake_schedule, real_schedule

from nemo_rl_mcore.algorithms.algorithm import StepOutcome
from nemo_rl_mcore.controllers.async_grpo import AsyncGRPO


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_each_group_is_trained_once_and_in_order(seed, tmp_path):
    problems, line = fake_schedule(seed, tmp_path)
    assert not problems, line


def test_a_death_between_checkpoints_has_two_steps_done_again(tmp_path):
    problems, line = fake_run(tmp_path, OneDeath("finish_train_step", 6), 0, None)
    assert (problems, line) == ([], "K = 0, chunks of 3: 1 faults, 2 steps again, 1 starts")


def skip_rows(trainer, train, data, **keys):
    again = trainer.loads and not trainer.committed
    train(trainer, data.slice(2, data.size) if again else data, **keys)


def keep_weights(trainer, load, folder, **keys):
    before = trainer.weights
    load(trainer, folder, **keys)
    trainer.weights = before


def forget(trainer, save, folder):
    trainer.weights = "others"
    save(trainer, folder)


@pytest.mark.parametrize(
    ("method", "wrongly"),
    [("train_microbatch", skip_rows), ("load_checkpoint", keep_weights), ("save_checkpoint", forget)],
)
def test_a_model_that_comes_back_wrongly_is_told(method, wrongly, tmp_path, monkeypatch):
    rightly = getattr(FakeTrainer, method)
    monkeypatch.setattr(
        FakeTrainer, method, lambda self, *args, **keys: wrongly(self, rightly, *args, **keys)
    )
    problems, line = fake_run(tmp_path, OneDeath("finish_train_step", 6), 0, None)
    assert problems, line


def redo_without_a_group(algorithm, redo, step):
    rollouts = algorithm.rollouts
    fewer = SimpleNamespace(groups=rollouts.groups, prompt_of=rollouts.prompt_of)
    fewer.chunks_of = lambda of: [chunk[1:] for chunk in rollouts.chunks_of(of)]
    return redo(replace(algorithm, rollouts=fewer), step)


def redo_another(algorithm, redo, step):
    return redo(algorithm, 9 - step)


def redo_nothing(algorithm, redo, step):
    return StepOutcome({}, [None], None)


@pytest.mark.parametrize("wrongly", [redo_without_a_group, redo_another, redo_nothing])
def test_a_product_that_redoes_wrongly_is_told(wrongly, tmp_path, monkeypatch):
    rightly = AsyncGRPO.redo
    monkeypatch.setattr(AsyncGRPO, "redo", lambda self, step: wrongly(self, rightly, step))
    problems, line = fake_run(tmp_path, OneDeath("finish_train_step", 6), 0, None)
    assert problems, line


@pytest.mark.exhaustive_cases("0")
@pytest.mark.parametrize("seed", [0, 1])
def test_real_ranks_and_engines_keep_the_invariants(seed, tmp_path):
    problems, line = real_schedule(seed, tmp_path)
    assert not problems, line
