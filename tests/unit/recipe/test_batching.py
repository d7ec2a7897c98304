import copy

import pytest

from nemo_rl_mcore.config.policy import TokenBudgets
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.rules.policies import checked_policy
from nemo_rl_mcore.tools.check import preflight

SECTIONS = ("sequence_packing", "dynamic_batching")


@pytest.fixture
def policy(tree):
    """The exemplar's policy with sections set or extended: 12 tokens, unfused."""

    def make(**sections):
        given = copy.deepcopy(tree["policy"])
        given["megatron_cfg"]["use_fused_linear_logprobs"] = False
        given |= {"max_total_sequence_length": 12, "train_micro_batch_size": 2, "logprob_batch_size": 3}
        for name, values in sections.items():
            given[name] = given.get(name, {}) | values
        return checked_policy(given)

    return make


def test_microbatches_have_a_fixed_number_of_rows_unless_a_section_is_on(policy):
    given = policy(sequence_packing={"train_mb_tokens": 4}, dynamic_batching={"logprob_mb_tokens": 4})
    assert given.token_budgets is None


@pytest.mark.parametrize("name", SECTIONS)
def test_budgets_are_those_given(policy, name):
    section = {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 12}
    wanted = TokenBudgets(f"policy.{name}", name == "sequence_packing", train=40, logprob=12, length_round=64)
    assert policy(**{name: section}).token_budgets == wanted


@pytest.mark.parametrize("name", SECTIONS)
def test_a_budget_left_out_has_room_for_the_microbatch_of_whole_rows(policy, name):
    budgets = policy(**{name: {"enabled": True}}).token_budgets
    assert (budgets.train, budgets.logprob, budgets.length_round) == (24, 36, 64)


def test_packing_goes_with_fused_logprobs_where_its_key_allows_it(load, refusals):
    (text,) = refusals("policy.sequence_packing.enabled=true")
    assert "policy.megatron_cfg.use_fused_linear_logprobs: incompatible (enabled)" in text
    config = load(
        "policy.sequence_packing.enabled=true", "+policy.megatron_cfg.fused_linear_logprobs_packed=true"
    )
    assert config.policy.megatron_cfg.use_fused_linear_logprobs
    assert config.policy.token_budgets.packed
    assert all(ok for _, ok in preflight(config, elsewhere=True).guardrails)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_budget_of_training_has_room_for_a_pair(refusals, name):
    given = [
        f"policy.{name}.enabled=true",
        "policy.max_total_sequence_length=10",
        "policy.megatron_cfg.use_fused_linear_logprobs=false",
    ]
    recipe = "dpo_cpu.yaml"
    (text,) = refusals(*given, f"policy.{name}.train_mb_tokens=19", recipe=recipe)
    assert text == f"policy.{name}.train_mb_tokens: too-small (max_total_sequence_length)"
    config = load_config(f"examples/configs/{recipe}", [*given, f"policy.{name}.train_mb_tokens=20"])
    assert config.policy.token_budgets.of_training(config.rows_per_sample) == 20
    left_out = load_config(f"examples/configs/{recipe}", given)
    assert left_out.policy.token_budgets.of_training(left_out.rows_per_sample) == 2 * 32 * 10
