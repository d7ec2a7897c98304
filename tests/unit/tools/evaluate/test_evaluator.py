"""An evaluation over a fake engine: what it writes, how it goes on, what it sets aside, and its metrics."""

import json
import math
import os
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.rollouts.player import Responder
from nemo_rl_mcore.environment.games import ArithmeticEnvironment
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.errors import FolderError
from nemo_rl_mcore.tools.check.given_weights import as_evaluated, load_over_given_weights
from nemo_rl_mcore.tools.evaluate import evaluate as evaluation
from nemo_rl_mcore.tools.evaluate.evaluate import Evaluator
from nemo_rl_mcore.tools.evaluate.samples import (
    Estimate,
    SampleRow,
    digest_of,
    enter,
    maj_at_k,
    over_prompts,
    pass_at_k,
    set_metrics,
)

RECIPE = Path(__file__).parents[4] / "examples/configs/grpo_copy_cpu.yaml"
TOKENIZER = load_tokenizer("char")
SAMPLES = 3
SETS = {
    "one": [Prompt(index, f"{index}>", str(index % 3)) for index in range(7)],
    "other": [Prompt(index, f"{index}0>", "1") for index in range(2)],
}


class Killed(BaseException):
    """As kill -9, which nothing handles."""


class Engine:
    """Answers a digit that depends on prompt, sample and all rows of the batch; dies at a call of its choice."""

    def __init__(self, dies_at=None):
        self.calls, self.dies_at = 0, dies_at

    def generate(self, data, *, step, greedy=False):
        self.calls += 1
        if self.calls == self.dies_at:
            raise Killed
        assert step == 0
        rows = data["prompt_index"].shape[0]
        digits = (data["prompt_index"] * 7 + data["sample_index"] + data["prompt_index"].sum()) % 3
        tokens = torch.zeros(rows, 2, dtype=torch.long)
        tokens[:, 0], tokens[:, 1] = digits, TOKENIZER.eos_token_id
        return BatchedDataDict(
            tokens=tokens, logprobs=torch.zeros(rows, 2), lengths=torch.full((rows,), 2),
            finished=torch.ones(rows, dtype=torch.bool),
        )  # fmt: skip


def evaluate(folder, engine, sets=SETS, **changes):
    folder.mkdir(exist_ok=True)
    responder = Responder(engine, TOKENIZER, 8)
    told = []
    settings = {
        "folder": folder, "environments": {"": LocalEnvironments(ArithmeticEnvironment())},
        "start": lambda: responder, "samples": SAMPLES, "batch_size": 2, "greedy": False,
        "notify": told.append, **changes,
    }  # fmt: skip
    return Evaluator(**settings).evaluate(sets), told


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_line_holds_what_was_asked_answered_and_scored(tmp_path):
    found, told = evaluate(tmp_path, Engine())
    rows = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    # Of the first batch, prompts 0 and 1: digits (0+0+3) % 3, (0+1+3) % 3, (0+2+3) % 3, ...
    assert rows[1] == {
        "index": 0, "sample": 1, "prompt": "0>", "response": "1", "reward": 0.5, "answer": "1", "gold": "0",
        "tokens": 2, "finished": True, "vote": 1,
    }  # fmt: skip
    assert [row["response"] for row in rows[:6]] == ["0", "1", "2", "1", "2", "0"]
    assert (found["one"].prompts, found["one"].samples) == (7, 3)
    assert found["one"].metrics["pass@3"].mean == 1.0
    assert found["one"].metrics["accuracy"].mean == pytest.approx(1 / 3)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["other"]["metrics"]["tokens"] == {"mean": 2.0, "stderr": 0.0}
    assert told[-1].startswith("other: 6 of 6 samples")


def test_rewards_are_weighted_as_the_recipe_weighs_them(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"input": "1>", "output": "1"}\n')
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    overrides = [
        "+env.rewards={one: 'reward_functions:one', half: 'reward_functions:half'}",
        "+env.reward_weights={one: 2.0, half: 4.0}",
        f"+eval={{sets: {{rows: {{data_path: {tmp_path}/rows.jsonl}}}}}}",
        f"logger.log_dir={tmp_path}",
    ]
    (tmp_path / "eval").mkdir()
    config = as_evaluated(load_over_given_weights(overrides, config=str(RECIPE)))
    responder = Responder(Engine(), TOKENIZER, 8)

    def with_engine(**settings):
        return Evaluator(**settings | {"start": lambda: responder})

    monkeypatch.setattr(evaluation, "Evaluator", with_engine)
    assert evaluation.evaluate(config)["rows"].metrics["reward"].mean == 2.0 * 1.0 + 4.0 * 0.5


@pytest.mark.parametrize("dies_at", [1, 2, 4, 5])
@pytest.mark.parametrize("cut", [0, 1, 150, 10_000])
def test_what_was_killed_at_any_byte_goes_on_to_the_same_files(tmp_path, dies_at, cut):
    evaluate(tmp_path / "whole", Engine())
    with pytest.raises(Killed):
        evaluate(tmp_path / "killed", Engine(dies_at))
    last = tmp_path / "killed" / ("one.jsonl" if dies_at < 5 else "other.jsonl")
    os.truncate(last, max(0, last.stat().st_size - cut))
    engine = Engine()
    evaluate(tmp_path / "killed", engine)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    if cut == 0:
        assert engine.calls == 5 - (dies_at - 1)


def test_what_is_whole_starts_nothing(tmp_path):
    found, _ = evaluate(tmp_path, Engine())
    before = files(tmp_path)

    def start():
        raise AssertionError

    again, told = evaluate(tmp_path, Engine(), start=start)
    assert again == found
    assert files(tmp_path) == before
    assert told == ["one: 21 of 21 samples are on disk", "other: 6 of 6 samples are on disk"]


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"{}\n", b'{"index": 0, "sample": 1}\n', b"[[[\n"])
def test_rows_behind_one_that_is_none_are_asked_again(tmp_path, damage):
    evaluate(tmp_path, Engine())
    before = files(tmp_path)
    lines = (tmp_path / "one.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "one.jsonl").write_bytes(b"".join([*lines[:7], damage, *lines[8:]]))
    engine = Engine()
    evaluate(tmp_path, engine)
    assert files(tmp_path) == before
    assert engine.calls == 3


def test_a_lone_surrogate_survives(tmp_path):
    sets = {"one": [Prompt(0, "1>", "\udc80")]}
    evaluate(tmp_path, Engine(), sets)
    evaluate(tmp_path, Engine(1), sets)
    assert json.loads((tmp_path / "one.jsonl").read_text().splitlines()[0])["gold"] == "\udc80"


IDENTITY = {"weights": "a", "sets": {"one": "b", "other": "c"}, "eval": {"temperature": 0.0, "top_p": 1.0}}


def test_files_of_another_identity_are_set_aside_by_number(tmp_path):
    told = []
    enter(tmp_path, IDENTITY, told.append)
    evaluate(tmp_path, Engine())
    first = files(tmp_path)
    enter(tmp_path, IDENTITY, told.append)
    assert files(tmp_path) == first
    assert told == []

    other = IDENTITY | {"eval": {"temperature": 0.5, "top_p": 1.0}}
    enter(tmp_path, other, told.append)
    assert files(tmp_path / "aside.1") == first
    assert files(tmp_path).keys() == {"evaluation.json"}
    assert told == [f"set aside: {tmp_path}/aside.1, with different eval.temperature"]
    evaluate(tmp_path, Engine())
    enter(tmp_path, IDENTITY, told.append)
    assert files(tmp_path / "aside.1") == first
    assert files(tmp_path / "aside.2").keys() == first.keys()


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_samples_without_a_readable_identity_are_set_aside(tmp_path, content):
    (tmp_path / "one.jsonl").write_text("{}\n")
    (tmp_path / "evaluation.json").write_text(content)
    enter(tmp_path, IDENTITY, lambda _line: None)
    assert (tmp_path / "aside.1/one.jsonl").read_text() == "{}\n"


def test_files_that_are_of_no_set_stay_where_they_are(tmp_path):
    for name in ("metrics.jsonl", "train.jsonl"):
        (tmp_path / name).write_text("{}\n")
    enter(tmp_path, IDENTITY, lambda _line: None)
    evaluate(tmp_path, Engine())
    enter(tmp_path, {"weights": "b", "sets": {"one": "b"}}, lambda _line: None)
    assert files(tmp_path).keys() == {"evaluation.json", "metrics.jsonl", "train.jsonl"}
    assert files(tmp_path / "aside.1").keys() == {
        "evaluation.json",
        "one.jsonl",
        "other.jsonl",
        "results.json",
    }


def test_the_digest_is_of_what_is_asked_and_scored():
    prompts = SETS["one"]
    changed = [
        prompts[:-1],
        prompts[::-1],
        [*prompts[:-1], Prompt(6, "6>", "1")],
        [*prompts[:-1], Prompt(6, "7>", "0")],
    ]
    assert len({digest_of(rows) for rows in (prompts, *changed)}) == 5


def test_a_folder_that_is_gone_is_told_by_its_key(tmp_path):
    with pytest.raises(FolderError, match=r"^logger\.log_dir: .*/gone .*\(No such"):
        enter(tmp_path / "gone", IDENTITY, print)


# Metrics, against the enumeration of all subsets and by hand
DRAWN = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2, 3]), st.booleans()), min_size=1, max_size=8)


def scored(reward, tokens, finished, vote):
    return SampleRow(0, 0, "", "", reward, None, "", tokens, finished, vote)


def elected(subset, votes):
    """The place of the sample that a subset elects, by counting."""
    counts = Counter(votes[place] for place in subset if votes[place] is not None)
    if not counts:
        return None
    most = max(counts.values())
    return next(place for place in subset if counts.get(votes[place]) == most)


def test_pass_at_k_stays_exact_where_factors_would_round():
    assert pass_at_k([True] + [False] * 9999, 1) == 1e-4
    assert pass_at_k([True] + [False] * 9999, 5000) == 0.5


@given(DRAWN)
def test_both_equal_the_enumeration_of_all_subsets(samples):
    votes, correct = [vote for vote, _ in samples], [right for _, right in samples]
    for k in range(1, len(samples) + 1):
        subsets = [*combinations(range(len(samples)), k)]
        passing = sum(any(correct[place] for place in subset) for subset in subsets)
        winners = [elected(subset, votes) for subset in subsets]
        right = sum(place is not None and correct[place] for place in winners)
        assert pass_at_k(correct, k) == passing / len(subsets)
        assert maj_at_k(votes, correct, k) == right / len(subsets)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("metric", [pass_at_k, lambda correct, k: maj_at_k([0, 1], correct, k)])
def test_more_samples_than_there_are_cannot_be_drawn(metric, k):
    with refused("too-few-samples", f"k = {k} ", 2):
        metric([True, False], k)


def test_the_error_is_of_means_of_prompts():
    # By samples it would be the standard deviation of 0, 0, 1, 1 over 2.
    found = over_prompts([0.0, 1.0])
    assert found == Estimate(0.5, pytest.approx(math.sqrt(0.5) / math.sqrt(2)))
    values = [0.1, 0.7, 0.4]
    assert over_prompts(values) == Estimate(
        pytest.approx(mean(values)), pytest.approx(stdev(values) / 3**0.5)
    )
    assert over_prompts([0.3]) == Estimate(0.3, None)


def test_a_set_by_hand():
    one = [scored(1.0, 4, True, 0), scored(0.5, 8, False, 1)]
    other = [scored(0.0, 2, True, 0), scored(0.0, 2, True, 0)]
    found = {name: estimate.mean for name, estimate in set_metrics([one, other], [1, 2]).items()}
    assert found == {
        "reward": 0.375,
        "accuracy": 0.25,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "maj@1": 0.25,
        "maj@2": 0.5,
        "tokens": 4.0,
        "truncated": 0.25,
    }
    assert set_metrics([one, other], [1])["accuracy"].stderr == 0.25
