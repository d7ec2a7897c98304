import copy
from typing import Any

import pytest
from refusals import assert_holds

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.of_nemo_rl import leaf_paths
from nemo_rl_mcore.recipe.schema import fields
from nemo_rl_mcore.tools.migrate.draft import Draft, Kind, Note
from nemo_rl_mcore.tools.migrate.judgements import JUDGEMENTS, screen


def test_the_remedy_for_lengths_computed_of_one_another_ends(exemplar, tmp_path):
    """NeMo RL computes prompt and response of the sequence, so that a longer sequence never has room for both."""
    whole = "${policy.max_total_sequence_length}"
    base = f"defaults: {exemplar}\ndata: {{max_input_seq_length: '{whole}'}}\n"
    for longest in (8, 16):
        policy = f"{{max_total_sequence_length: {longest}, generation: {{max_new_tokens: '{whole}'}}}}"
        (tmp_path / "ours.yaml").write_text(f"{base}policy: {policy}")
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "ours.yaml")
        (problem,) = caught.value.problems
        assert_holds(problem.remedy, longest)
    load_config(tmp_path / "ours.yaml", ["policy.generation.max_new_tokens=8", "data.max_input_seq_length=8"])


def screened(tree: dict[str, Any]) -> Draft:
    draft = Draft("grpo", copy.deepcopy(tree))
    screen(draft, tree)
    return draft


def warned(draft: Draft) -> list[Note]:
    return [note for note in draft.notes if note.kind is Kind.WARNED]


def nested(path: str, value: object) -> dict[str, Any]:
    *parents, key = path.split(".")
    tree: dict[str, Any] = {key: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    return tree


@pytest.mark.parametrize(
    "path", sorted(path for path, row in JUDGEMENTS.items() if not row.unread and "dtensor_cfg." not in path)
)
def test_any_other_value_is_refused_or_told_with_what_to_do(path):
    tree = nested(path, {"enabled": True, "size": 3, "low_weight": 1})
    # Some keys are not read until the model has experts, or prediction layers.
    policy = tree.setdefault("policy", {})
    policy["model"] = {"num_moe_experts": 4, "mtp_num_layers": 1}
    # Others are read with a switch beside them only.
    if path in ("policy.optimizer", "policy.scheduler"):
        policy["dtensor_cfg"] = {"enabled": True}
    if path.endswith("offload_modules"):
        policy["megatron_cfg"]["fine_grained_activation_offloading"] = True
    if ".fp8_cfg." in path:
        policy["megatron_cfg"]["fp8_cfg"]["enabled"] = True
    if ".peft." in path:
        policy["megatron_cfg"]["peft"]["enabled"] = True
    if path == "logger.mlflow.tracking_uri":
        tree["logger"]["mlflow_enabled"] = True
    if path == "policy.sequence_packing.algorithm":
        policy["sequence_packing"]["enabled"] = True
    tree.setdefault("loss_fn", {})["reference_policy_kl_penalty"] = 0.01
    tree.setdefault("data", {})["use_multiple_dataloader"] = True
    result, row = screened(tree), JUDGEMENTS[path]
    refused = [one.remedy for one in result.problems if one.path == path]
    told = [one.what.rpartition("has no effect here; ")[2] for one in warned(result) if one.path == path]
    assert (refused, told) == ([row.refused] * bool(row.refused), [row.told] * bool(row.told))
    assert path not in leaf_paths(result.tree)


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
        ("distillation.max_rollout_turns", 1, True),
        ("distillation.max_rollout_turns", True, False),
        ("loss_fn.positive_example_nll_weight", 0, True),
        ("loss_fn.positive_example_nll_weight", False, False),
        ("policy.generation.vllm_cfg.load_format", "anything", True),
        ("policy.generation.vllm_cfg.logprobs_mode", "raw_logits", False),
        ("policy.megatron_cfg.optimizer.fp16", True, False),
    ],
)
def test_neutral_values(path, value, accepted):
    result = screened(nested(path, value))
    assert (not result.problems) == accepted
    assert path not in leaf_paths(result.tree)


@pytest.mark.parametrize(("value", "accepted"), [(0.7, True), (1.0, False), (None, True)])
def test_validation_sampling_must_repeat_the_training_sampling(value, accepted):
    tree = {"policy": {"generation": {"temperature": 0.7, "val_temperature": value}}}
    result = screened(tree)
    assert (not result.problems) == accepted
    assert result.tree == {"policy": {"generation": {"temperature": 0.7}}}


@pytest.mark.parametrize(
    ("model", "value", "accepted"),
    [
        (None, True, False),  # it is not known, and may have experts
        (None, False, True),
        ({"num_layers": 2, "num_moe_experts": None}, True, True),
        ({"num_layers": 2, "num_moe_experts": 4}, True, False),
        ({"num_layers": 2, "num_moe_experts": 4}, False, True),
    ],
)
def test_keys_of_experts_are_read_where_the_model_has_some(model, value, accepted):
    tree = {"policy": {"model": model, "megatron_cfg": {"moe_shared_expert_overlap": value}}}
    assert (not warned(screened(tree))) == accepted


def test_everything_else_is_left_for_the_models(tree):
    result = screened(tree)
    assert result.tree == tree
    assert [*result.problems, *result.notes, *result.dropped] == []
    assert {*leaf_paths(result.tree)} <= fields().keys()
