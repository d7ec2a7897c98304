"""Keys that nothing reads are warnings, by one rule; the recipe loads."""

import pytest
from refusals import briefs, wrong_key

from nemo_rl_mcore.config import ModelConfig
from nemo_rl_mcore.config.base import collect_problems
from nemo_rl_mcore.recipe.load import load_config, load_with_warnings

MEGATRON = "policy.megatron_cfg"
UNFUSED = f"{MEGATRON}.use_fused_linear_logprobs=false"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"+{MEGATRON}.recompute_granularity=selective"],
            f"{MEGATRON}.recompute_granularity: has-no-effect (activation_checkpointing)",
        ),
        (
            [f"+{MEGATRON}.activation_checkpointing=true", f"+{MEGATRON}.recompute_modules=[mlp]"],
            f"{MEGATRON}.recompute_modules: has-no-effect (recompute_granularity)",
        ),
        (
            [
                f"+{MEGATRON}.activation_checkpointing=true",
                f"+{MEGATRON}.recompute_granularity=selective",
                f"+{MEGATRON}.recompute_modules=[moe]",
            ],
            f"{MEGATRON}.recompute_modules: has-no-effect (num_moe_experts)",
        ),
        (["grpo.batch_multiplier=1.5"], "grpo.batch_multiplier: has-no-effect (use_dynamic_sampling)"),
        (
            [
                *(
                    "grpo.use_dynamic_sampling=true",
                    "grpo.batch_multiplier=2",
                    "grpo.async_grpo.enabled=true",
                ),
                "policy.generation.colocated.enabled=false",
                "loss_fn.use_importance_sampling_correction=false",
            ],
            "grpo.batch_multiplier: has-no-effect (enabled)",
        ),
        (["+data.add_eos=true"], "data.add_eos: has-no-effect (apply_chat_template)"),
        (["grpo.max_rollout_turns=2"], "grpo.max_rollout_turns: has-no-effect (arithmetic)"),
        (["+env.pool.max_drop_rate=0.1"], "env.pool.max_drop_rate: has-no-effect (size)"),
        (["+loss_fn.args={scale: 1}"], "loss_fn.args: has-no-effect (type)"),
        (
            ["+policy.model.moe_router_topk=4"],
            "policy.model.moe_router_topk: has-no-effect (num_moe_experts)",
        ),
        (
            ["+policy.model.num_moe_experts=4", "+policy.model.moe_router_bias_update_rate=0.1"],
            "policy.model.moe_router_bias_update_rate: has-no-effect (moe_router_enable_expert_bias)",
        ),
        (
            ["+policy.model.mtp_loss_scaling_factor=0.3"],
            "policy.model.mtp_loss_scaling_factor: has-no-effect (mtp_num_layers)",
        ),
        (
            [UNFUSED, f"{MEGATRON}.fused_linear_logprobs_cache_bytes=8"],
            f"{MEGATRON}.fused_linear_logprobs_cache_bytes: has-no-effect (use_fused_linear_logprobs)",
        ),
        (
            [f"+{MEGATRON}.fused_linear_logprobs_packed=true"],
            f"{MEGATRON}.fused_linear_logprobs_packed: has-no-effect (enabled)",
        ),
        (
            [
                UNFUSED,
                f"+{MEGATRON}.fused_linear_logprobs_packed=true",
                "+policy.sequence_packing.enabled=true",
            ],
            f"{MEGATRON}.fused_linear_logprobs_packed: has-no-effect (use_fused_linear_logprobs)",
        ),
    ],
)
def test_what_nothing_reads_is_a_warning(warnings, overrides, expected):
    added = [f"++{override.removeprefix('+')}" for override in overrides]
    assert warnings(*added) == [expected]


@pytest.mark.parametrize(
    ("recipe", "override", "expected"),
    [
        ("dpo", "dpo.sft_average_log_probs=true", "sft_average_log_probs: has-no-effect (sft_loss_weight)"),
        ("dpo", "dpo.online=false", "num_generations_per_prompt: has-no-effect (online)"),
        ("distillation", "loss_fn.rl.entropy_coef=0.1", "rl: has-no-effect (rl_weight)"),
    ],
)
def test_other_algorithms(warnings, recipe, override, expected):
    (found,) = warnings(f"++{override}", recipe=f"{recipe}_cpu.yaml")
    assert found.partition(".")[2] == expected


def test_what_has_no_effect_changes_no_size(exemplar):
    config = load_config(exemplar, ["++grpo.batch_multiplier=1.3", "++grpo.max_rollout_turns=9"])
    assert config.prompts_per_step == config.grpo.num_prompts_per_step
    assert config.max_rollout_turns == 1


@pytest.mark.parametrize(("algorithm", "idle"), [("grpo", True), ("sft", False)])
def test_where_no_answers_are_given_nothing_says_how_they_are_trained_on(warnings, algorithm, idle):
    data = "++data={dataset_name: files, train: {data_path: a}, apply_chat_template: true, imitated: turn}"
    found = warnings(
        data, "++policy.tokenizer.name=a", recipe=f"{algorithm}_copy_cpu.yaml" if idle else "sft_cpu.yaml"
    )
    assert ("data.imitated: has-no-effect" in found) == idle


def test_a_stream_has_no_passes(warnings):
    stream = (
        "++data={dataset_name: files, train: {data_path: a, streaming: true}, validation: {data_path: b}}"
    )
    assert warnings(stream, "++grpo.max_num_epochs=2") == ["grpo.max_num_epochs: has-no-effect (streaming)"]


def test_weights_of_one_source_and_of_a_validation_have_no_effect(warnings):
    sources = "train: {data_path: a, weight: 3}, validation: [{data_path: b, weight: 2}]"
    assert warnings(f"++data={{dataset_name: files, {sources}}}") == [
        "data.train.weight: has-no-effect",
        "data.validation.0.weight: has-no-effect",
    ]


def test_a_warning_says_where_its_key_is_set_and_hides_no_error(exemplar, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {exemplar}\ngrpo: {{batch_multiplier: 1.5}}\n")
    (warning,) = load_with_warnings(recipe)[1]
    assert warning.where.endswith("recipe.yaml:2")
    with wrong_key("seed: not-allowed"):
        load_config(recipe, ["seed=-1"])


def test_all_keys_of_experts_have_no_effect_in_a_dense_model():
    of_experts = {name for name in ModelConfig.model_fields if name.startswith("moe_")}
    assert {key for key, switch, _ in ModelConfig.read_unless if switch == "num_moe_experts"} == of_experts
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    dense = ModelConfig(**sizes, moe_router_bias_update_rate=0.1)
    assert briefs(collect_problems(dense)) == ["moe_router_bias_update_rate: has-no-effect (num_moe_experts)"]


@pytest.mark.parametrize("applied", [True, False])
def test_without_a_chat_template_nothing_reads_its_variables(warnings, applied):
    data = f"++data={{dataset_name: files, train: {{data_path: a}}, apply_chat_template: {str(applied).lower()}}}"
    template = (
        "++policy.tokenizer.chat_template=x",
        "++policy.tokenizer.chat_template_kwargs={enable_thinking: false}",
    )
    found = [
        f"policy.tokenizer.{key}: has-no-effect (apply_chat_template)"
        for key in ("chat_template", "chat_template_kwargs")
    ]
    assert warnings(data, "++policy.tokenizer.name=a", *template) == ([] if applied else found)
