"""Families of models are transformers' in float64 on every layout: passes, gradients, steps; they decode and resume."""

import family_cases as cases
import hf_weight_cases
import pytest
import test_frozen_weights
import test_generation
import test_hybrid
import tiny
import tiny_gpt_oss
import tiny_hybrid
from family_cases import CP2, EP2, PP2, SP, TP2
from tolerances import GRADIENTS, LOGPROBS, METRICS

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element")  # as no shared experts are

VPP2, TP4 = PP2 | {"virtual_pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
ENDS = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
FUSED = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 5}
FUSED_SHARED = {"fused_linear_logprobs_context_parallel": True, "fused_linear_logprobs_packed": True}
# Ranks that share sequences, or a query group, and stages that hold parts of a layer.
LAYOUTS = cases.LAYOUTS | {
    "cp2-fused": (2, CP2 | FUSED | FUSED_SHARED),
    "cp2-dp2": (4, CP2),
    "cp2-pp2": (4, CP2 | PP2),
    "cp2-pp2-vpp2": (4, CP2 | VPP2),
    "cp4": (4, {"context_parallel_size": 4}),
    "cp2-ep2": (2, CP2 | EP2),
    "tp2-sp-fused": (2, TP2 | SP | {"use_fused_linear_logprobs": True}),
    "tp4-sp": (4, TP4 | SP),
    "pp2-3": (2, PP2 | {"num_layers_in_last_pipeline_stage": 3}),
    "pp3-uneven": (3, {"pipeline_model_parallel_size": 3} | ENDS),
}
SHARED = ("cp2", "cp2-fused", "cp2-dp2", "cp2-tp2-sp", "cp2-pp2", "cp2-pp2-vpp2", "cp4")
DEEPSEEK = ("deepseek-v3", "deepseek-v3-yarn", "moonlight", "deepseek-v3-one-expert")
OF_MAMBA = [
    "pp2-3" if layout == "pp2-uneven" else layout
    for layout in cases.LAYOUTS
    if layout != "one-recomputed-attention"
]
MAMBA = [
    *(("nemotron-h", layout) for layout in OF_MAMBA if "ep2" not in layout),
    *(("nemotron-h-experts", layout) for layout in OF_MAMBA if layout != "tp2"),
    *(("nemotron-h-latent", layout) for layout in OF_MAMBA if layout not in ("tp2", "pp2-3", "pp2-vpp2")),
]
UNUSED = dict.fromkeys(DEEPSEEK, ".mlp.experts.")
"""Some have no token."""
STILL = dict.fromkeys((*DEEPSEEK, "nemotron-h-experts", "nemotron-h-latent"), cases.STILL)


def adam_of(name):
    """With a smaller eps a step would multiply the rounding of small gradients."""
    return {"lr": 1e-2, "eps": 1e-3 if name.startswith("nemotron") else 1e-2, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: see `family_cases.saved_models`."""
    known = {}

    def of(name):
        stepped = name.startswith(("deepseek", "moonlight", "gpt-oss", "nemotron"))
        keys = adam_of(name) if stepped else {}
        return known.setdefault(str(keys), cases.saved_models(tmp_path_factory, **keys))(name)

    return of


@pytest.mark.smoke("deepseek-v3-one-packed", "nemotron-h-one-packed")
@pytest.mark.quick_cases(
    *("deepseek-v3-one-packed", "deepseek-v3-tp2-sp-padded", "deepseek-v3-yarn-cp2-packed"),
    *("moonlight-pp2-uneven-padded", "deepseek-v3-one-expert-ep2-packed"),
    *("gpt-oss-one-padded", "gpt-oss-tp2-sp-ep2-packed", "gpt-oss-tied-pp2-padded"),
    *("nemotron-h-one-padded", "nemotron-h-one-packed", "nemotron-h-tp2-sp-packed", "nemotron-h-pp2-padded"),
    *("llama-cp2-padded", "qwen3-cp2-fused-packed", "qwen3-moe-cp2-packed"),
)
@pytest.mark.exhaustive_cases(
    *("deepseek-v3-one-recomputed-packed", "moonlight-tp2-sp-ep2-packed"),
    *("gpt-oss-one-recomputed-packed", "gpt-oss-tied-cp2-packed"),
    *("llama-cp2-tp2-sp-packed", "qwen3-cp4-packed", "qwen3-moe-cp2-ep2-packed"),
    *(f"{name}-{layout}-{rows}" for name, layout in MAMBA for rows in cases.ROWS),
)
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in (*DEEPSEEK, "gpt-oss", "gpt-oss-tied") for layout in cases.OF_EXPERTS),
        *MAMBA,
        *((name, layout) for name in ("llama", "qwen3", "qwen3-moe") for layout in SHARED),
        ("qwen3-moe", "cp2-ep2"),
    ],
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    more = {"sections": STILL.get(name) if name in DEEPSEEK else None, "unused": UNUSED.get(name, "")}
    cases.assert_a_pass_is_theirs(ranks, saved(name), LAYOUTS[layout], rows, **more)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("one-group", "tp2"), ("one-group", "tp2-sp-fused"), ("one-group", "tp4-sp"), ("qwen3", "tp4-sp")],
)
def test_ranks_beyond_the_query_groups(ranks, saved, name, layout):
    cases.assert_a_pass_is_theirs(ranks, saved(name), LAYOUTS[layout], "padded")


STEPS = [
    *(("deepseek-v3", "one"), ("deepseek-v3-yarn", "tp2-sp"), ("moonlight", "pp2"), ("deepseek-v3", "ep2")),
    *(("gpt-oss", "pp2"), ("gpt-oss-tied", "tp2-sp-ep2"), ("gpt-oss", "pp3-uneven")),
    *(("nemotron-h-experts", "one"), ("nemotron-h-latent", "tp2-sp-ep2")),
]


@pytest.mark.quick_cases("deepseek-v3-one", *(f"{name}-{layout}" for name, layout in STEPS[4:]))
@pytest.mark.parametrize(("name", "layout"), STEPS)
def test_steps_of_adamw(ranks, saved, name, layout):
    more = {"sections": STILL.get(name), "unused": UNUSED.get(name, "")}
    least = 1e-4 if name.startswith("nemotron") else 1e-5
    cases.assert_steps_are_theirs(ranks, saved(name), LAYOUTS[layout], adam_of(name), least=least, **more)


@pytest.mark.quick_cases("tp2-sp")
@pytest.mark.parametrize("layout", ["tp2-sp", "tp2-sp-ep2"])
def test_the_norm_of_gradients_has_the_sinks_of_all_ranks(ranks, saved, layout):
    folder, (_, _, gradients), _ = saved("gpt-oss")
    wanted = sum(float((gradient.astype("float64") ** 2).sum()) for gradient in gradients.values()) ** 0.5
    world_size, megatron = LAYOUTS[layout]
    for found in ranks(world_size).run(hf_weight_cases.gradient_norm, folder, megatron, cases.batch()):
        assert found == pytest.approx(wanted, **METRICS)


TINY = {
    "sinks": tiny_gpt_oss.MODEL,
    "mamba": tiny_hybrid.MODEL,
    "mamba-experts": tiny_hybrid.EXPERTS,
    "mamba-latent": tiny_hybrid.LATENT_EXPERTS,
}


@pytest.mark.quick_cases("sinks-one", "mamba-one", "mamba-tp2-sp")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("sinks", layout) for layout in ("one", "tp2-sp", "pp2", "cp2", "ep2")),
        *(("mamba", layout) for layout in ("one", "tp2-sp")),
    ],
)
def test_decoding_says_what_a_pass_says(ranks, model, layout):
    """With a cache, of equal and unequal prompts, some longer than windows, and by whole passes."""
    lengths = [10, 10, 2, 5, 2, 1, 5, 3]
    test_generation.assert_confirmed(ranks, *LAYOUTS[layout], lengths, model=TINY[model])


@pytest.mark.quick_cases("sinks-tp2-sp-ep2", "mamba-experts-tp2-sp-ep2")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("sinks", layout) for layout in ("one", "tp2-sp-ep2", "pp2")),
        *(("mamba", layout) for layout in ("one", "tp2-sp", "pp2-3", "cp2")),
        *(("mamba-experts", "pp2"), ("mamba-experts", "tp2-sp-ep2"), ("mamba-latent", "tp2-sp-ep2")),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(ranks, tmp_path, model, layout):
    needed, megatron = LAYOUTS[layout]
    saving = "auto", str(tmp_path / "step"), TINY[model]
    (wanted,) = ranks(1).run(test_hybrid.go_on, *saving, {}, False)
    for found in ranks(needed).run(test_hybrid.go_on, *saving, megatron, True):
        test_hybrid.assert_went_on_alike(found, wanted)


@pytest.mark.quick_cases("sinks")
@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("*.self_attn.sinks", "softmax_offset"),
        ("model.layers.*.mlp.experts.*", ".experts."),
        ("model.layers.*.mlp.router.*", ".router."),
    ],
    ids=["sinks", "experts", "routers"],
)
def test_frozen_weights_stay(ranks, tmp_path, pattern, named):
    given = {"freeze": (pattern,)}, tiny_gpt_oss.MODEL, EP2, {}, str(tmp_path / "step")
    for start, end, gradients, frozen in ranks(2).run(test_frozen_weights.steps, *given):
        assert frozen == {name for name in start if named in name}
        assert frozen.isdisjoint(gradients)
        for name, weight in start.items():
            assert (end[name] == weight).all() == (name in frozen), name


def gradients_from(megatron, weights):
    """Weights under the names of a whole model, log-probabilities, and the gradients of this rank's step."""
    plain = {"optimizer": {"lr": 1e-2, "use_distributed_optimizer": False}}
    latent = test_generation.LATENT | {"rope_scaling": None}
    worker = tiny.worker(tiny.policy_config(model=latent, megatron=megatron | plain, max_grad_norm=0.0))
    if weights is not None:
        tiny.load_full_weights(worker, weights)
    start = {name: parameter.numpy() for name, parameter in tiny.parameters(worker).items()}
    logprobs = worker.get_logprobs(data=tiny.grpo_batch())["logprobs"].numpy()
    worker.train(tiny.shard(tiny.grpo_batch()), tiny.grpo_loss())
    return start, logprobs, {name: gradient.numpy() for name, gradient in tiny.gradients(worker).items()}


@pytest.mark.parametrize("layout", [TP2, TP2 | SP], ids=["tp2", "tp2-sp"])
def test_what_makes_latents_has_the_gradients_of_all_heads(ranks, layout):
    weights, wanted, whole = ranks(1).run(gradients_from, {}, None)[0]
    for _, logprobs, gradients in ranks(2).run(gradients_from, layout, weights):
        assert abs(logprobs - wanted).max() < LOGPROBS
        made_of_latents = [name for name in gradients if "_down_proj" in name or "kv_layernorm" in name]
        assert len(made_of_latents) == 3 * 2
        for name in made_of_latents:
            largest = abs(whole[name]).max()
            assert abs(gradients[name] - whole[name]).max() < GRADIENTS * largest, name
