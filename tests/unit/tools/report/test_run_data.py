import gzip
import json
import math
import os

import pytest
from refusals import refused
from run_folder import rows, write_events, write_results, write_run
from written_samples import sample

from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink
from nemo_rl_mcore.tools.report import read_run, run_data
from nemo_rl_mcore.tools.report.run_data import columns_of, some_of, steps_shown


def test_a_folder_is_read_whole(tmp_path):
    write_run(tmp_path / "run", rows(3), steps=3)
    write_events(tmp_path / "run")
    write_results(tmp_path / "run/eval")
    run = read_run(tmp_path / "run")
    assert (run.name, run.algorithm, run.last_step, run.total_steps) == ("run", "grpo", 3, 3)
    assert len(run.events) == 4
    assert list(run.evaluations) == ["eval"]
    assert not run.unread


def test_what_cannot_be_read_is_told_and_the_rest_is_there(tmp_path):
    """A run that was killed cuts off its last row; a damaged file is named."""
    write_run(tmp_path, rows(3), steps=5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/rew')
    (tmp_path / "groups.jsonl").write_text("nothing\n")
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "results.json").write_text("{")
    run = read_run(tmp_path)
    assert run.last_step == 3
    assert run.total_steps is None
    assert [
        name for name in ("groups.jsonl", "config.yaml", "{") if not any(name in line for line in run.unread)
    ] == ["{"]
    assert len(run.unread) == 3


def test_a_folder_of_nothing_is_refused(tmp_path):
    with refused("no-run", tmp_path, "metrics.jsonl", "results.json"):
        read_run(tmp_path)
    with refused("no-run", tmp_path / "absent"):
        read_run(tmp_path / "absent")


def test_the_folder_of_an_evaluation_alone_is_read(tmp_path):
    write_results(tmp_path)
    run = read_run(tmp_path)
    assert list(run.evaluations) == ["."]
    assert run.last_step == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"train/loss": 1.0}',
        '{"step": null}',
        '{"step": 1e999}',
        '{"step": 4, "a": 1%s}' % ("0" * 400),
        "",
        "{",
    ],
)
def test_a_line_that_is_no_row_is_named_and_the_others_are_there(tmp_path, line):
    write_run(tmp_path, rows(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{line}\n{line}\n{{"step": 5}}\n')
    run = read_run(tmp_path)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 5]
    assert ["metrics.jsonl:4 " in told and "1 more" in told for told in run.unread] == [True]


def test_the_last_step_is_the_highest(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 1}\n')
    assert read_run(tmp_path).last_step == 2


def test_evaluations_of_checkpoints_stand_in_their_order(tmp_path):
    for step in (1, 2, 10):
        write_results(tmp_path / f"step_{step}")
    assert list(read_run(tmp_path).evaluations) == ["step_1", "step_2", "step_10"]


@pytest.mark.parametrize("metrics", [[], {"accuracy": 0.5}, {"accuracy": {}}, {"accuracy": {"mean": None}}])
def test_results_of_something_else_are_named(tmp_path, metrics):
    write_run(tmp_path, rows(1))
    (tmp_path / "results.json").write_text(json.dumps({"digits": {"metrics": metrics}}))
    run = read_run(tmp_path)
    assert run.evaluations == {}
    (unread,) = run.unread
    assert unread.startswith(f"{tmp_path}/results.json ")


def test_a_log_that_takes_long_to_read_is_left_out_and_told(tmp_path, monkeypatch):
    write_events(write_run(tmp_path, rows(1)))
    monkeypatch.setattr(run_data, "_MOST_EVENT_BYTES", 100)
    run = read_run(tmp_path)
    assert run.events == []
    assert ["groups.jsonl has 0 MiB" in line for line in run.unread] == [True]


def test_columns_keep_gaps_apart_from_what_a_row_has_not():
    found = columns_of(
        [{"step": 1.0, "a": math.nan}, {"step": 2.0, "a": 1 / 3, "b": 2.0, "timing/a_cpu": 1.0}]
    )
    assert found == {"step": [1.0, 2.0], "a": ["", 0.333333], "b": [None, 2.0]}


def test_long_columns_are_thinned_and_keep_their_spikes():
    spikes = {7: 0.0, 12_345: 99.0}
    found = columns_of(
        [{"step": step, "a": spikes.get(step, 1.0), "timing/b": 0.5} for step in range(1, 20_002)]
    )
    assert {len(column) for column in found.values()} == {len(found["step"])}
    assert len(found["step"]) <= 1000
    assert [value for value in found["a"] if value != 1.0] == [0.0, 99.0]
    assert (found["step"][0], found["step"][-1]) == (1.0, 20_001.0)


# Answers


def test_steps_are_spread_over_the_run(tmp_path):
    shown, unread = steps_shown(write_run(tmp_path, rows(100)))
    assert [one["step"] for one in shown] == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]
    assert {one["kind"] for one in shown} == {"training"}
    assert unread == []


def test_validations_stand_behind_training(tmp_path):
    sink = RolloutSink(tmp_path, LoggerConfig(), None)
    sink.log(5, [sample(5), sample(5, of_validation=True)])
    assert [(one["kind"], one["total"]) for one in steps_shown(tmp_path)[0]] == [
        ("training", 1),
        ("validation", 1),
    ]


def test_answers_with_tokens_stay_then_the_lowest_and_the_highest():
    answers = [{"number": number, "reward": float(number % 50), "tokens": None} for number in range(100)]
    for number in (40, 41):
        answers[number]["tokens"] = {"text": ["a"]}
    chosen = [answer["number"] for answer in some_of(answers)]
    assert len(chosen) == 24
    assert chosen == sorted(chosen)
    assert {40, 41, 0, 50, 49, 99} <= {*chosen}
    rewards = sorted(answers[number]["reward"] for number in chosen if number not in (40, 41))
    assert rewards == [*sorted([0.0, 1, 2, 3, 4] * 2 + [5.0]), *sorted([45.0, 46, 47, 48, 49] * 2 + [44.0])]


def test_a_reward_that_is_not_finite_is_none_and_no_trouble():
    assert some_of([{"reward": None}, {"reward": 1.0}]) == [{"reward": None}, {"reward": 1.0}]


def test_long_texts_are_cut_and_say_so(tmp_path):
    write_run(tmp_path, rows(1), response="x" * 30_000)
    [step], _ = steps_shown(tmp_path)
    response = step["answers"][0]["response"]
    assert len(response) < 20_100
    assert response.endswith("x… (10000 more characters)")


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path):
    write_run(tmp_path, rows(4))
    two, three, four = (tmp_path / f"rollouts/step_{step}.jsonl.gz" for step in (2, 3, 4))
    two.write_bytes(two.read_bytes()[:40])
    three.write_bytes(gzip.compress(b"{\n"))
    turned = bytearray(four.read_bytes())
    turned[20] ^= 0x55  # zlib has an error of its own
    four.write_bytes(turned)
    shown, unread = steps_shown(tmp_path)
    assert [one["step"] for one in shown] == [1]
    assert all(path.name in told for path, told in zip((two, three, four), unread, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "3",
        '{"reward": 1.0}',
        '{"prompt": "", "response": "", "reward": NaN}',
        '{"prompt": "", "response": "", "reward": 1e999}',
        '{"prompt": "", "response": "", "turns": [1]}',
        '{"prompt": "", "response": "", "tokens": {"text": ["a"]}}',
        '{"prompt": "", "response": "", "tokens": {"text": ["a"], "turn": []}}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:60],
)
def test_what_is_no_answer_is_named_and_the_others_are_shown(tmp_path, line):
    write_run(tmp_path, rows(2))
    (tmp_path / "rollouts/step_2.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    shown, unread = steps_shown(tmp_path)
    assert [one["step"] for one in shown] == [1]
    assert ["step_2.jsonl.gz " in line for line in unread] == [True]


def test_of_long_answers_the_first_tokens_and_turns_are_shown(tmp_path):
    count = 64_000
    tokens = {"text": ["a"] * count, "turn": [1] * count, "mask": None, "generation_logprobs": [-1.0] * count}
    turns = [{"role": "assistant", "content": "x" * 1000, "reward": 1.0}] * 500
    write_run(tmp_path, rows(1), answers=1, tokens=tokens, turns=turns)
    [step], _ = steps_shown(tmp_path)
    [answer] = step["answers"]
    assert [len(answer["tokens"][name] or ()) for name in tokens] == [2000, 2000, 0, 2000]
    assert answer["tokens"]["more"] == 62_000
    assert len(answer["turns"]) == 21
    assert answer["turns"][-1] == {"role": "480 more turns", "content": "…"}
    assert len(json.dumps(answer)) < 200_000


def test_a_pipe_and_a_file_that_unpacks_to_too_much_are_told_and_left(tmp_path, monkeypatch):
    monkeypatch.setattr(run_data, "_MOST_BYTES", 1 << 16)
    (tmp_path / "rollouts").mkdir()
    os.mkfifo(tmp_path / "rollouts/step_1.jsonl.gz")
    (tmp_path / "rollouts/step_2.jsonl.gz").write_bytes(gzip.compress(b" " * (1 << 24)))
    shown, unread = steps_shown(tmp_path)
    assert shown == []
    assert [name for name in ("step_1", "step_2") for line in unread if name in line] == ["step_1", "step_2"]
