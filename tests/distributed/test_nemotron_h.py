"""A hybrid of Mamba-2, attention and feed-forward layers is transformers' in float64: every layout, packed or not."""

import family_cases as cases
import pytest
import test_generation
import test_hybrid
import tiny_hybrid
from family_cases import PP2

LAYOUTS = cases.LAYOUTS | {"pp2-uneven": (2, PP2 | {"num_layers_in_last_pipeline_stage": 3})}
del LAYOUTS["one-recomputed-attention"]
STILL = {"nemotron-h": {}, "nemotron-h-experts": cases.STILL, "nemotron-h-latent": cases.STILL}
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: see `family_cases.saved_models`."""
    return cases.saved_models(tmp_path_factory, **ADAM)


@pytest.mark.smoke("nemotron-h-one-packed")
@pytest.mark.quick_cases(
    "nemotron-h-one-padded", "nemotron-h-one-packed", "nemotron-h-tp2-sp-packed", "nemotron-h-pp2-padded"
)
@pytest.mark.parametrize("rows", cases.ROWS)
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
    cases.assert_a_pass_is_theirs(ranks, saved(name), LAYOUTS[layout], rows)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("nemotron-h-experts", "one"), ("nemotron-h-latent", "tp2-sp-ep2")],
)
def test_steps_of_adamw(ranks, saved, name, layout):
    cases.assert_steps_are_theirs(ranks, saved(name), LAYOUTS[layout], ADAM, least=1e-4, sections=STILL[name])


@pytest.mark.parametrize("layout", ["one", "tp2-sp"])
def test_decoding_says_what_a_pass_says(ranks, layout):
    """With a cache, of equal and unequal prompts, and by whole passes where the layout has none."""
    lengths = [10, 10, 2, 5, 2, 1, 5, 3]
    test_generation.assert_confirmed(ranks, *LAYOUTS[layout], lengths, model=tiny_hybrid.MODEL)


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
