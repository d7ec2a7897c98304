"""PPO over Protocol fakes: the critic before and beside the policy, epochs, warm-up, and what is reported."""

import pytest
import torch
from algorithm_fakes import FakeCritic, FakePolicy, recipe
from algorithm_fakes import run as run_to_its_end

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms.ppo import explained_variance, shuffled
from nemo_rl_mcore.driver.algorithms.run_checkpoints import TooManySkippedStepsError
from nemo_rl_mcore.losses import ClippedPGLossFn, MseValueLossFn
from nemo_rl_mcore.rank.train_step import EMPTY_STEP

NAN = ("the loss is nan", "the loss is nan")


def run(ppo=None, loss_fn=None, policy_reasons=(None, None), critic_reasons=(None, None), **top):
    policy = FakePolicy(reasons=policy_reasons)
    critic = FakeCritic(policy.calls, critic_reasons)
    config = recipe("ppo", ppo=ppo or {}, loss_fn=loss_fn or {}, **top)
    return policy, critic, run_to_its_end(config, policy, critic=critic).observer


def test_a_step_asks_the_critic_before_it_trains_both():
    policy, _, notes = run()
    step = ["update_weights", "generate", "offload", "logprobs", "values", "train value", "train"]
    assert policy.calls == step * 2
    phases = ["generation", "logprobs", "values", "train"]
    assert notes.phases == [*phases, "weight_sync", *phases]


def test_the_reference_is_asked_for_a_penalty():
    policy, _, _ = run(loss_fn={"reference_policy_kl_penalty": 0.1})
    assert policy.calls[1:5] == ["generate", "offload", "logprobs", "reference"]
    assert "reference_policy_logprobs" in policy.batches[0]


def test_advantages_and_returns_are_those_of_the_old_values():
    estimator = {"name": "gae", "gae_lambda": 1.0, "normalize_advantages": False}
    policy, _, _ = run({"adv_estimator": estimator})
    batch = policy.batches[0]
    trained = batch["token_mask"] != 0
    columns = batch["values"].shape[1]
    assert torch.equal(batch["values"], torch.arange(columns).div(10).expand(batch.size, columns)), (
        "the critic's"
    )
    rewards = batch["rewards"][:, None].expand_as(trained)
    # With lambda and gamma 1 the returns are the rewards, and the advantages what the critic did not expect.
    torch.testing.assert_close(batch["returns"][trained], rewards[trained])
    torch.testing.assert_close(batch["advantages"][trained], (rewards - batch["values"])[trained])
    assert not batch["advantages"][~trained].any()


def test_each_epoch_has_its_order_and_both_models_share_it():
    policy, critic, _ = run({"ppo_epochs": 3})
    assert policy.calls[5:11] == ["train value", "train"] * 3
    orders = [
        [(p, s) for p, s in zip(b["prompt_index"].tolist(), b["sample_index"].tolist(), strict=True)]
        for b in policy.batches
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == sorted(orders[0]) for order in orders[:3]), "the same rows each time"
    for of_policy, of_critic in zip(policy.batches, critic.batches, strict=True):
        for key in ("prompt_index", "sample_index", "values", "returns", "advantages"):
            assert torch.equal(of_policy[key], of_critic[key])


def test_the_order_depends_on_seed_step_and_epoch_alone():
    batch = BatchedDataDict(row=torch.arange(50))
    first = shuffled(batch, seed=3, step=2, epoch=1)["row"]
    assert torch.equal(first, shuffled(batch, seed=3, step=2, epoch=1)["row"])
    assert sorted(first.tolist()) == list(range(50))
    for other in ((4, 2, 1), (3, 3, 1), (3, 2, 0)):
        assert not torch.equal(first, shuffled(batch, *other)["row"])


def test_the_losses_are_those_of_the_recipe():
    value_loss_fn = {"scale": 0.5, "cliprange": 0.2}
    policy, critic, _ = run(loss_fn={"ratio_clip_max": 0.3}, value_loss_fn=value_loss_fn)
    assert isinstance(policy.loss_fns[0], ClippedPGLossFn)
    assert policy.loss_fns[0].cfg.ratio_clip_max == 0.3
    assert isinstance(critic.loss_fns[0], MseValueLossFn)
    assert (critic.loss_fns[0].cfg.scale, critic.loss_fns[0].cfg.cliprange) == (0.5, 0.2)


def test_the_first_steps_may_train_the_critic_alone():
    policy, critic, notes = run({"critic_warmup_steps": 2, "max_num_steps": 3, "ppo_epochs": 2})
    assert len(critic.trained) == 6
    assert len(policy.trained) == 2
    last_step = [call for call in policy.calls[policy.calls.index("train") - 1 :] if "train" in call]
    assert last_step == ["train value", "train"] * 2
    for step, trained in ((1, False), (2, False), (3, True)):
        assert ("train/loss" in notes.steps[step]) is trained
        assert "value/loss" in notes.steps[step]
        assert "train/reward" in notes.steps[step]


def test_metrics_of_all_epochs_are_one_number_each():
    _, _, notes = run({"ppo_epochs": 2})
    found = notes.steps[1]
    assert found["train/num_valid_samples"] == found["value/num_valid_samples"] == 80
    assert (found["train/loss"], found["train/lr"]) == (0.75, 0.25)
    assert found["value/grad_norm"] == 1.5


def test_skipped_steps_of_either_model_are_counted():
    _, _, notes = run(critic_reasons=("the loss is nan", None), policy_reasons=(EMPTY_STEP, None))
    assert (notes.steps[2]["train/skipped_steps"], notes.steps[2]["train/empty_steps"]) == (2, 0)
    _, _, notes = run(policy_reasons=(None, "the loss is nan"), critic_reasons=(None, "the loss is nan"))
    assert notes.steps[2]["train/skipped_steps"] == 2, "one step of both"
    _, _, notes = run(policy_reasons=(EMPTY_STEP, None), critic_reasons=(EMPTY_STEP, None))
    assert (notes.steps[2]["train/skipped_steps"], notes.steps[2]["train/empty_steps"]) == (0, 2)


@pytest.mark.parametrize("broken", ["policy_reasons", "critic_reasons"])
def test_one_model_that_never_steps_ends_the_run_though_the_other_does(broken):
    with pytest.raises(TooManySkippedStepsError, match=r"step 2: .* 4 times"):
        run({"max_num_steps": 9}, max_consecutive_skips=3, **{broken: NAN})


# --- explained variance -------------------------------------------------------------------------------------


def states(values, returns, token_mask, sample_mask):
    return BatchedDataDict(
        values=torch.tensor(values, dtype=torch.float64),
        returns=torch.tensor(returns, dtype=torch.float64),
        token_mask=torch.tensor(token_mask),
        sample_mask=torch.tensor(sample_mask),
    )


@pytest.mark.parametrize(
    ("values", "returns", "token_mask", "sample_mask", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1, 1], 1, 1.0),
        ([6.0, 7.0], [1.0, 2.0], [1, 1], 1, 1.0),  # a constant error is no variance
        ([5.0, 5.0], [1.0, 2.0], [1, 1], 1, 0.0),
        ([2.0, 1.0], [1.0, 2.0], [1, 1], 1, -3.0),
        ([1.0, 2.0], [3.0, 3.0], [1, 1], 1, 0.0),  # nothing to explain
        ([1.0, 2.0], [1.0, 5.0], [0, 1], 1, 0.0),  # less than two tokens
        ([1.0, 2.0], [1.0, 5.0], [1, 1], 0, 0.0),
    ],
)
def test_explained_variance_by_hand(values, returns, token_mask, sample_mask, expected):
    found = explained_variance(states([values], [returns], [token_mask], [sample_mask]))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [3, 7, 1000])
def test_explained_variance_of_equal_decimal_returns_is_zero(tokens):
    values = torch.linspace(-1, 1, tokens).tolist()
    assert explained_variance(states([values], [[0.7] * tokens], [[1] * tokens], [1])) == 0
