"""The recipes of GRPO's variants: each makes the loss of its paper, from rewards to gradients.

A formula is written for an answer, token by token, with scalars and lists; nothing of the package is in it.
Rows are `GROUPS` prompts with `SAMPLES` answers each, of one to `LONGEST` tokens behind a prompt of two.
"""

import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.advantages import make_advantage_estimator
from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.models.memory import reference_place
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight

RECIPES = {
    path.stem.removesuffix("_cpu"): path
    for path in (Path(__file__).parents[4] / "examples/configs/recipes/variants").glob("*.yaml")
}
GROUPS, SAMPLES, PROMPT, LONGEST = 3, 4, 2, 6
ROWS = GROUPS * SAMPLES
LENGTHS = [6, 3, 1, 4, 5, 6, 2, 6, 3, 4, 6, 1]


@pytest.fixture
def x():
    """Answers as rows of log-probabilities of their tokens; the last group's rewards are all equal."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    current = -normal(ROWS, LONGEST).abs() - 0.2
    old = current + 0.3 * normal(ROWS, LONGEST)
    rewards = torch.tensor([1.0, 0.25, 0, 0.5, 0, 1, 1, 0.75, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    return SimpleNamespace(
        current=current.requires_grad_(),
        old=old,
        reference=old + 0.2 * normal(ROWS, LONGEST),
        rewards=rewards,
    )


def of_recipe(config, x):
    """The loss that the recipe makes of the rows."""
    mask = torch.zeros(ROWS, PROMPT + LONGEST, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT : PROMPT + length] = 1

    def columns(values):
        return torch.cat([values.new_zeros(ROWS, PROMPT), values], dim=1)

    estimator = make_advantage_estimator(config.grpo.adv_estimator, config.loss_fn)
    advantages = estimator.compute_advantage(
        prompt_ids=torch.arange(GROUPS).repeat_interleave(SAMPLES),
        rewards=x.rewards,
        mask=mask,
        logprobs_policy=columns(x.old),
        logprobs_reference=columns(x.reference),
    )
    batch = BatchedDataDict(
        token_mask=mask,
        sample_mask=torch.ones(ROWS, dtype=torch.float64),
        advantages=advantages,
        prev_logprobs=columns(x.old),
        generation_logprobs=columns(x.old),
        reference_policy_logprobs=columns(x.reference),
    )
    loss, _ = ClippedPGLossFn(config.loss_fn)(columns(x.current)[:, 1:], batch, ROWS, sum(LENGTHS))
    return loss


# --- the papers ---------------------------------------------------------------------------------------------


def groups_of(rewards):
    values = rewards.tolist()
    return [values[row // SAMPLES * SAMPLES :][:SAMPLES] for row in range(ROWS)]


def normalized(rewards):
    """(R - mean of the group) / its standard deviation; 0 where all are equal."""
    return [
        (reward - statistics.fmean(group)) / statistics.stdev(group) if len(set(group)) > 1 else 0.0
        for reward, group in zip(rewards.tolist(), groups_of(rewards), strict=True)
    ]


def tokens(row):
    return [(row, t) for t in range(LENGTHS[row])]


ALL_TOKENS = [token for row in range(ROWS) for token in tokens(row)]


def smaller(a, b):
    return a if a.item() <= b.item() else b


def held(ratio, low, high):
    return ratio if low <= ratio.item() <= high else ratio.new_tensor(min(max(ratio.item(), low), high))


def ppo(ratio, advantage, low, high):
    """The clipped objective of a ratio, to be made large."""
    return smaller(ratio * advantage, held(ratio, low, high) * advantage)


def token_ratio(x, token):
    return (x.current[token] - x.old[token]).exp()


def dr_grpo(x):
    """Equation 1 of the paper without std and 1/|o|: a sum over tokens over a constant, which here is their number."""
    advantages = [
        r - statistics.fmean(group) for r, group in zip(x.rewards.tolist(), groups_of(x.rewards), strict=True)
    ]
    total = sum(ppo(token_ratio(x, at), advantages[at[0]], 0.8, 1.2) for at in ALL_TOKENS)
    budget = ROWS * LONGEST
    return -total / budget * (budget / len(ALL_TOKENS))


def dapo(x):
    """Equation 8."""
    advantages = normalized(x.rewards)
    return -sum(ppo(token_ratio(x, at), advantages[at[0]], 0.8, 1.28) for at in ALL_TOKENS) / len(ALL_TOKENS)


def gspo(x):
    """Equations 5 to 7."""
    advantages = normalized(x.rewards)
    total = 0.0
    for row in range(ROWS):
        likelihood = sum(x.current[at] - x.old[at] for at in tokens(row)).exp()
        total = total + ppo(likelihood ** (1 / LENGTHS[row]), advantages[row], 0.9, 1.12)
    return -total / ROWS


def cispo(x):
    """Equations 4 and 5."""
    advantages = normalized(x.rewards)
    weights = {at: min(token_ratio(x, at).item(), 1.28) for at in ALL_TOKENS}
    return -sum(weights[at] * advantages[at[0]] * x.current[at] for at in ALL_TOKENS) / len(ALL_TOKENS)


def rloo(x):
    """Section 2.3: a sum over answers over their number, which here is that of the tokens."""
    total = 0.0
    for row, (reward, group) in enumerate(zip(x.rewards.tolist(), groups_of(x.rewards), strict=True)):
        others = (sum(group) - reward) / (SAMPLES - 1)
        total = total + (reward - others) * sum(x.current[at] for at in tokens(row))
    return -total / ROWS * (ROWS / len(ALL_TOKENS))


def reinforce_plus_plus(x):
    """The reward less beta times the k1 estimate of the token's divergence, whitened over all tokens; PPO's clip."""
    raw = {at: x.rewards[at[0]].item() - 0.01 * (x.old[at] - x.reference[at]).item() for at in ALL_TOKENS}
    mean, std = statistics.fmean(raw.values()), statistics.pstdev(raw.values())
    total = sum(ppo(token_ratio(x, at), (raw[at] - mean) / std, 0.8, 1.2) for at in ALL_TOKENS)
    return -total / len(ALL_TOKENS)


FORMULAS = {formula.__name__: formula for formula in (dr_grpo, dapo, gspo, cispo, rloo, reinforce_plus_plus)}


def test_every_variant_has_a_recipe():
    assert RECIPES.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_the_recipe_makes_the_loss_of_the_paper(name, x):
    config = load_config(RECIPES[name])
    expected, found = FORMULAS[name](x), of_recipe(config, x)
    # Where we divide by std + 1e-6 the papers divide by std.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    gradients = [torch.autograd.grad(loss, x.current)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
    assert gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("name", FORMULAS)
def test_the_preflight_accepts_it(name):
    config = load_config(RECIPES[name])
    plan = preflight(config)
    # Clipping needs a second optimizer step; REINFORCE has one.
    assert plan.batch.optimizer_steps == (1 if name == "rloo" else 4)
    assert config.policy.megatron_cfg.scheduler.lr_decay_iters == plan.steps * plan.batch.optimizer_steps
    assert bool(reference_place(config)) is (name == "reinforce_plus_plus")
    assert config.logger.log_dir == f"results/{name}_cpu"
    assert config.grpo.use_dynamic_sampling is (name == "dapo")
