import errno
import json
import math
import random
import subprocess
import sys

import pytest
from refusals import refused
from written_samples import sample

from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink, read_rollouts
from nemo_rl_mcore.driver.observability.sinks import JsonlSink, read_history


def test_jsonl_has_one_object_a_step_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "a")
    path = tmp_path / "run" / "a" / "metrics.jsonl"
    sink.log(1, {"train/reward": 0.5})
    assert path.read_text() == '{"step": 1, "train/reward": 0.5}\n'
    sink.log(2, {"train/reward": 0.25, "train/loss": -1})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    sink.close()
    sink.close()


def test_what_is_not_finite_is_null(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.0})
    sink.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": None, "d": 0.0}


def test_an_earlier_run_is_kept_aside(tmp_path):
    for run in (1, 2, 3):
        sink = JsonlSink(tmp_path)
        sink.log(run, {})
        sink.close()
    steps = {path.name: json.loads(path.read_text())["step"] for path in tmp_path.iterdir()}
    assert steps == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_goes_on_with_the_file_and_keeps_later_rows_aside(tmp_path):
    sink = JsonlSink(tmp_path)
    for step in (0, 1, 2, 3):
        sink.log(step, {"a": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # the process died here
    for _ in range(2):
        sink = JsonlSink(tmp_path, resumed_step=2)
        sink.log(3, {"a": 7})
        sink.close()
        assert rows(tmp_path / "metrics.jsonl") == [
            {"step": s, "a": a} for s, a in ((0, 0), (1, 1), (2, 2), (3, 7))
        ]
    assert (tmp_path / "metrics.1.jsonl").read_text() == '{"step": 3, "a": 3}\n{"step": 4, "a"'
    assert rows(tmp_path / "metrics.2.jsonl") == [{"step": 3, "a": 7}]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_cut_last_line_is_left_out_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2}\n{"step": 2, "a"')
    assert read_history(tmp_path) == [{"step": 1.0, "a": 2.0}]
    path.write_text('{"step": 1}\n[1, 2]\n')
    with refused("broken-row", "metrics.jsonl:2 "):
        read_history(tmp_path)


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with refused("no-run", tmp_path / "nowhere/metrics.jsonl", "logger.log_dir"):
        read_history(tmp_path / "nowhere")


# Answers


def open_sink(log_dir, resumed_step=None, **config):
    return RolloutSink(log_dir, LoggerConfig(**config), resumed_step)


def write(sink, *steps, **changes):
    for step in steps:
        sink.log(step, [sample(step, index, **changes) for index in range(2)])


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_step_and_its_validation_are_files_of_their_own_with_a_line_an_answer(tmp_path):
    sink = open_sink(tmp_path)
    answers = [sample(3, 0), sample(3, 1, advantage=float("nan"), response='né "\ud800')]
    sink.log(3, [*answers, sample(3, of_validation=True)])
    assert names(tmp_path) == ["rollouts/step_3.jsonl.gz", "rollouts/validation/step_3.jsonl.gz"]
    first, second = read_rollouts(tmp_path / "rollouts/step_3.jsonl.gz")
    assert first == vars(sample(3, 0))
    assert (second["sample_index"], second["advantage"], second["response"]) == (1, None, 'né "\ud800')
    (validated,) = read_rollouts(tmp_path / "rollouts/validation/step_3.jsonl.gz")
    assert validated["sample_mask"] is None
    sink.log(4, [])
    assert len(names(tmp_path)) == 2, "a step without answers has no file"


def test_turns_and_tokens_of_an_answer_stand_beside_a_number_that_is_not_finite(tmp_path):
    turns = [{"role": "assistant", "content": "né", "reward": 0.5}]
    tokens = {"text": ["n", "é"], "turn": [1, 1], "mask": None, "advantages": [0.5, None]}
    sink = open_sink(tmp_path)
    sink.log(3, [sample(3, turns=turns, tokens=tokens, advantage=float("inf"))])
    (read,) = read_rollouts(tmp_path / "rollouts/step_3.jsonl.gz")
    assert (read["turns"], read["tokens"], read["advantage"]) == (turns, tokens, None)


def test_a_run_in_a_folder_that_another_has_left_puts_its_answers_aside(tmp_path):
    for prompt in ("first>", "second>", "third>"):
        write(open_sink(tmp_path), 1, 2, prompt=prompt)
    prompts = {
        str(path.relative_to(tmp_path)): next(read_rollouts(path))["prompt"]
        for path in tmp_path.rglob("step_1.jsonl.gz")
    }
    assert prompts == {
        "rollouts.1/step_1.jsonl.gz": "first>",
        "rollouts.2/step_1.jsonl.gz": "second>",
        "rollouts/step_1.jsonl.gz": "third>",
    }


def test_a_resumed_run_puts_aside_what_lies_behind_its_step_and_only_that(tmp_path):
    sink = open_sink(tmp_path)
    write(sink, 1, 2, 3, 10)
    write(sink, 2, 3, of_validation=True)
    (tmp_path / "rollouts/step_11.jsonl.gz.tmp").write_bytes(b"the process died here")
    write(open_sink(tmp_path, resumed_step=2), 3, prompt="anew>")
    assert names(tmp_path) == [
        *(f"rollouts.1/{name}.jsonl.gz" for name in ("step_10", "step_3", "validation/step_3")),
        *(f"rollouts/{name}.jsonl.gz" for name in ("step_1", "step_2", "step_3", "validation/step_2")),
    ]
    assert next(read_rollouts(tmp_path / "rollouts/step_3.jsonl.gz"))["prompt"] == "anew>"
    assert next(read_rollouts(tmp_path / "rollouts.1/step_3.jsonl.gz"))["prompt"] == "1>"


@pytest.mark.parametrize("resumed", [False, True])
def test_at_the_bound_the_oldest_steps_go_but_every_tenth(resumed, tmp_path, monkeypatch):
    text = "".join(random.Random(0).choices("0123456789abcdef", k=4000))
    write(open_sink(tmp_path / "one"), 1, response=text)
    size = (tmp_path / "one/rollouts/step_1.jsonl.gz").stat().st_size
    monkeypatch.setattr("nemo_rl_mcore.driver.observability.sinks._MOST_BYTES", 4.5 * size)
    sink = open_sink(tmp_path)
    write(sink, *range(7, 13), response=text)
    if resumed:
        sink = open_sink(tmp_path, 12)
    write(sink, *range(13, 15), response=text)
    kept = [int(path.name.split("_")[1].split(".")[0]) for path in (tmp_path / "rollouts").iterdir()]
    assert sorted(kept) == [10, 12, 13, 14]


def test_nothing_is_removed_below_the_bound_and_nothing_written_where_that_is_switched_off(tmp_path):
    write(open_sink(tmp_path), 1, 2)
    assert len(names(tmp_path)) == 2
    write(open_sink(tmp_path, answers_with_tokens=None), 1)
    assert names(tmp_path) == ["rollouts.1/step_1.jsonl.gz", "rollouts.1/step_2.jsonl.gz"]


def test_a_disk_that_is_full_leaves_no_half_of_a_file(tmp_path):
    """A limit of file size stands for the disk: the kernel refuses what is beyond it."""
    code = f"""
import json, resource, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from nemo_rl_mcore.config import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink
from written_samples import sample
import random
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sink = RolloutSink(Path({str(tmp_path)!r}), LoggerConfig(), None)
for step, letters in ((1, 10), (2, 100_000)):
    answer = sample(step, response="".join(random.choices("0123456789", k=letters)))
    try:
        sink.log(step, [answer])
    except OSError as error:
        print(step, error.errno)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", str(errno.EFBIG)]
    assert names(tmp_path) == ["rollouts/step_1.jsonl.gz"]
