"""A hybrid of Mamba-2, attention and feed-forward layers is transformers' in float64: every layout, packed or not."""

import hf_models
import hf_weight_cases as cases
import numpy as np
import pytest
import test_generation
import test_hf_gradients
import test_hybrid
import tiny_hybrid
from tolerances import FIVE_STEPS, GENERATION, GRADIENTS, LOGPROBS, METRICS

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
LAYOUTS = {
    "one": (1, {}),
    "one-recomputed": (1, {"activation_checkpointing": True}),
    "one-fused": (
        1,
        {
            "use_fused_linear_logprobs": True,
            "fused_linear_logprobs_packed": True,
            "fused_linear_logprobs_chunk_size": 5,
        },
    ),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2-sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "pp2-uneven": (2, PP2 | {"num_layers_in_last_pipeline_stage": 3}),
    "pp2-vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, CP2),
    "cp2-tp2-sp": (4, CP2 | TP2 | SP),
    "ep2": (2, EP2),
    "tp2-sp-ep2": (2, TP2 | SP | EP2),
    "pp2-ep2": (4, PP2 | EP2),
}
_OF_EXPERTS = {"model": {"moe_router_bias_update_rate": 0.0}}
STILL = {"nemotron-h": {}, "nemotron-h-experts": _OF_EXPERTS, "nemotron-h-latent": _OF_EXPERTS}
BIAS = "e_score_correction_bias"
"""No gradient moves it, but a rate, unless that is 0."""
ROWS = test_hf_gradients.ROWS
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: the folder of a tiny model, what transformers makes of a batch, and its weights after steps."""
    found = {}

    def of(name):
        if name not in found:
            folder = hf_models.save(name, tmp_path_factory.mktemp(name))
            said = hf_models.in_float64(folder, test_hf_gradients.batch())
            found[name] = folder, said, hf_models.stepped_in_float64(folder, batches(), **ADAM)
        return found[name]

    return of


def batches():
    """Three batches of uneven rows."""
    first = test_hf_gradients.batch()
    return [first | {"input_ids": np.roll(first["input_ids"], shift, axis=1)} for shift in range(3)]


@pytest.mark.smoke("nemotron-h-one-packed")
@pytest.mark.quick_cases(
    "nemotron-h-one-padded", "nemotron-h-one-packed", "nemotron-h-tp2-sp-packed", "nemotron-h-pp2-padded"
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("nemotron-h", layout) for layout in LAYOUTS if "ep2" not in layout),
        *(("nemotron-h-experts", layout) for layout in LAYOUTS if layout != "tp2"),
        *(
            ("nemotron-h-latent", layout)
            for layout in LAYOUTS
            if layout not in ("tp2", "pp2-uneven", "pp2-vpp2")
        ),
    ],
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    folder, (logprobs, loss, gradients), _ = saved(name)
    world_size, megatron = LAYOUTS[layout]
    for found in ranks(world_size).run(
        cases.trained_on, folder, megatron, ROWS[rows], test_hf_gradients.batch()
    ):
        assert abs(found[0] - logprobs).max() < LOGPROBS
        assert found[1] == pytest.approx(loss, **METRICS)
        assert found[2].keys() == gradients.keys()
        for tensor, gradient in gradients.items():
            if tensor.endswith(BIAS):
                continue
            largest = abs(gradient).max()
            assert largest > 1e-5, tensor
            assert abs(found[2][tensor] - gradient).max() < GRADIENTS * largest, tensor


@pytest.mark.parametrize(
    ("name", "layout"),
    [("nemotron-h", "tp2-sp"), ("nemotron-h-experts", "one"), ("nemotron-h-latent", "tp2-sp-ep2")],
)
def test_steps_of_adamw(ranks, saved, name, layout):
    folder, _, wanted = saved(name)
    world_size, megatron = LAYOUTS[layout]
    adam = {"lr": ADAM["lr"], "adam_eps": ADAM["eps"]}
    for found in ranks(world_size).run(cases.stepped, folder, megatron, STILL[name], batches(), adam):
        assert found.keys() == wanted.keys()
        start = hf_models.tensors(folder)
        for tensor, weight in wanted.items():
            moved = abs(weight - start[tensor].numpy()).max()
            assert (moved == 0) if tensor.endswith(BIAS) else (moved > 1e-4), tensor
            assert abs(found[tensor] - weight).max() < FIVE_STEPS, tensor


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2-sp", "pp2", "cp2"])
def test_decoding_says_what_a_pass_says(ranks, layout):
    """With a cache, of equal and unequal prompts, and by whole passes where the layout has none."""
    world_size, megatron = LAYOUTS[layout]
    lengths = [10, 10, 2, 5, 2, 1, 5, 3]
    for generated, confirmed, *_ in ranks(world_size).run(
        test_generation.generated_against_logprobs, megatron, lengths, [], None, tiny_hybrid.MODEL
    ):
        assert len(generated) == 8 * 6
        assert generated == pytest.approx(confirmed, abs=GENERATION)


@pytest.mark.quick_cases("experts-tp2-sp-ep2")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((tiny_hybrid.MODEL, layout) for layout in ("one", "tp2-sp", "pp2-uneven", "cp2")),
        *((tiny_hybrid.EXPERTS, layout) for layout in ("pp2", "tp2-sp-ep2")),
        (tiny_hybrid.LATENT_EXPERTS, "tp2-sp-ep2"),
    ],
    ids=["one", "tp2-sp", "pp2-uneven", "cp2", "experts-pp2", "experts-tp2-sp-ep2", "latent-tp2-sp-ep2"],
)
def test_a_checkpoint_goes_on_in_another_layout(ranks, tmp_path, model, layout):
    needed, megatron = LAYOUTS[layout]
    (wanted,) = ranks(1).run(test_hybrid.go_on, "auto", str(tmp_path / "step"), model, {}, False)
    for found in ranks(needed).run(test_hybrid.go_on, "auto", str(tmp_path / "step"), model, megatron, True):
        test_hybrid.assert_went_on_alike(found, wanted)
