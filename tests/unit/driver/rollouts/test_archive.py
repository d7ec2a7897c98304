"""How many groups a run keeps for a replay, and which go first."""

import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.saved import GroupArchive
from nemo_rl_mcore.errors import FolderError

GROUP = {0: BatchedDataDict(input_ids=torch.zeros(4, 16, dtype=torch.long))}


@pytest.fixture(scope="module")
def step_bytes(tmp_path_factory):
    """What a step takes on disk."""
    folder = tmp_path_factory.mktemp("one")
    GroupArchive(folder, 1e9, checkpoints=True).keep(1, GROUP)
    return sum(path.stat().st_size for path in (folder / "step_1").iterdir())


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_oldest_steps_go_first_and_none_behind_the_last_checkpoint(tmp_path, step_bytes):
    archive = GroupArchive(tmp_path, 2.5 * step_bytes, checkpoints=True)
    for step in range(1, 5):
        archive.keep(step, GROUP)
    assert names(tmp_path) == {"step_1", "step_2", "step_3", "step_4"}, "no checkpoint is there yet"
    archive.checkpointed(1)
    assert names(tmp_path) == {"step_2", "step_3", "step_4"}
    archive.checkpointed(4)
    assert names(tmp_path) == {"step_3", "step_4"}
    archive.keep(5, GROUP)
    assert names(tmp_path) == {"step_4", "step_5"}


def test_a_run_that_goes_on_counts_what_is_there_and_removes_first_what_was_set_aside(tmp_path, step_bytes):
    before = GroupArchive(tmp_path, 1e9, checkpoints=True)
    for step in (2, 9, 10, 11):
        before.keep(step, GROUP)
    (tmp_path / "step_11").rename(tmp_path / "aside_step_11")
    (tmp_path / "mine").mkdir()
    archive = GroupArchive(tmp_path, 4.5 * step_bytes, checkpoints=True, step=10)
    archive.keep(11, GROUP)
    assert names(tmp_path) == {"step_2", "step_9", "step_10", "step_11", "mine"}
    archive.keep(12, GROUP)
    assert names(tmp_path) == {"step_9", "step_10", "step_11", "step_12", "mine"}


def test_a_run_without_checkpoints_keeps_its_first_steps(tmp_path, step_bytes, capsys):
    archive = GroupArchive(tmp_path, 2.5 * step_bytes, checkpoints=False)
    for step in range(1, 6):
        archive.keep(step, GROUP)
    assert names(tmp_path) == {"step_1", "step_2"}
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "groups").write_text("in the way")
    with pytest.raises(FolderError):
        GroupArchive(tmp_path / "groups", 1e9, checkpoints=True).keep(1, GROUP)
