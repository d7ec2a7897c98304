import copy
import json
import math
import subprocess
import sys
import time
from random import Random

import pytest
import yaml
from refusals import brief, briefs, wrong_key

from nemo_rl_mcore.config import ConfigError, ModelConfig, PolicyConfig
from nemo_rl_mcore.data.hub import end_ids, is_hub_id, local_folder
from nemo_rl_mcore.models import FAMILIES, count_parameters, family_of
from nemo_rl_mcore.models.config_json import hf_config_of, model_config_from_hf
from nemo_rl_mcore.models.pretrained import explicit_fields, known_models, overridden
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.rules.policies import checked_policy
from nemo_rl_mcore.tools.check import preflight

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HYBRID = {"hybrid_layer_pattern": "M*", "mamba_num_heads": 8, "activation_func": "squared_relu"}
OF_EXPERTS = {
    "hybrid_layer_pattern": "ME",
    "num_moe_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
OF_GPT_OSS = {
    "num_moe_experts": 4,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 7.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config_of(model_type, **keys):
    no_window = {"sliding_window": None}
    extra = {
        **{"mistral": no_window, "mixtral": no_window, "qwen3_moe": EXPERTS},
        "nemotron_h": {"hybrid_override_pattern": "ME-*M", "num_hidden_layers": 5},
        # Keys and values have as many heads as queries, though transformers fills in 128.
        "deepseek_v3": {
            "first_k_dense_replace": 1,
            "num_key_value_heads": keys.get("num_attention_heads", 4),
        },
    }.get(model_type, {})
    return {"model_type": model_type, **SIZES, **extra, **keys}


def refused(config):
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(config)
    return caught.value.problems


def refusal_of(config):
    return briefs(refused(config))


def transformers_config(model_type, **keys):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **keys)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_are_left_out_have_transformers_values(model_type):
    """Its own config class, given the same few keys, says what it fills in."""
    given = config_of(model_type, hidden_size=256, num_attention_heads=32)
    whole = json.loads(transformers_config(**given).to_json_string(use_diff=False))
    assert explicit_fields(model_config_from_hf(given)) == explicit_fields(model_config_from_hf(whole))


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": STRETCHED},
        ),
        ("llama", {"rope_parameters": {"rope_theta": 7.0, **STRETCHED}, "rope_scaling": None}),
        ("llama", {"rope_parameters": STRETCHED, "rope_scaling": {"rope_theta": 7.0}, "rope_theta": 9.0}),
        ("llama", {"rope_parameters": {}, "rope_scaling": {}, "rope_theta": 7.0}),
        ("qwen2", {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}),
        ("llama", {"head_dim": None, "num_key_value_heads": None}),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 2}),
        ("qwen2", {"rope_scaling": YARN, "original_max_position_embeddings": 16}),
        ("llama", {"rope_parameters": STRETCHED, "original_max_position_embeddings": 16}),
        ("gpt_oss", {"original_max_position_embeddings": 16}),
        ("llama", {"rope_parameters": {"rope_theta": 7.0}, "original_max_position_embeddings": 16}),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 16}),
    ],
)
def test_a_key_that_has_two_spellings_is_read_as_transformers_reads_it(model_type, keys):
    """Its own config class, given both, says which one counts: it writes that one alone."""
    given = config_of(model_type, **{"num_key_value_heads": 4} | keys)
    config = transformers_config(**copy.deepcopy(given))
    config.standardize_rope_params()  # as its rotations do first
    theirs = json.loads(config.to_json_string(use_diff=False))
    theirs.pop("original_max_position_embeddings", None)  # the section has it now
    assert explicit_fields(model_config_from_hf(given)) == explicit_fields(model_config_from_hf(theirs))


def test_a_base_that_the_other_section_hides_is_refused():
    """transformers would fall back to 10000, though the file says 1e6: nobody means that."""
    config = config_of("llama", rope_parameters={"rope_theta": 1e6}, rope_scaling=STRETCHED)
    assert [problem.path for problem in refused(config)] == ["rope_scaling.rope_theta"]
    config["rope_scaling"] = {**STRETCHED, "rope_theta": 1e6}
    assert model_config_from_hf(config).rotary_base == 1e6


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_written_config_is_read_back_by_us_and_by_transformers(model_type):
    latent = "kv_lora_rank" in FAMILIES[model_type].sizes
    partial = "linear_attention_freq" in FAMILIES[model_type].sizes
    rope = {"rope_theta": 77.0, **({"rope_type": "default"} if latent or partial else STRETCHED)}
    rope |= {"partial_rotary_factor": 0.25} if partial else {}
    given = config_of(
        model_type,
        num_key_value_heads=4 if latent else 2,
        rms_norm_eps=3e-5,
        rope_parameters=rope,
        max_position_embeddings=99999,
    )
    model = model_config_from_hf(given)
    written = hf_config_of(model, dtype="bfloat16", origin=given)
    assert written["model_type"] == model_type
    assert explicit_fields(model_config_from_hf(written)) == explicit_fields(model)
    theirs = transformers_config(**written)
    assert theirs.model_type == model_type
    assert theirs.architectures == [FAMILIES[model_type].architecture]
    assert FAMILIES[model_type].hybrid or theirs.rope_parameters == rope
    saved = json.loads(theirs.to_json_string())
    assert explicit_fields(model_config_from_hf(saved)) == explicit_fields(model)


def test_rotary_keys_are_written_for_transformers_4_and_5():
    given = config_of("llama", rope_theta=500000.0, rope_scaling=STRETCHED)
    written = hf_config_of(model_config_from_hf(given))
    assert written["rope_theta"] == 500000.0
    assert written["rope_scaling"] == written["rope_parameters"]


def test_yarn_is_written_and_read_back():
    given = config_of(
        "qwen2", num_key_value_heads=4, rope_theta=77.0, rope_scaling={**YARN, "beta_fast": 32, "mscale": 1}
    )
    model = model_config_from_hf(given)
    assert model.shape.longest_sequence == 4 * 32768
    assert model.rope_scaling is not None
    assert model.rope_scaling.rope_type == "yarn"
    written = hf_config_of(model, origin=given)
    theirs = transformers_config(**written)
    whole = {"rope_theta": 77.0, **YARN, "beta_fast": 32.0, "beta_slow": 1.0}
    assert theirs.rope_parameters == whole
    assert explicit_fields(model_config_from_hf(written)) == explicit_fields(model)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6, **STRETCHED}},
        {"rope_theta": 1e6, "rope_scaling": STRETCHED},
        {"rope_theta": 1e6},
    ],
)
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": {"rope_theta": 2e6, **YARN}, "max_position_embeddings": 7},
        {"rope_scaling": YARN},
        {"rope_theta": 3e6},
        {"rope_scaling": None},
    ],
)
def test_overrides_take_the_place_of_keys_of_the_file(given, overrides):
    model = model_config_from_hf(overridden(config_of("llama", **given), overrides))
    scaling = model.rope_scaling.rope_type if model.rope_scaling else None
    stretched = "yarn" if overrides.get("rope_scaling") else "llama3" if "llama3" in str(given) else None
    assert scaling == (None if overrides == {"rope_scaling": None} else stretched)
    own = (overrides.get("rope_scaling") or {}).get("rope_theta") or overrides.get("rope_theta")
    assert model.rotary_base == (own or 1e6)
    assert model.max_position_embeddings == overrides.get("max_position_embeddings", 2048)


def test_an_overridden_stretch_has_its_own_original_context():
    """The key beside the section, which counts in a file, is of the section that it takes the place of."""
    given = config_of("llama", rope_scaling=STRETCHED, original_max_position_embeddings=16)
    for overrides, original in (({"rope_scaling": YARN}, 32768), ({"rope_theta": 2e6}, 16)):
        scaling = model_config_from_hf(overridden(given, overrides)).rope_scaling
        assert scaling is not None
        assert scaling.original_max_position_embeddings == original


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ({}, "llama"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"qk_layernorm": True, "num_moe_experts": 4}, "qwen3_moe"),
        ({"num_moe_experts": 4}, "mixtral"),
        (HYBRID, "nemotron_h"),
        (HYBRID | OF_EXPERTS, "nemotron_h"),
        (HYBRID | OF_EXPERTS | {"moe_latent_size": 32}, "nemotron_h"),
        (OF_GPT_OSS, "gpt_oss"),
        (OF_GPT_OSS | {"sliding_window": 8}, "gpt_oss"),
    ],
)
def test_the_family_follows_from_the_architecture(model, family):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    assert family_of(ModelConfig.model_validate(sizes | model)).model_type == family


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"qk_layernorm": True, "add_qkv_bias": True}, "add_qkv_bias: true with qk"),
        (OF_GPT_OSS | {"activation_func_clamp_value": None}, "activation_func: quick_gelu"),
        (HYBRID | {"activation_func": "silu"}, "hybrid_layer_pattern: M*"),
        ({"num_moe_experts": 4, "moe_router_pre_softmax": True}, "4 with moe_router_pre_softmax: true"),
        *(
            ({**experts, key: value}, f"{key}: {value}")
            for experts, key, value in (
                ({}, "mtp_num_layers", 1),
                ({"num_moe_experts": 4, "qk_layernorm": True}, "moe_shared_expert_intermediate_size", 8),
                ({"num_moe_experts": 4, "qk_layernorm": True}, "moe_router_score_function", "sigmoid"),
                ({}, "activation_func", "squared_relu"),
                ({}, "sliding_window", 8),
                ({}, "softmax_type", "learnable"),
            )
        ),
    ],
)
def test_what_no_family_has_is_named(model, reason):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    with pytest.raises(ValueError, match="no supported Hugging Face family has") as caught:
        hf_config_of(ModelConfig.model_validate(sizes | model))
    assert reason in str(caught.value)


# Families, values of keys, and what these are refused for; a string is the code, of each of the keys.
REFUSED = yaml.safe_load("""
yarn: &yarn {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}
stretched: &stretched {rope_type: llama3, factor: 8.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192}
rows:
- [gemma2, {}, [model_type, not-supported]]
- [llama, {hidden_act: gelu, attention_bias: true, mlp_bias: true, per_layer_config: {'1': {}}}, not-supported]
- [llama, {attention_dropout: 0.1, quantization_config: {bits: 4}, partial_rotary_factor: 0.5}, not-supported]
- [llama, {rope_parameters: {partial_rotary_factor: 0.5}}, [partial_rotary_factor, not-supported]]
- [llama, {rope_scaling: {type: linear, factor: 2.0}}, [rope_type, not-supported]]
- [llama, {rope_scaling: {<<: *stretched, low_freq_factor: 2.0}}, [rope_scaling.low_freq_factor, not-supported]]
- [llama, {rope_scaling: {rope_type: llama3, factor: 8.0}}, [rope_scaling.low_freq_factor, missing]]
- [llama, {hidden_size: '64', vocab_size: 2147483648}, not-allowed]
- [llama, {hidden_size: 66}, [not-divisible]]
- [mistral, {sliding_window: 4096}, not-supported]
- [mixtral, {num_local_experts: 1000000000}, not-allowed]
- [qwen2, {use_sliding_window: true}, not-supported]
- [qwen2, {rope_scaling: {<<: *yarn, beta_fast: 2}}, [rope_scaling.beta_fast, not-supported]]
- [qwen2, {rope_scaling: {<<: *yarn, mscale: 0.7}}, [rope_scaling.mscale, not-supported]]
- [qwen2, {rope_scaling: {rope_type: yarn, factor: 4.0}}, [rope_scaling.original_max_position_embeddings, missing]]
- [qwen2, {rope_scaling: {<<: *yarn, attention_factor: 1.2}}, [rope_parameters, not-supported]]
- [qwen2, {rope_scaling: {mrope_section: [1, 2]}}, [rope_parameters, not-supported]]
- [qwen3, {layer_types: [full_attention, sliding_attention]}, not-supported]
# A stretch that model cards say to add, beside the section that transformers 5 wrote.
- [qwen3, {rope_parameters: &plain {rope_type: default, rope_theta: 1.0e+4}, num_key_value_heads: 4,
    rope_scaling: {<<: *yarn, rope_type: dynamic}}, [rope_type, not-supported]]
- [qwen3, {rope_parameters: *plain, rope_scaling: {<<: *yarn, rope_type: linear}}, [rope_type, not-supported]]
- [qwen3_moe, {decoder_sparse_step: 2, mlp_only_layers: [0]}, not-supported]
- [qwen3_moe, {num_experts: null}, missing]
- [qwen3_moe, {num_experts_per_tok: 1, norm_topk_prob: true}, [num_experts_per_tok, no-signal]]
- [qwen3_moe, {norm_topk_prob: 'no'}, not-allowed]
- [gpt_oss, {attention_bias: false, swiglu_alpha: 1.0, hidden_act: gelu, attention_dropout: 0.1}, not-supported]
- [gpt_oss, {quantization_config: {quant_method: fp8}}, not-supported]
- [gpt_oss, {layer_types: [sliding_attention, chunked_attention]}, not-supported]
- [gpt_oss, {layer_types: [full_attention]}, ['layer_types: contradicts (num_hidden_layers)']]
- [gpt_oss, {layer_types: [full_attention, sliding_attention], sliding_window: 8}, [layer_types, not-supported]]
- [gpt_oss, {layer_types: [sliding_attention, sliding_attention], sliding_window: 8}, [layer_types, not-supported]]
- [gpt_oss, {sliding_window: null, swiglu_limit: null}, missing]
- [gpt_oss, {num_experts_per_tok: 1}, no-signal]
- [gpt_oss, {swiglu_limit: 0.0, layer_types: 3}, not-allowed]
- [deepseek_v3, {rope_scaling: {<<: *yarn, truncate: false}}, [rope_scaling.truncate, not-supported]]
- [deepseek_v3, {rope_scaling: {<<: *yarn, mscale: null, mscale_all_dim: 0.7}}, [rope_scaling.mscale, missing]]
- [deepseek_v3, {n_group: true}, not-allowed]
- [nemotron_h, {attention_bias: true, mlp_bias: true, use_bias: true, mamba_proj_bias: true}, not-supported]
- [nemotron_h, {use_conv_bias: false, conv_kernel: 3, mlp_hidden_act: silu, mamba_hidden_act: relu}, not-supported]
- [nemotron_h, {layer_norm_epsilon: 1.0e-6, residual_in_fp32: true, hidden_dropout: 0.1}, not-supported]
- [nemotron_h, {sliding_window: 8, tie_word_embeddings: true, n_group: 2, topk_group: 2}, not-supported]
- [nemotron_h, {n_shared_experts: 2, norm_topk_prob: false}, not-supported]
- [nemotron_h, {layers_block_type: [linear_attention, linear]}, not-supported]
- [nemotron_h, {num_experts_per_tok: 1}, [norm_topk_prob, not-supported]]
- [nemotron_h, {n_routed_experts: null, hybrid_override_pattern: null}, missing]
- [nemotron_h, {hybrid_override_pattern: MG}, [not-supported]]
- [nemotron_h, {layers_block_type: true}, not-allowed]
- [nemotron_h, {layers_block_type: 7}, not-allowed]
""")["rows"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        *(
            (config_of(family, **keys), ": ".join(told))
            for family, keys, told in REFUSED
            if not isinstance(told, str)
        ),
        *(
            (config_of(family, **{key: value}), f"{key}: {code}")
            for family, keys, code in REFUSED
            if isinstance(code, str)
            for key, value in keys.items()
        ),
        ({}, "model_type: not-supported"),
        ({"model_type": "mistral", **SIZES}, "sliding_window: not-supported"),
        ({"model_type": "llama"}, "hidden_size: missing"),
        *(
            (config_of(family, num_hidden_layers=10**12), "num_hidden_layers: not-allowed")
            for family in FAMILIES
            if family != "nemotron_h"  # its pattern says how many
        ),
        (config_of("nemotron_h", hybrid_override_pattern="M" * 10**6), "num_hidden_layers: not-allowed"),
    ],
)
def test_unknown_families_and_unsupported_features_are_refused_by_name(config, told):
    assert told in refusal_of(config)


LONG = "x" * 10**6
ODD = (
    *(True, False, 0, 1, -1, 3, 10**12, 2**63, 0.5, -2.5, 1e300, math.inf, math.nan),
    *("", "64", LONG, [], [1, None], ["x"] * 3, [LONG], [3] * 10**5, {}, {"x": LONG}, {LONG: 1}, [[[]]]),
)
SECTIONS = ("rope_scaling", "rope_parameters", "quantization_config", "per_layer_config")


def odd_configs(model_type):
    """Yield a config.json of the family with an odd value of each key, and with two of them."""
    random = Random(model_type)
    plain = json.loads(transformers_config(**config_of(model_type)).to_json_string(use_diff=False))
    plain |= {"num_key_value_heads": 4, **config_of(model_type)}
    family = FAMILIES[model_type]
    read = {refusal.key for refusal in family.refusals} | {*family.aliases, *family.defaults, *SECTIONS}
    keys = sorted(
        {*plain, *read, "layer_types", "rope_theta", "original_max_position_embeddings"} - {"model_type"}
    )
    for key in keys:
        yield from ({**plain, key: value} for value in ODD)
        for _ in range(10):
            yield {**plain, key: random.choice(ODD), random.choice(keys): random.choice(ODD)}
    for section in ("rope_scaling", "rope_parameters"):
        for stretch in (YARN, STRETCHED):
            for key in (*stretch, "type", "rope_theta", "mscale", "mscale_all_dim", "truncate", "beta_fast"):
                yield from ({**plain, section: {**stretch, key: value}} for value in ODD)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", FAMILIES)
def test_odd_values_are_read_or_refused_in_short(model_type):
    """Nothing else is raised, nothing is counted without end, and nothing long is quoted."""
    accepted = 0
    for config in odd_configs(model_type):
        begin = time.process_time()
        said, model = "", None
        try:
            model = model_config_from_hf(config)
        except ConfigError as error:
            said = str(error)
        assert len(said) < 3_000, said[:3_000]
        if model is not None:
            accepted += 1
            assert min(count_parameters(model), model.shape.longest_sequence) > 0
            written = hf_config_of(model, origin=config)
            assert explicit_fields(model_config_from_hf(written)) == explicit_fields(model)
        assert time.process_time() - begin < 1
    assert accepted > 100


def test_what_a_file_says_is_quoted_in_short():
    for key in ("model_type", "hidden_act", "hidden_size", "rope_scaling"):
        (problem,) = refused(config_of("llama") | {key: LONG})
        assert len(problem.what) < 300
    (problem,) = refused(config_of("llama", rope_scaling={"rope_type": LONG}))
    assert len(problem.what) < 300


def test_every_problem_is_given_at_once():
    config = config_of("llama", mlp_bias=True, hidden_act="gelu", rope_scaling={"rope_type": "linear"})
    assert len(refusal_of(config)) == 3


@pytest.mark.parametrize(
    ("kinds", "window"),
    [(["sliding_attention", "full_attention"], 8), (["full_attention"] * 2, None), (None, 8)],
)
def test_kinds_of_layers_say_which_have_the_window(kinds, window):
    given = config_of("gpt_oss", sliding_window=8, layer_types=kinds, num_key_value_heads=2)
    model = model_config_from_hf(given)
    assert model.sliding_window == window
    written = hf_config_of(model, origin=given)
    assert written["sliding_window"] == 8
    assert written["layer_types"] == (kinds or ["sliding_attention", "full_attention"])
    assert explicit_fields(model_config_from_hf(written)) == explicit_fields(model)


def test_layers_in_words_are_those_in_characters():
    words = ["mamba", "moe", "mlp", "attention", "linear_attention"]
    plain = config_of("nemotron_h", num_key_value_heads=2)
    spelled = plain | {"hybrid_override_pattern": "**", "layers_block_type": words}
    assert model_config_from_hf(spelled) == model_config_from_hf(plain)


@pytest.mark.parametrize(
    ("keys", "pre_softmax"),
    [
        ({"norm_topk_prob": True}, False),
        ({"norm_topk_prob": False}, True),
        ({}, True),
        ({"num_experts_per_tok": 1, "norm_topk_prob": False}, True),
    ],
)
def test_normalised_shares_are_a_softmax_after_the_selection(keys, pre_softmax):
    model = model_config_from_hf(config_of("qwen3_moe", **keys))
    assert model.moe_router_topk == keys.get("num_experts_per_tok", 2)
    assert model.moe_router_pre_softmax is pre_softmax


def test_settings_of_training_are_those_of_the_origin():
    """A config.json holds settings of training, of which the architecture says nothing."""
    given = config_of("qwen3_moe", router_aux_loss_coef=0.003, initializer_range=0.05)
    model = model_config_from_hf(given)
    written = hf_config_of(model, origin=given)
    assert (written["router_aux_loss_coef"], written["initializer_range"]) == (0.003, 0.05)
    trained = model.model_copy(update={"moe_aux_loss_coeff": 0.01, "init_method_std": 0.1})
    written = hf_config_of(trained, origin=given)
    assert (written["router_aux_loss_coef"], written["initializer_range"]) == (0.003, 0.05)
    for origin in (None, config_of("qwen3_moe")):
        written = hf_config_of(trained, origin=origin)
        assert (written["router_aux_loss_coef"], written["initializer_range"]) == (0.01, 0.1)


PARAMETERS = {
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    **dict.fromkeys(["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507"], 30_532_122_624),
    **{f"Qwen/Qwen2.5-{name}": 1_543_714_304 for name in ("1.5B", "1.5B-Instruct", "Math-1.5B")},
    **{f"Qwen/Qwen2.5-{name}": 7_615_616_512 for name in ("7B", "7B-Instruct", "Math-7B")},
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    **dict.fromkeys(["Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Base"], 4_022_468_096),
    "Qwen/Qwen3-8B": 8_190_735_360,
    # Without the vision model and prediction layers, as transformers' Qwen3_5ForCausalLM counts them.
    **dict.fromkeys(("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base"), 8_953_803_264),
    **dict.fromkeys(("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B-Base"), 34_660_610_688),
    "Qwen/Qwen3.5-397B-A17B": 396_346_350_336,
    **dict.fromkeys(["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"], 8_030_261_248),
    **dict.fromkeys(["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"], 1_235_814_400),
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    # Of the numbers, not of the bytes that four bits a number are packed in.
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
    # Those of transformers, and the biases of 26 layers of experts.
    **{f"moonshotai/Moonlight-16B-A3B{of}": 15_960_108_544 + 26 * 64 for of in ("", "-Instruct")},
    **{f"nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B{of}": 31_577_940_288 for of in ("-BF16", "-Base-BF16")},
    # Without the prediction layers, which are left out; as transformers' model counts.
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120_668_707_840,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    **{f"nvidia/NVIDIA-Nemotron-Nano-12B-v2{of}": 12_310_001_152 for of in ("", "-Base")},
}
"""As the model cards' safetensors count them."""


@pytest.mark.parametrize("name", known_models())
def test_known_models_have_the_published_number_of_parameters(name):
    assert count_parameters(model_config_from_hf(known_models()[name])) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "is_id"),
    [("Qwen/Qwen3-8B", True), ("/models/x", False), ("./x/y", False), ("x", False), ("a/b/c", False)],
)
def test_hub_ids_have_two_parts(name, is_id):
    assert is_hub_id(name) == is_id


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home/hub"


def cached_model(cache, name, config):
    model = cache / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def test_the_newest_cached_snapshot_is_found(cache, monkeypatch, tmp_path):
    assert local_folder("me/model") is None
    snapshot = cached_model(cache, "me/model", {})
    assert local_folder("me/model") == snapshot
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert local_folder("me/model") is None
    assert local_folder(str(tmp_path)) == tmp_path


@pytest.fixture
def recipe(tree, tmp_path, cache):
    """`recipe(model_name, ...)`: the exemplar with a model name instead of its architecture, as a file."""

    def write(name, model=None, **policy):
        section = {**tree["policy"], "model_name": str(name), "max_total_sequence_length": 8, **policy}
        del section["model"]
        if model is not None:
            section["model"] = model
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**tree, "policy": section}))
        return path

    return write


def saved_model(folder, config):
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_overrides_are_those_of_the_recipe(recipe, tmp_path):
    folder = saved_model(
        tmp_path / "model", config_of("qwen2", num_key_value_heads=4, max_position_embeddings=16)
    )
    long = {"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}
    policy = load_config(recipe(folder, hf_config_overrides=long, max_total_sequence_length=64)).policy
    assert policy.model.rope_scaling.rope_type == "yarn"
    with wrong_key("policy.max_total_sequence_length: too-large (max_position_embeddings)"):
        load_config(recipe(folder, hf_config_overrides=long, max_total_sequence_length=65))
    long = {"max_position_embeddings": 65}
    policy = load_config(recipe(folder, hf_config_overrides=long, max_total_sequence_length=65)).policy
    assert policy.model.max_position_embeddings == 65


QWEN2 = config_of("qwen2", num_key_value_heads=4)
OVERRIDES = "policy.hf_config_overrides"


@pytest.mark.parametrize(
    ("config", "given", "told"),
    [
        (QWEN2, {"hf_config_overrides": {"hidden_size": 32}}, [f"{OVERRIDES}.hidden_size: not-supported"]),
        (
            QWEN2,
            {"hf_config_overrides": {"rope_scaling": "yarn"}},
            [f"{OVERRIDES}.rope_scaling: not-allowed"],
        ),
        (
            QWEN2,
            {"hf_config_overrides": {"rope_scaling": {"rope_type": "linear"}}},
            [f"{OVERRIDES}.rope_type: not-supported"],
        ),
        (
            QWEN2,
            {"hf_config_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}},
            [f"{OVERRIDES}.rope_scaling.original_max_position_embeddings: missing"],
        ),
        (
            QWEN2,
            {"hf_config_overrides": {"max_position_embeddings": 0}},
            [f"{OVERRIDES}.max_position_embeddings: not-allowed"],
        ),
        (
            config_of("llama"),
            {"model": {"num_layers": 3, "hidden_size": 64, "num_query_groups": 1}},
            [f"policy.model.{key}: contradicts (model_name)" for key in ("num_layers", "num_query_groups")],
        ),
        # Without keys that contradict the weights.
        (
            config_of("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True),
            {},
            ["policy.model_name: no-signal"],
        ),
        (config_of("llama", mlp_bias=True), {}, ["policy.model_name: not-supported"]),
        *((text, {}, ["policy.model_name: not-readable"]) for text in (None, "{", "[]")),
    ],
)
def test_folders_and_keys_beside_them_that_do_not_serve_are_named(recipe, tmp_path, config, given, told):
    folder = saved_model(tmp_path / "model", config)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(folder, **given))
    assert briefs(caught.value.problems) == told
    assert "model" not in given or "recipe.yaml:" in caught.value.problems[0].where


def test_settings_of_training_stand_beside_the_weights(recipe, tmp_path):
    folder = saved_model(tmp_path / "model", config_of("qwen3_moe"))
    policy = load_config(recipe(folder, {"moe_aux_loss_coeff": 0.01})).policy
    assert (policy.model.moe_aux_loss_coeff, policy.model.hidden_size) == (0.01, 64)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("tensor_model_parallel_size", "not-divisible (model_name)"),
        ("pipeline_model_parallel_size", "not-divisible (virtual_pipeline_model_parallel_size)"),
        ("expert_model_parallel_size", "not-divisible (model_name)"),
    ],
)
def test_a_layout_that_the_weights_do_not_allow_is_what_must_change(recipe, tree, tmp_path, key, told):
    folder = saved_model(tmp_path / "model", config_of("qwen3_moe", num_key_value_heads=2))
    split = {"sequence_parallel": True} if key.startswith("tensor") else {}
    megatron = {**tree["policy"]["megatron_cfg"], key: 3, **split}
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(folder, megatron_cfg=megatron))
    (problem,) = [one for one in caught.value.problems if brief(one) == f"policy.megatron_cfg.{key}: {told}"]
    assert "recipe.yaml:" in problem.where
    assert "policy.model." not in str(caught.value)


def test_sizes_that_are_implied_agree_with_written_ones(recipe, tmp_path):
    folder = saved_model(tmp_path / "model", config_of("llama", head_dim=None))
    given = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "kv_channels": 16,
        "vocab_size": 40,
    }
    assert load_config(recipe(folder, given)).policy.model.shape.head_dim == 16


def test_hub_ids_come_from_the_cache_then_from_the_table(recipe, cache):
    assert load_config(recipe("Qwen/Qwen3-0.6B")).policy.model.hidden_size == 1024
    cached_model(cache, "Qwen/Qwen3-0.6B", config_of("llama"))
    assert load_config(recipe("Qwen/Qwen3-0.6B")).policy.model.hidden_size == 64
    with wrong_key("policy.model_name: not-found") as caught:
        load_config(recipe("me/unknown"))
    assert len(caught.value.problems) == 1
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 40}
    assert load_config(recipe("me/unknown", model)).policy.model.hidden_size == 64
    with wrong_key("policy.model_name: not-supported (model)"):
        load_config(recipe("me/unknown", {**model, "mtp_num_layers": 1}))
    with wrong_key("policy.model_name: not-found"):
        load_config(recipe("/not/here"))


def test_the_tokenizer_is_the_models_where_none_is_named(recipe, tmp_path, tree):
    folder = saved_model(tmp_path / "model", config_of("llama"))
    del tree["policy"]["tokenizer"]
    config = load_config(recipe(folder))
    assert config.policy.tokenizer.name == str(folder)
    with wrong_key("policy.tokenizer.name: not-found"):
        preflight(config)
    assert preflight(load_config(recipe("Qwen/Qwen3-0.6B")))  # fetched with the weights


def test_a_policy_is_complete_without_a_recipe(tree, tmp_path):
    folder = saved_model(tmp_path / "model", config_of("qwen2", num_key_value_heads=2))
    section = {key: value for key, value in tree["policy"].items() if key not in ("model", "tokenizer")}
    policy = checked_policy({**section, "model_name": str(folder)})
    assert (policy.model.add_qkv_bias, policy.tokenizer.name) == (True, str(folder))
    assert PolicyConfig.model_validate(policy.model_dump()) == policy


def header_of(length=None, **tensors):
    """Return the beginning of a safetensors file; length: what it says of its own."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WHOLE = header_of(a=TENSOR) + b"\0" * 8


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pytorch_model.bin": WHOLE},
        {"model.safetensors": b""},
        {"model.safetensors": WHOLE[:-1]},
        {"model.safetensors": WHOLE + b"\0"},
        {"model.safetensors": WHOLE[:20]},
        {"model.safetensors": header_of(2**63, a=TENSOR)},
        {"model.safetensors": b"\x09" + b"\0" * 7 + b"not JSON."},
        {"model.safetensors": b"\x02" + b"\0" * 7 + b"[]"},
        {"model.safetensors": header_of(a=5)},
        {"model.safetensors": header_of(a={"data_offsets": [0, 8, 8]}) + b"\0" * 8},
        {"model.safetensors": header_of(a={"data_offsets": [8, "0"]}) + b"\0" * 8},
        {"model.safetensors": header_of(a={"data_offsets": [True, -8]}) + b"\0" * 8},
        {"model.safetensors.index.json": b"{"},
        {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
        {"model.safetensors.index.json": b'{"weight_map": {"b": "1.safetensors"}}', "1.safetensors": WHOLE},
        {
            "model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors"}}',
            "1.safetensors": WHOLE[:-1],
        },
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../1.safetensors"}}'},
    ],
)
def test_weights_that_cannot_be_read_are_known_before_a_run(recipe, tmp_path, files):
    folder = saved_model(tmp_path / "model", config_of("llama"))
    config = load_config(recipe(folder))
    (folder / "model.safetensors").write_bytes(WHOLE)
    assert preflight(config)
    (folder / "model.safetensors").unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with wrong_key("policy.model_name: not-readable", folder):
        preflight(config)


@pytest.mark.stage("processes")
def test_check_of_weights_imports_no_framework(recipe, tmp_path):
    path = recipe(saved_model(tmp_path / "model", config_of("llama")))
    code = (
        "import sys\n"
        "from nemo_rl_mcore import cli\n"
        f"assert cli.main(['check', '--config', {str(path)!r}]) == 2\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, {}, ()),
        (None, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [1, 3]}, {"eos_token_id": 5}, (1, 3, 5)),
        ({"eos_token_id": 1}, {"eos_token_id": [5, 1]}, (1, 5)),
        ({"eos_token_id": None, "temperature": 0.6}, {"eos_token_id": None}, ()),
    ],
)
def test_every_end_that_a_models_files_name_is_one(tmp_path, generation, config, ends):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_ids(str(tmp_path), "char") == end_ids(None, str(tmp_path)) == ends
    assert end_ids("no/folder", "char") == ()


@pytest.mark.parametrize("content", [[], *({"eos_token_id": end} for end in ("2", [-1], [True], {}))])
def test_ends_that_are_no_ids_are_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with wrong_key("policy.model_name: not-readable", tmp_path):
        end_ids(str(tmp_path), "char")
