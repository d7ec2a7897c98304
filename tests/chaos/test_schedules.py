"""Random schedules of faults: some on the fake trainer each time, two on real ranks with `-m exhaustive`."""

import pytest
from fake_trainer import FakeTrainer
from random_schedules import fake_schedule, real_schedule


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_each_group_is_trained_once_and_in_order(seed, tmp_path):
    problems, line = fake_schedule(seed, tmp_path)
    assert not problems, line


@pytest.mark.parametrize("wrong", ["a redo without its first rows", "a load that keeps the weights"])
def test_a_model_that_comes_back_wrongly_is_told(wrong, tmp_path, monkeypatch):
    """Seed 4 goes back to the checkpoint of step 6, and does step 7 again."""
    if wrong == "a load that keeps the weights":
        load = FakeTrainer.load_checkpoint

        def keep(self, folder, **keys):
            load(self, folder, **keys)
            self.weights = "others"

        monkeypatch.setattr(FakeTrainer, "load_checkpoint", keep)
    else:
        train = FakeTrainer.train_microbatch

        def skip(self, data, **keys):
            train(self, data.slice(2, data.size) if self.loads and len(self.committed) == 0 else data, **keys)

        monkeypatch.setattr(FakeTrainer, "train_microbatch", skip)
    problems, line = fake_schedule(4, tmp_path)
    assert problems, line


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1])
def test_real_ranks_and_engines_keep_the_invariants(seed, tmp_path):
    problems, line = real_schedule(seed, tmp_path)
    assert not problems, line
