"""Groups come back from a folder with the same bits, and damage is named by its file."""

import json

import pytest
import torch
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.rollouts.saved import (
    TENSORS_FILE,
    TEXTS_FILE,
    GroupArchive,
    load_groups,
    save_groups,
)
from nemo_rl_mcore.rank.checkpoints import SUMS_FILE, sha256, write_sums


def group(position, rows=3, **more):
    """Tensors of several types, some of which share their memory, and a list."""
    made = torch.Generator().manual_seed(position)
    logprobs = torch.randn(rows, 5 + position, generator=made)
    logprobs[0, 0] = float("nan")
    return BatchedDataDict(
        input_ids=torch.randint(0, 99, (rows, 5 + position), generator=made),
        generation_logprobs=logprobs,
        half=logprobs.bfloat16(),
        by_columns=logprobs.t().contiguous().t(),
        other_view=logprobs[:, 1:3],
        same=logprobs,
        finished=torch.arange(rows) % 2 == 0,
        notes=[{"turn": row, "score": 0.1} for row in range(rows)],
        **more,
    )


def assert_equal(one, other):
    assert [*one] == [*other]
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype
            assert torch.equal(
                value.contiguous().view(torch.uint8), other[key].contiguous().view(torch.uint8)
            )
        else:
            assert value == other[key]


GROUPS = {position: group(position) for position in (3, 12)}


@pytest.fixture
def folder(tmp_path):
    save_groups(tmp_path / "groups", GROUPS)
    return tmp_path / "groups"


def test_saved_groups_come_back_with_the_same_bits(folder):
    found = load_groups(folder)
    assert [*found] == [3, 12]
    for position, one in GROUPS.items():
        assert_equal(found[position], one)


def test_no_groups_can_be_saved(tmp_path):
    save_groups(tmp_path / "empty", {})
    assert load_groups(tmp_path / "empty") == {}


def test_what_is_loaded_is_of_memory_and_not_of_the_file(folder):
    found = load_groups(folder)
    before = found[3]["input_ids"].clone()
    found[3]["input_ids"].add_(0)
    (folder / TENSORS_FILE).write_bytes(b"\0" * (folder / TENSORS_FILE).stat().st_size)
    assert torch.equal(found[3]["input_ids"], before)


@pytest.mark.parametrize("value", [(1, 2), float("nan"), float("inf"), {1: 2}, object()])
def test_values_that_json_would_change_are_refused(value, tmp_path):
    with refused("json-values", "group 5 ", "'odd'"):
        save_groups(tmp_path / "groups", {5: group(5, odd=[value] * 3)})


@pytest.mark.parametrize("name", [TENSORS_FILE, TEXTS_FILE, SUMS_FILE])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "link"])
def test_damaged_files_are_named(folder, name, damage):
    path = folder / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.rename(folder.parent / name)
        path.symlink_to(folder.parent / name)
    where = folder if (name, damage) == (SUMS_FILE, "missing") else folder / ""
    with pytest.raises(ValueError, match=str(where)):
        load_groups(folder)


def change_texts(folder, change):
    """Damage with checksums that are right: files that were never written together."""
    texts = json.loads((folder / TEXTS_FILE).read_text("utf-8"))
    change(texts["groups"])
    (folder / TEXTS_FILE).write_text(json.dumps(texts), "utf-8")
    write_sums(folder, {name: sha256(folder / name) for name in (TENSORS_FILE, TEXTS_FILE)})


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        (lambda groups: groups.pop(), "unequal-files", "12.by_columns, 12.finished"),
        (lambda groups: groups[0]["entries"].pop("same"), "unequal-files", "3.same"),
        (lambda groups: groups[0]["entries"].update(more=None), "unequal-files", "3.more"),
        (lambda groups: groups.append(groups[0]), "group-twice", ""),
        (lambda groups: groups[0]["entries"].update(notes=[1]), "row-counts", "'notes'"),
        (lambda groups: groups[0].pop("entries"), "unreadable-file", "entries"),
        (lambda groups: groups[0].update(position="3"), "unreadable-file", "position"),
    ],
)
def test_files_that_do_not_go_together_are_named(folder, change, code, part):
    change_texts(folder, change)
    with refused(code, TEXTS_FILE, part):
        load_groups(folder)


def test_tensors_that_are_none_are_named(folder):
    (folder / TENSORS_FILE).write_bytes(b"\x80\x04pickle")
    write_sums(folder, {name: sha256(folder / name) for name in (TENSORS_FILE, TEXTS_FILE)})
    with refused("unreadable-file", TENSORS_FILE):
        load_groups(folder)


# How many groups a run keeps for a replay, and which go first


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
