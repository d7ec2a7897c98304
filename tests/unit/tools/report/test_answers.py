import gzip
import json
import os

import pytest
from run_folder import rows, write_run
from written_samples import sample

from nemo_rl_mcore.config.logger import LoggerConfig
from nemo_rl_mcore.driver.observability import RolloutSink
from nemo_rl_mcore.tools.report import run_data
from nemo_rl_mcore.tools.report.run_data import some_of, steps_shown


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


def test_answers_of_an_earlier_version_are_shown(tmp_path):
    """They have neither turns nor tokens."""
    write_run(tmp_path, rows(1))
    old = {"prompt": "1+1=", "answer": "2", "response": "2", "reward": 1.0, "advantage": None}
    (tmp_path / "rollouts/step_1.jsonl.gz").write_bytes(gzip.compress(json.dumps(old).encode()))
    [step], unread = steps_shown(tmp_path)
    assert step["answers"] == [{**old, "turns": None, "tokens": None}]
    assert unread == []


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
