"""What somebody else has put into a folder of a run is neither followed nor destroyed."""

import json
import os

import pytest

from nemo_rl_mcore.driver.observability.sinks import JsonlSink, complete_rows
from nemo_rl_mcore.driver.rollouts.events import BEGINNING, EventLog, set_aside_after
from nemo_rl_mcore.driver.run_folder import next_free, replacing
from nemo_rl_mcore.tools.evaluate.samples import SampleFile, write_json


@pytest.fixture
def victim(tmp_path):
    """A file that is in no folder of the run; it has to stay as it is."""
    path = tmp_path / "victim"
    path.write_text("theirs, without an end of its line")
    yield path
    assert path.read_text() == "theirs, without an end of its line"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["page.html", "page.html.tmp"])
def test_a_link_is_replaced_and_not_written_through(name, folder, victim):
    (folder / name).symlink_to(victim)
    with replacing(folder / "page.html") as file:
        file.write(b"ours")
    assert (folder / "page.html").read_text() == "ours"
    assert not (folder / "page.html").is_symlink()


def test_the_old_file_stays_where_the_new_one_fails(folder):
    (folder / "page.html").write_text("old")

    def fail():
        with replacing(folder / "page.html") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.name for path in folder.iterdir()] == ["page.html"]
    assert (folder / "page.html").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda folder: complete_rows(folder, [{"step": 1}])),
        ("groups.jsonl", lambda folder: EventLog(folder / "groups.jsonl")),
        ("groups.jsonl", lambda folder: set_aside_after(folder / "groups.jsonl", BEGINNING)),
        ("samples.jsonl", lambda folder: SampleFile(folder / "samples.jsonl", (), ()).go_on()),
        ("samples.jsonl", lambda folder: SampleFile(folder / "samples.jsonl", (), ()).append([])),
    ],
)
def test_a_run_goes_on_with_no_file_of_somebody_else(name, write, folder, victim):
    (folder / name).symlink_to(victim)
    with pytest.raises(OSError, match=name):
        write(folder)


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        JsonlSink(folder)


def test_rows_of_somebody_else_are_put_aside(folder, victim):
    (folder / "metrics.jsonl").symlink_to(victim)
    JsonlSink(folder, resumed_step=1).close()
    assert not (folder / "metrics.jsonl").is_symlink()


def test_rows_are_put_aside_under_names_that_nothing_has(folder, victim):
    (folder / "metrics.1.jsonl").symlink_to(folder / "nowhere")
    (folder / "metrics.jsonl.tmp").symlink_to(victim)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    JsonlSink(folder, resumed_step=1).close()
    assert [json.loads(line) for line in (folder / "metrics.2.jsonl").read_text().splitlines()] == [
        {"step": 2},
        {"step": 3},
    ]
    assert next_free(folder / "metrics.jsonl").name == "metrics.3.jsonl"


def test_results_are_not_written_through_a_link(folder, victim):
    (folder / "results.json.tmp").symlink_to(victim)
    write_json(folder / "results.json", {"a": 1})
    assert json.loads((folder / "results.json").read_text()) == {"a": 1}
