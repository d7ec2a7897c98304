from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_mcore.config import ConfigError, load_config
from nemo_rl_mcore.config.schema import fields, is_known
from nemo_rl_mcore.config.unsupported import UNSUPPORTED, screen

STOCK = Path(__file__).parents[2] / "fixtures/nemo_rl_grpo_stock.yaml"


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        nested = leaves(value, path) if isinstance(value, dict) and value else [path]
        found += nested
    return found


STOCK_KEYS = leaves(yaml.safe_load(STOCK.read_text()))


@pytest.fixture(scope="module")
def stock_problems():
    with pytest.raises(ConfigError) as caught:
        load_config(STOCK)
    return caught.value.problems


def test_the_fixture_is_a_whole_recipe():
    assert len(STOCK_KEYS) > 200


@pytest.mark.parametrize("path", STOCK_KEYS)
def test_every_stock_key_is_accepted_or_refused_with_what_to_do(stock_problems, path):
    assert is_known(path)
    for problem in stock_problems:
        if problem.path == path or path.startswith(f"{problem.path}."):
            assert problem.what != "unknown key"
            assert problem.remedy


def test_the_refusals_of_the_stock_recipe(stock_problems):
    assert {problem.path for problem in stock_problems} == {
        "policy.max_total_sequence_length",
        "policy.megatron_cfg.bias_activation_fusion",
        "policy.megatron_cfg.optimizer.use_precision_aware_optimizer",
        "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective",
        "data.dataset_name",
        "data.prompt_file",
        "logger.monitor_gpus",
    }


def test_the_stock_recipe_runs_after_following_every_remedy():
    config = load_config(
        STOCK,
        [
            "+policy.model={num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 32}",
            "policy.model_name=null",
            "policy.tokenizer.name=char",
            "policy.max_total_sequence_length=1024",
            "policy.generation.max_new_tokens=4",
            "data.max_input_seq_length=null",
            "policy.generation.backend=embedded",
            "policy.megatron_cfg.bias_activation_fusion=false",
            "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",
            "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective=false",
            "data.dataset_name=copy",
            "data.prompt_file=null",
            "~data.train",
            "~data.default",
            "~env.math",
            "logger.monitor_gpus=false",
            "grpo.max_val_samples=64",
        ],
    )
    assert config.seed == 42
    assert config.policy.megatron_cfg.optimizer.lr == 5e-6
    assert config.policy.token_budgets.packed
    assert config.policy.token_budgets.train == 4096


def nested(path: str, value: object) -> dict[str, Any]:
    *parents, key = path.split(".")
    tree: dict[str, Any] = {key: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    return tree


@pytest.mark.parametrize("path", sorted(path for path, entry in UNSUPPORTED.items() if entry.remedy))
def test_any_other_value_is_refused_with_what_to_do(path):
    tree = nested(path, {"enabled": True, "size": 3})
    # Some keys are not read until the model has experts, or prediction layers.
    tree.setdefault("policy", {})["model"] = {"num_moe_experts": 4, "mtp_num_layers": 1}
    kept, problems = screen(tree)
    assert [problem.path for problem in problems] == [path]
    assert problems[0].remedy == UNSUPPORTED[path].remedy
    assert path not in leaves(kept)


@pytest.mark.parametrize(
    ("path", "value", "accepted"),
    [
        ("ppo.async_grpo", None, True),
        ("ppo.async_grpo", {}, True),
        ("ppo.async_grpo", {"enabled": False, "max_trajectory_age_steps": 3}, True),
        ("ppo.async_grpo", {"max_trajectory_age_steps": 3}, False),
        ("ppo.async_grpo", True, False),
        ("reward_penalties", {"penalize_empty_final_answer": False, "token_ids": None}, True),
        ("reward_penalties", {"penalize_empty_final_answer": True}, False),
        ("grpo.max_rollout_turns", 1, True),
        ("grpo.max_rollout_turns", True, False),
        ("loss_fn.positive_example_nll_weight", 0, True),
        ("loss_fn.positive_example_nll_weight", False, False),
        ("policy.generation.vllm_cfg.load_format", "anything", True),
        ("policy.generation.vllm_cfg.kv_cache_dtype", "fp8", False),
        ("policy.megatron_cfg.optimizer.fp16", True, False),
    ],
)
def test_neutral_values(path, value, accepted):
    kept, problems = screen(nested(path, value))
    assert (problems == []) == accepted
    assert path not in leaves(kept)


@pytest.mark.parametrize(("value", "accepted"), [(0.7, True), (1.0, False), (None, True)])
def test_validation_sampling_must_repeat_the_training_sampling(value, accepted):
    tree = {"policy": {"generation": {"temperature": 0.7, "val_temperature": value}}}
    kept, problems = screen(tree)
    assert (problems == []) == accepted
    assert kept == {"policy": {"generation": {"temperature": 0.7}}}


@pytest.mark.parametrize(
    ("model", "value", "accepted"),
    [
        (None, True, True),
        ({"num_moe_experts": None}, True, True),
        ({"num_moe_experts": 4}, True, False),
        ({"num_moe_experts": 4}, False, True),
    ],
)
def test_keys_of_experts_are_read_where_the_model_has_some(model, value, accepted):
    tree = {"policy": {"model": model, "megatron_cfg": {"freeze_moe_router": value}}}
    _, problems = screen(tree)
    assert (problems == []) == accepted


def test_everything_else_is_left_for_the_models(tree):
    kept, problems = screen(tree)
    assert kept == tree
    assert problems == []
    assert set(leaves(kept)) <= fields().keys()
