import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_filters import kept_tokens

from nemo_rl_mcore.ops.sampling import (
    SamplingParams,
    filter_logits,
    keyed_uniforms,
    sample_keys,
    sample_tokens,
)


def keys(rows, seed=1, step=2):
    return sample_keys(seed, step, torch.arange(rows), torch.zeros(rows, dtype=torch.long))


def test_uniforms_are_uniform_and_independent_over_keys_and_positions():
    drawn = torch.stack([keyed_uniforms(keys(4000), position) for position in range(8)])
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # Chi-square over 50 equal bins; the 0.001 quantiles of 49 degrees of freedom are 23.98 and 85.35.
    counts = torch.histc(drawn.flatten(), bins=50, min=0, max=1)
    expected = drawn.numel() / 50
    assert 23.98 < ((counts - expected) ** 2 / expected).sum() < 85.35
    correlation = torch.corrcoef(drawn) - torch.eye(8)
    assert correlation.abs().max() < 4.5 / 4000**0.5


@pytest.mark.parametrize("changed", ["seed", "step", "prompt", "sample"])
def test_every_part_of_the_key_counts(changed):
    base = {"seed": 3, "step": 5, "prompt": 7, "sample": 11}
    other = base | {changed: base[changed] + 1}

    def noise(parts):
        key = sample_keys(
            parts["seed"], parts["step"], torch.tensor([parts["prompt"]]), torch.tensor([parts["sample"]])
        )
        return [float(keyed_uniforms(key, position)) for position in range(4)]

    assert noise(base) == noise(dict(base))
    assert not set(noise(base)) & set(noise(other))


def test_the_first_turn_has_the_key_of_answers_without_turns_and_each_other_its_own():
    prompts, samples = torch.arange(500).repeat_interleave(4), torch.arange(4).repeat(500)
    without = sample_keys(3, 5, prompts, samples)
    turns = [sample_keys(3, 5, prompts, samples, torch.full_like(prompts, turn)) for turn in range(6)]
    assert torch.equal(turns[0], without)
    assert len(torch.cat(turns).unique()) == 6 * 2000
    mixed = sample_keys(3, 5, prompts, samples, prompts % 2)
    assert torch.equal(mixed, torch.where(prompts % 2 == 0, turns[0], turns[1]))
    drawn = torch.stack([keyed_uniforms(keys, position) for keys in turns[:3] for position in range(3)])
    assert (torch.corrcoef(drawn) - torch.eye(9)).abs().max() < 4.5 / 2000**0.5


def test_the_keys_of_answers_without_turns_are_those_of_earlier_versions():
    found = sample_keys(42, 7, torch.tensor([0, 5]), torch.tensor([1, 0]))
    assert found.tolist() == [8950214677219389925, 3733060190059209145]


def test_frequencies_follow_the_softmax_at_a_temperature():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    rows = 40_000
    tokens, logprobs = sample_tokens(
        logits.expand(rows, -1), keyed_uniforms(keys(rows), 0), SamplingParams(temperature=0.7)
    )
    wanted = (logits.double() / 0.7).softmax(-1)
    found = torch.bincount(tokens, minlength=5) / rows
    assert found[4] == 0
    assert (found - wanted).abs().max() < 4.5 * 0.5 / rows**0.5
    assert torch.allclose(logprobs, wanted.log().float()[tokens], atol=1e-5)


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_top_k_keeps_the_k_likeliest(top_k, seed):
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed))
    found = filter_logits(logits, SamplingParams(top_k=top_k))
    assert (found.isfinite().sum(1) == top_k).all()
    assert torch.equal(found[found.isfinite()], logits[found.isfinite()])
    dropped = logits.masked_fill(found.isfinite(), -torch.inf).amax(1)
    kept = logits.masked_fill(~found.isfinite(), torch.inf).amin(1)
    assert (kept > dropped).all()


@given(st.floats(0.01, 0.99), st.integers(0, 10_000))
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, seed):
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
    found = filter_logits(logits, SamplingParams(top_p=top_p))
    for row_logits, row in zip(logits, found, strict=True):
        probabilities = row_logits.softmax(-1)
        kept = probabilities[row.isfinite()]
        assert kept.sum() >= top_p - 1e-5
        assert kept.sum() - kept.min() < top_p + 1e-5
        assert row[probabilities.argmax()].isfinite()


def test_extreme_logits_give_finite_answers():
    logits = torch.tensor([[120.0, -120.0, 0.0], [-120.0, -120.0, -120.0]])
    tokens, logprobs = sample_tokens(
        logits, torch.tensor([0.999999999, 0.0], dtype=torch.float64), SamplingParams()
    )
    assert tokens.tolist() == [0, 0]
    assert logprobs.isfinite().all()


TIED = [[2.0, 1.0, 1.0, 1.0, 0.0], [0.0] * 5, [0.0, 3.0, 3.0, 0.0, 3.0]]


@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.65, 0.79, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_ties_are_kept_by_top_k_and_go_by_their_ids_in_top_p(top_k, top_p, temperature):
    logits = torch.tensor(TIED)
    found = filter_logits(logits, SamplingParams(temperature, top_k, top_p)).isfinite()
    assert torch.equal(found, kept_tokens(logits, temperature, top_k, top_p))


def test_the_ties_worked_out_by_hand():
    kept = [
        filter_logits(torch.tensor(TIED), SamplingParams(top_k=2, top_p=p)).isfinite() for p in (1.0, 0.65)
    ]
    assert kept[0].tolist() == [[True] * 4 + [False], [True] * 5, [False, True, True, False, True]]
    # e^2 and three e of 15.54: of the three the first is within the 35 % that go, the second crosses them.
    assert kept[1].tolist()[0] == [True, False, False, True, False]
    assert kept[1].tolist()[1:] == [[False, True, True, True, True], [False, False, True, False, True]]


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_filters_choose_the_tokens_and_leave_their_logprobs(filters):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(2000, -1)
    tokens, logprobs = sample_tokens(
        logits, keyed_uniforms(keys(2000), 0), SamplingParams(temperature=0.7, **filters)
    )
    kept = filter_logits(logits[:1], SamplingParams(0.7, **filters))
    assert sorted(set(tokens.tolist())) == kept.isfinite().nonzero()[:, 1].tolist()
    assert 1 < kept.isfinite().sum() < 4
    assert torch.allclose(logprobs, (kept / 0.7).log_softmax(-1)[0, tokens])
