"""What a comparison finds, worked out by hand, and what of it ends a run."""

import math

import numpy as np
import pytest
import torch
from algorithm_fakes import POLICY, recipe
from refusals import refused

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.algorithms.engine_comparison import (
    BOUNDS,
    Bounds,
    EnginesDifferError,
    bounds_of,
    compare,
    compare_at_start,
    rows_to_compare,
)

PROMPTS = [[3, 4, 5], [1]]


def logits(ids, vocabulary):
    """Of the token after these, different for all that has gone before."""
    return torch.sin(torch.arange(vocabulary) * (1.0 + sum(ids)) + len(ids)).double()


class Policy:
    """A `Policy` of those logits, at a temperature; what stands in the last column is about no token."""

    def __init__(self, temperature=1.0):
        self.temperature, self.lengths = temperature, []

    def get_topk_logits(self, data, k, *, trained_only=False):
        [ids] = data["input_ids"].tolist()
        self.lengths.append(int(data["input_lengths"]))
        rows = [logits(ids[: end + 1], k) / self.temperature for end in range(len(ids) - 1)]
        scaled = torch.stack([*rows, torch.zeros(k, dtype=torch.float64)]).unsqueeze(0)
        best = scaled.topk(k)
        return BatchedDataDict(
            topk_logits=best.values.float(), topk_indices=best.indices, logsumexp=scaled.logsumexp(-1).float()
        )


class Engines:
    """`ComparedEngines`: two of those logits; `fault` changes a row of the second one's."""

    def __init__(self, fault=lambda prompt, row: row, vocabulary=8):
        self.fault, self.vocabulary = fault, vocabulary

    def next_logprobs(self, prompts, temperature):
        right = [(logits(prompt, self.vocabulary) / temperature).log_softmax(-1) for prompt in prompts]
        wrong = [self.fault(place, row.float().numpy().copy()) for place, row in enumerate(right)]
        return [[row.float().numpy() for row in right], wrong]


def compared(engines, policy=None, temperature=1.0):
    return compare(policy or Policy(temperature), engines, PROMPTS, vocabulary=8, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_equal_functions_agree_at_any_temperature(temperature):
    found = compared(Engines(), temperature=temperature)
    assert (found.rows, found.vocabulary) == (2, 8)
    assert found.largest < 1e-6
    assert 0 <= found.kl < 1e-6
    assert found.require(BOUNDS["float32"]).startswith(
        "engine and training agree on 2 rows x 8 tokens: largest difference of log-"
    )


def test_training_is_asked_for_what_follows_the_whole_prompt():
    policy = Policy()
    compared(Engines(), policy)
    assert policy.lengths == [4, 2]


def nudged(place, row):
    if place == 1:
        row[6] -= 0.25
    return row


def test_the_engine_the_row_and_the_token_that_differ_most_are_named():
    found = compared(Engines(nudged))
    assert (found.engine, found.row, found.length, found.token) == (1, 1, 1, 6)
    assert found.largest == pytest.approx(0.25, abs=1e-6)
    right = logits([1], 8).log_softmax(-1)
    assert found.by_training == pytest.approx(float(right[6]), abs=1e-6)
    assert found.by_engine == pytest.approx(float(right[6]) - 0.25, abs=1e-6)
    wrong = right.clone()
    wrong[6] -= 0.25
    assert found.kl == pytest.approx(float(right.exp() @ (right - wrong.log_softmax(-1))), abs=1e-6)
    parts = "engine 1 ", "row 1 ", "token 6 ", "0.25", "0.001", "policy.generation.compare_at_start: false"
    with refused("logprobs-differ", *parts, by=EnginesDifferError):
        found.require(BOUNDS["float32"])
    found.require(Bounds(0.26, 0.1))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_no_number_is_the_largest_difference(value):
    def without(place, row):
        row[2] = value
        return row

    found = compared(Engines(without))
    assert (found.engine, found.token, found.largest) == (1, 2, math.inf)
    with refused("logprobs-differ", "token 2 ", by=EnginesDifferError):
        found.require(BOUNDS["bfloat16"])


def test_a_divergence_is_found_where_no_single_difference_is_large():
    found = compared(Engines(), Policy(temperature=2.0))
    with pytest.raises(EnginesDifferError):
        found.require(Bounds(difference=math.inf, kl=found.kl / 2))
    found.require(Bounds(difference=math.inf, kl=found.kl))


def test_another_vocabulary_is_told():
    with refused("vocabularies-differ", "engine 0 ", 9, "policy.model.vocab_size", 8, by=EnginesDifferError):
        compared(Engines(vocabulary=9))


def test_a_run_compares_at_the_temperature_of_its_logprobs():
    config = recipe("grpo", {"generation": POLICY["generation"] | {"temperature": 0.7}})
    vocabulary = config.policy.model.vocab_size
    compare_at_start(
        config, Policy(config.logprob_sampling.temperature), Engines(vocabulary=vocabulary), PROMPTS
    )
    with pytest.raises(EnginesDifferError):
        compare_at_start(config, Policy(1.0), Engines(vocabulary=vocabulary), PROMPTS)


def test_the_prompts_are_the_first_of_the_step_as_far_as_both_sides_take_them():
    config, tokenizer = recipe("grpo"), load_tokenizer("char")
    prompts = [Prompt(i, "" if i == 2 else "35" * 30, "") for i in range(config.prompts_per_step)]
    rows = rows_to_compare(config, prompts, tokenizer)
    assert len(rows) == min(4, config.prompts_per_step)
    longest = config.policy.max_total_sequence_length - 1
    assert rows[0] == tokenizer.encode("35" * 30)[:longest]
    if len(rows) > 2:
        assert rows[2] == [tokenizer.eos_token_id]


def test_the_bounds_are_those_of_the_coarser_number_format():
    policy = recipe("grpo").policy
    assert bounds_of(policy) == BOUNDS["float32"]
    assert bounds_of(policy.model_copy(update={"precision": "bfloat16"})) == BOUNDS["bfloat16"]
    vllm = policy.generation.vllm_cfg.model_copy(update={"precision": "bfloat16"})
    mixed = policy.generation.model_copy(update={"vllm_cfg": vllm})
    assert bounds_of(policy.model_copy(update={"generation": mixed})) == BOUNDS["float32"], "not read"
    mixed = mixed.model_copy(update={"backend": "vllm"})
    assert bounds_of(policy.model_copy(update={"generation": mixed})) == BOUNDS["bfloat16"]
