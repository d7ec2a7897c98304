"""Advantage estimators against their definitions, row by row and token by token, and the rewards that they are of."""

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from refusals import refused

from nemo_rl_mcore.config import AdvantageEstimatorConfig, ClippedPGLossConfig
from nemo_rl_mcore.config.algorithm import GRPOConfig, RewardScalingConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import (
    estimator_of,
    group_statistics,
    make_advantage_estimator,
)
from nemo_rl_mcore.driver.rollouts.scheduler import EQUAL_REWARDS, Draw, scale_rewards, shape_rewards
from nemo_rl_mcore.errors import CustomCodeError
from nemo_rl_mcore.recipe.load import load_config

KL_IN_REWARD = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.3}


def estimator(name, loss=None, **keys):
    return make_advantage_estimator(
        AdvantageEstimatorConfig(name=name, **keys), ClippedPGLossConfig(**(loss or {}))
    )


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def inputs(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy = -normal(rows, columns).abs()
    return {
        "prompt_ids": torch.randint(0, 3, (rows,), generator=generator),
        "rewards": normal(rows),
        "mask": (torch.rand(rows, columns, generator=generator) < 0.6).long(),
        "values": normal(rows, columns),
        "policy": policy,
        "reference": policy + 0.5 * normal(rows, columns),
    }


def gae(x, loss=None, **keys):
    """Advantages and returns."""
    given = {"values": x["values"], "logprobs": x["policy"], "reference_logprobs": x["reference"]}
    found = estimator("gae", loss, **keys)
    return found.compute_advantage(prompt_ids=None, rewards=x["rewards"], mask=x["mask"], **given)


def reinforce(x, loss=None, **keys):
    given = {"logprobs_policy": x["policy"], "logprobs_reference": x["reference"]}
    whole = {key: x[key] for key in ("prompt_ids", "rewards", "mask")} | given
    return estimator("reinforce_plus_plus", loss, **keys).compute_advantage(**whole)


def plain_kl(loss, c, r):
    q, limit = r - c, loss.kl_input_clamp_value
    q = q if limit is None else min(max(q, -limit), limit)
    kl = {"k1": -q, "k2": q * q / 2, "k3": math.exp(q) - 1 - q}[loss.reference_policy_kl_type]
    limit = loss.kl_output_clamp_value
    return kl if limit is None else min(max(kl, -limit), limit)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "gae"])
def test_a_batch_is_given_the_advantages_of_its_tensors(name):
    """Of two answers to each of two prompts; the last one is dropped."""
    generator = torch.Generator().manual_seed(3)
    values, policy, reference = torch.randn(3, 4, 5, generator=generator)
    batch = BatchedDataDict(
        prompt_index=torch.tensor([7, 7, 9, 9]),
        rewards=torch.tensor([0.0, 1.0, 0.25, 0.5]),
        token_mask=torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).float(),
        sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        values=values,
        prev_logprobs=policy,
        reference_policy_logprobs=reference,
    )
    config, loss = AdvantageEstimatorConfig(name=name), ClippedPGLossConfig(**KL_IN_REWARD)
    make_advantage_estimator(config, loss).add_to(batch)
    given = {"values": values, "logprobs": policy, "reference_logprobs": reference}
    if name != "gae":
        given = {"logprobs_policy": policy, "logprobs_reference": reference}
    expected = estimator(name, KL_IN_REWARD).compute_advantage(
        batch["prompt_index"], batch["rewards"], batch["token_mask"] * batch["sample_mask"][:, None], **given
    )
    advantages, *returns = expected if name == "gae" else (expected,)
    assert torch.equal(batch["advantages"], advantages)
    if name == "gae":
        assert torch.equal(batch["returns"], *returns)
        del batch["values"]
        with refused("missing-column", "'values'", "adv_estimator.name: gae"):
            make_advantage_estimator(config, loss).add_to(batch)


# --- GRPO ---------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 2)), min_size=1, max_size=10),
    leave_one_out=st.booleans(),
    normalize=st.booleans(),
)
def test_grpo_is_its_definition(rows, leave_one_out, normalize):
    grpo = estimator("grpo", use_leave_one_out_baseline=leave_one_out, normalize_rewards=normalize)
    found = grpo.compute_advantage(
        prompt_ids=torch.tensor([g for g, _ in rows]),
        rewards=doubles([r for _, r in rows]),
        mask=torch.zeros(len(rows), 3),
    )
    for row, (group, reward) in enumerate(rows):
        peers = [r for i, (g, r) in enumerate(rows) if g == group and not (leave_one_out and i == row)]
        expected = reward - (statistics.fmean(peers) if peers else reward)
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        if normalize and std > 0:
            expected /= std + 1e-6
        assert found[row].tolist() == pytest.approx([expected] * 3, rel=1e-6, abs=1e-9)


# --- REINFORCE++ --------------------------------------------------------------------------------------------


def reinforce_textbook(x, minus_baseline, loss):
    ids, rewards, mask = x["prompt_ids"].tolist(), x["rewards"].tolist(), x["mask"].tolist()
    table = []
    for b, reward in enumerate(rewards):
        group = [r for g, r in zip(ids, rewards, strict=True) if g == ids[b]]
        base = reward - (statistics.fmean(group) if minus_baseline else 0)
        table.append([base] * len(mask[b]))
        if loss.use_kl_in_reward:
            for t in range(len(mask[b])):
                kl = plain_kl(loss, x["policy"][b, t].item(), x["reference"][b, t].item())
                table[b][t] -= loss.reference_policy_kl_penalty * kl
    valid = [table[b][t] for b, row in enumerate(mask) for t, on in enumerate(row) if on]
    mean = statistics.fmean(valid)
    variance = max(statistics.pvariance(valid, mean), 1e-8)
    return [[(value - mean) / math.sqrt(variance) for value in row] for row in table]


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    seed=st.integers(0, 9999),
    minus_baseline=st.booleans(),
    loss=st.sampled_from(
        [
            {},
            KL_IN_REWARD,
            KL_IN_REWARD | {"reference_policy_kl_type": "k1"},
            KL_IN_REWARD | {"reference_policy_kl_type": "k2", "kl_input_clamp_value": 0.2},
            KL_IN_REWARD | {"kl_output_clamp_value": 0.05},
        ]
    ),
)
def test_reinforce_plus_plus_is_its_definition(shape, seed, minus_baseline, loss):
    x = inputs(*shape, seed)
    x["mask"][0, 0] = 1
    found = reinforce(x, loss, minus_baseline=minus_baseline)
    expected = reinforce_textbook(x, minus_baseline, ClippedPGLossConfig(**loss))
    torch.testing.assert_close(found, doubles(expected), rtol=1e-8, atol=1e-8)


def test_the_variance_has_a_floor():
    found = estimator("reinforce_plus_plus", minus_baseline=False).compute_advantage(
        prompt_ids=torch.zeros(2), rewards=doubles([1, 1 + 2e-6]), mask=torch.ones(2, 1)
    )
    assert found[:, 0].tolist() == pytest.approx([-1e-6 / 1e-4, 1e-6 / 1e-4], rel=1e-4)


def test_equal_decimal_rewards_have_no_advantage_after_whitening():
    found = estimator("reinforce_plus_plus", minus_baseline=False).compute_advantage(
        prompt_ids=torch.zeros(7), rewards=torch.full((7,), 999.9), mask=torch.ones(7, 101)
    )
    assert not found.any()


# --- GAE ----------------------------------------------------------------------------------------------------


def squared_cost_gae(rewards, values, gamma, lam):
    """The definition: A_t = sum over l of (gamma lam)^l delta_{t+l}, over the tokens that count."""
    ends = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, ends, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def gae_textbook(x, cfg, loss):
    rows, columns = x["mask"].shape
    advantages = [[0.0] * columns for _ in range(rows)]
    returns: list[list[float | None]] = [[None] * columns for _ in range(rows)]
    for b in range(rows):
        on = [t for t in range(columns) if x["mask"][b, t]]
        if not on:
            continue
        rewards = [0.0] * len(on)
        if loss.use_kl_in_reward:
            pairs = [(x["policy"][b, t].item(), x["reference"][b, t].item()) for t in on]
            rewards = [-loss.reference_policy_kl_penalty * plain_kl(loss, c, r) for c, r in pairs]
        rewards[-1] += x["rewards"][b].item()
        values = [x["values"][b, t].item() for t in on]
        policy_lambda = cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy
        if cfg.length_adaptive_alpha > 0:
            policy_lambda = min(max(1 - 1 / max(cfg.length_adaptive_alpha * len(on), 1), 0), 1)
        value_lambda = cfg.gae_lambda if cfg.gae_lambda_value is None else cfg.gae_lambda_value
        for t, a in zip(on, squared_cost_gae(rewards, values, cfg.gae_gamma, policy_lambda), strict=True):
            advantages[b][t] = a
        for t, a in zip(on, squared_cost_gae(rewards, values, cfg.gae_gamma, value_lambda), strict=True):
            returns[b][t] = a + x["values"][b, t].item()
    valid = [advantages[b][t] for b, t in x["mask"].nonzero().tolist()]
    if cfg.normalize_advantages and valid:
        mean = statistics.fmean(valid)
        variance = max(statistics.variance(valid, mean) if len(valid) > 1 else 0.0, 1e-8)
        for b, t in x["mask"].nonzero().tolist():
            advantages[b][t] = (advantages[b][t] - mean) / math.sqrt(variance)
    return advantages, returns


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 7)),
    seed=st.integers(0, 9999),
    keys=st.fixed_dictionaries(
        {},
        optional={
            "gae_lambda": st.sampled_from([0.0, 0.5, 1.0]),
            "gae_gamma": st.sampled_from([0.0, 0.9, 1.0]),
            "gae_lambda_value": st.sampled_from([0.0, 1.0]),
            "gae_lambda_policy": st.sampled_from([0.0, 0.7]),
            "length_adaptive_alpha": st.sampled_from([0.1, 0.5, 2.0]),
            "normalize_advantages": st.booleans(),
        },
    ),
    loss=st.sampled_from([{}, KL_IN_REWARD, KL_IN_REWARD | {"kl_output_clamp_value": 0.05}]),
    form=st.sampled_from([torch.int64, torch.bool, torch.float32]),
)
def test_gae_is_its_quadratic_definition(shape, seed, keys, loss, form):
    x = inputs(*shape, seed)
    advantages, returns = gae(x | {"mask": x["mask"].to(form)}, loss, **keys)
    cfg = AdvantageEstimatorConfig(name="gae", **keys)
    expected, expected_returns = gae_textbook(x, cfg, ClippedPGLossConfig(**loss))
    torch.testing.assert_close(advantages, doubles(expected), rtol=1e-8, atol=1e-8)
    for b, t in x["mask"].nonzero().tolist():
        assert returns[b, t].item() == pytest.approx(expected_returns[b][t], rel=1e-9, abs=1e-9)
    assert not advantages[x["mask"] == 0].any()


def test_returns_that_do_not_depend_on_the_values_do_not_vary_with_them():
    """Without discount the values cancel from the returns: each is the reward itself, not the reward nearly."""
    x = {key: tensor.float() for key, tensor in inputs(6, 64, seed=9).items()}
    x["mask"][:] = 1
    advantages, returns = estimator("gae", gae_lambda=1.0).compute_advantage(
        prompt_ids=None, rewards=torch.full((6,), 0.1), mask=x["mask"], values=100 * x["values"]
    )
    assert returns.dtype is advantages.dtype is torch.float32
    assert torch.equal(returns, torch.full((6, 64), 0.1))


# --- masks and missing inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_columns_do_not_reach_the_others(poison):
    x = inputs(4, 6, seed=3)
    off = x["mask"] == 0
    y = x | {key: x[key].masked_fill(off, poison) for key in ("values", "policy", "reference")}

    (advantages, returns), (clean_advantages, clean_returns) = gae(y, KL_IN_REWARD), gae(x, KL_IN_REWARD)
    assert torch.equal(advantages, clean_advantages)
    assert torch.equal(returns[~off], clean_returns[~off])
    assert torch.equal(reinforce(y, KL_IN_REWARD)[~off], reinforce(x, KL_IN_REWARD)[~off])


def test_a_batch_without_tokens_gives_finite_advantages():
    x = inputs(2, 3, seed=4) | {"mask": torch.zeros(2, 3)}
    assert not gae(x)[0].any()
    assert torch.isfinite(reinforce(x)).all()


@pytest.mark.parametrize(
    ("name", "given_keys", "missing"),
    [
        ("reinforce_plus_plus", {}, "logprobs_policy, logprobs_reference"),
        ("reinforce_plus_plus", {"logprobs_policy": torch.zeros(2, 3)}, "logprobs_reference"),
        ("gae", {"values": torch.zeros(2, 3)}, "logprobs, reference_logprobs"),
        ("gae", {"values": torch.zeros(2, 3), "reference_logprobs": torch.zeros(2, 3)}, "logprobs"),
    ],
)
def test_kl_in_reward_names_the_log_probabilities_it_lacks(name, given_keys, missing):
    inputs = {"prompt_ids": torch.zeros(2), "rewards": torch.ones(2), "mask": torch.ones(2, 3)}
    with refused("missing-logprobs", f" {missing} ", "use_kl_in_reward: true"):
        estimator(name, KL_IN_REWARD).compute_advantage(**inputs, **given_keys)
    no_penalty = KL_IN_REWARD | {"reference_policy_kl_penalty": 0.0}
    estimator(name, no_penalty).compute_advantage(**inputs, **given_keys)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_gdpo_judges_each_reward_within_its_group_and_whitens_their_weighted_sum(normalize, leave_one_out):
    prompts = [0, 0, 0, 1, 1, 1]
    named = {"right": [1.0, 0.0, 1.0, 0.0, 0.0, 0.0], "form": [0.2, 0.4, 0.9, 0.5, 0.1, 0.3]}
    weights = {"form": 0.25}
    totals = [0.0] * 6
    for name, values in named.items():
        for row, value in enumerate(values):
            others = [
                one
                for place, one in enumerate(values)
                if prompts[place] == prompts[row] and not (leave_one_out and place == row)
            ]
            advantage, deviation = value - statistics.mean(others), statistics.stdev(others)
            if normalize and deviation:
                advantage /= deviation + 1e-6
            totals[row] += weights.get(name, 1.0) * advantage
    expected = [(one - statistics.mean(totals)) / statistics.stdev(totals) for one in totals]

    made = estimator("gdpo", normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    made.reward_weights = weights
    batch = BatchedDataDict(
        prompt_index=torch.tensor(prompts),
        rewards=doubles(named["right"]) + doubles(named["form"]),
        token_mask=torch.ones(6, 4),
        sample_mask=torch.ones(6),
        **{f"rewards/{name}": doubles(values) for name, values in named.items()},
    )
    made.add_to(batch)
    torch.testing.assert_close(
        batch["advantages"], doubles(expected)[:, None].expand(6, 4), rtol=0, atol=1e-12
    )


def test_gdpo_with_a_single_reward_is_refused():
    batch = BatchedDataDict(
        prompt_index=torch.zeros(2),
        rewards=torch.ones(2),
        token_mask=torch.ones(2, 3),
        sample_mask=torch.ones(2),
    )
    batch["rewards/right"] = torch.ones(2)
    with refused("missing-rewards", "adv_estimator.name", "right"):
        estimator("gdpo").add_to(batch)


# Estimators of the user's own


def recipe(algorithm, name, *more):
    exemplar = {"grpo": "grpo_copy_cpu.yaml", "ppo": "ppo_cpu.yaml"}[algorithm]
    path = f"+{algorithm}.adv_estimator.type=custom_parts:{name}"
    return load_config(exemplar, [path, *more])


def batch():
    return BatchedDataDict(
        prompt_index=torch.tensor([0, 0]),
        sample_index=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, 0.0]),
        token_mask=torch.tensor([[0.0, 1, 1], [0, 1, 0]]),
        sample_mask=torch.ones(2),
        values=torch.full((2, 3), 0.25),
    )


def test_a_class_of_ones_own_takes_the_place_of_the_estimator():
    config, given = recipe("grpo", "MeanAdvantage", "+grpo.adv_estimator.args={factor: 2.0}"), batch()
    estimator_of(config, config.loss_fn).add_to(given)
    assert given["advantages"].equal(torch.tensor([[1.0, 1, 1], [-1, -1, -1]]))


def test_one_of_ppo_is_given_values_and_gives_returns():
    config, given = recipe("ppo", "CriticAdvantage"), batch()
    estimator_of(config, config.loss_fn).add_to(given)
    assert given["advantages"].equal(torch.tensor([[0.0, 0.75, 0.75], [0, -0.25, 0]]))
    assert given["returns"].equal(given["advantages"] + 0.25)


@pytest.mark.parametrize("name", ["ShortAdvantage", "EndlessAdvantage"])
def test_what_is_no_finite_number_a_token_is_refused(name):
    config = recipe("grpo", name)
    with refused("estimator-result", by=CustomCodeError):
        estimator_of(config, config.loss_fn).add_to(batch())


def test_a_class_without_the_method_is_refused_before_ranks_start():
    with refused("missing-member"):
        estimator_of(recipe("grpo", "LengthReward"), ClippedPGLossConfig())


# Rewards, as they are shaped and compared


def test_scaling_maps_the_interval_and_clamps_outside_of_it():
    rewards = doubles([-9, 0, 1, 2, 9])
    keys = {"source_min": 0.0, "source_max": 2.0, "target_min": -1.0, "target_max": 3.0}
    assert scale_rewards(RewardScalingConfig(enabled=True, **keys), rewards).tolist() == [-1, -1, 1, 3, 3]
    assert rewards.tolist() == [-9, 0, 1, 2, 9]


def test_the_overlong_penalty_by_hand():
    # max 10, buffer 4: free up to 6, then a quarter of 2.0 per token, and on beyond 10.
    section = shaping(overlong_buffer_length=4, overlong_buffer_penalty=2.0, max_response_length=10)
    lengths = torch.tensor([0, 6, 7, 8, 10, 12])
    batch = BatchedDataDict(
        rewards=torch.ones(6),
        token_mask=(torch.arange(12) < lengths.unsqueeze(1)).float(),
        sample_mask=torch.ones(6),
        finished=torch.ones(6),
    )
    shape_rewards(section, batch)
    assert batch["rewards"].tolist() == [1, 1, 0.5, 0, -1, -2]


def shaping(**keys):
    counts = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 1}
    shaped = {"use_dynamic_sampling": True, "reward_shaping": {"enabled": True, **keys}}
    return GRPOConfig.model_validate(counts | shaped)


def test_an_overlong_buffer_needs_a_length():
    with pytest.raises(ValidationError, match=r"reward_shaping\.overlong_buffer_length"):
        shaping(overlong_buffer_length=0, max_response_length=4)


def exact_statistics(peers):
    """Mean and unbiased variance; the variance of less than two is 0."""
    mean = sum(peers, Fraction()) / len(peers)
    squares = sum(((peer - mean) ** 2 for peer in peers), Fraction())
    return mean, squares / max(len(peers) - 1, 1)


TENTHS = st.integers(-10_000, 10_000)
# Few different values in a group, as environments give them: the others of a row are often equal.
GROUP_OF_TENTHS = st.lists(TENTHS, min_size=1, max_size=3).flatmap(
    lambda values: st.lists(st.sampled_from(values), min_size=2, max_size=64)
)


@settings(deadline=None)
@given(
    groups=st.lists(GROUP_OF_TENTHS | st.lists(TENTHS, min_size=2, max_size=64), min_size=1, max_size=4),
    leave_one_out=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@example(groups=[[1] * 7 + [10]], leave_one_out=True, random=None)
def test_group_statistics_are_exact_arithmetic_of_decimal_rewards(groups, leave_one_out, random):
    rows = [(number, tenths) for number, group in enumerate(groups) for tenths in group]
    if random is not None:
        random.shuffle(rows)
    ids = torch.tensor([number for number, _ in rows])
    rewards = torch.tensor([tenths for _, tenths in rows]) / 10
    found = group_statistics(ids, rewards, leave_one_out=leave_one_out)
    exact = [(number, Fraction(reward)) for (number, _), reward in zip(rows, rewards.tolist(), strict=True)]
    for row, (number, _) in enumerate(exact):
        peers = [r for i, (n, r) in enumerate(exact) if n == number and not (leave_one_out and i == row)]
        mean, variance = exact_statistics(peers)
        assert found.baseline[row].item() == pytest.approx(float(mean), rel=1e-14, abs=1e-13)
        std = found.std[row].item()
        assert std == pytest.approx(math.sqrt(variance), rel=1e-13, abs=0.0)


def test_a_group_is_the_rows_with_equal_prompt_tokens():
    tokens = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]])
    rewards = doubles([1, 5, 3, 9])
    assert group_statistics(tokens, rewards, leave_one_out=False).baseline.tolist() == [2, 7, 2, 7]
    assert group_statistics(tokens, rewards, leave_one_out=True).baseline.tolist() == [3, 9, 1, 5]


def deviates(groups, rewards):
    return group_statistics(groups, rewards, leave_one_out=False).std != 0


def test_a_signal_is_not_a_matter_of_rounding():
    rewards = torch.tensor([0.1] * 7 + [0.1, math.nextafter(0.1, 1)], dtype=torch.float64)
    assert not deviates(torch.zeros(8), rewards[:8]).any()
    assert deviates(torch.zeros(9), rewards).all()


@pytest.mark.parametrize(
    ("rewards", "signal"), [([1.0, 1.0], False), ([1.0, 0.0], True), ([0.0, 0.0], False)]
)
def test_dynamic_sampling_judges_what_the_environment_gave_and_not_the_length(rewards, signal):
    """NeMo RL's unshaped_total_reward: the second answer is longer, and is penalised for it."""
    section = shaping(overlong_buffer_length=2, max_response_length=4)
    mask = torch.tensor([[0.0, 1, 0, 0, 0], [0, 1, 1, 1, 1]])
    batch = BatchedDataDict(
        rewards=torch.tensor(rewards),
        token_mask=mask,
        sample_mask=torch.ones(2),
        finished=torch.ones(2),
        prompt_index=torch.zeros(2, dtype=torch.long),
        sample_index=torch.arange(2),
    )
    assert Draw(None, None, 1, 2, section).unused_for(batch) == (None if signal else EQUAL_REWARDS)
