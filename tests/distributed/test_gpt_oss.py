"""Windows, sinks, and experts with biases and clamped gates are transformers' in float64, on every layout."""

import family_cases as cases
import hf_weight_cases
import pytest
import test_frozen_weights
import test_generation
import test_hybrid
import tiny_gpt_oss
from tolerances import METRICS

ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}
"""With a smaller eps a step would multiply the rounding of small gradients."""
NAMES = ("gpt-oss", "gpt-oss-tied")
UNEVEN = (
    3,
    {
        "pipeline_model_parallel_size": 3,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 1,
    },
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: see `family_cases.saved_models`."""
    return cases.saved_models(tmp_path_factory, **ADAM)


@pytest.mark.quick_cases("gpt-oss-one-padded", "gpt-oss-tp2-sp-ep2-packed", "gpt-oss-tied-pp2-padded")
@pytest.mark.exhaustive_cases("gpt-oss-one-recomputed-packed", "gpt-oss-tied-cp2-packed")
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in NAMES for layout in cases.OF_EXPERTS]
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    cases.assert_a_pass_is_theirs(ranks, saved(name), layout, rows)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt-oss", "pp2"), ("gpt-oss-tied", "tp2-sp-ep2"), ("gpt-oss", UNEVEN)],
    ids=["gpt-oss-pp2", "gpt-oss-tied-tp2-sp-ep2", "gpt-oss-pp3-uneven"],
)
def test_steps_of_adamw(ranks, saved, name, layout):
    cases.assert_steps_are_theirs(ranks, saved(name), layout, ADAM)


@pytest.mark.quick_cases("tp2-sp")
@pytest.mark.parametrize("layout", ["tp2-sp", "tp2-sp-ep2"])
def test_the_norm_of_gradients_has_the_sinks_of_all_ranks(ranks, saved, layout):
    folder, (_, _, gradients), _ = saved("gpt-oss")
    wanted = sum(float((gradient.astype("float64") ** 2).sum()) for gradient in gradients.values()) ** 0.5
    world_size, megatron = cases.LAYOUTS[layout]
    for found in ranks(world_size).run(hf_weight_cases.gradient_norm, folder, megatron, cases.batch()):
        assert found == pytest.approx(wanted, **METRICS)


@pytest.mark.quick_cases("one")
@pytest.mark.parametrize("layout", ["one", "tp2-sp", "pp2", "cp2", "ep2"])
def test_decoding_says_what_a_pass_says(ranks, layout):
    """With a cache, of prompts and answers that are longer than windows, and by whole passes."""
    lengths = [10, 10, 2, 5, 2, 1, 5, 3]
    test_generation.assert_confirmed(ranks, *cases.LAYOUTS[layout], lengths, model=tiny_gpt_oss.MODEL)


@pytest.mark.quick_cases("tp2-sp-ep2")
@pytest.mark.parametrize("layout", ["one", "tp2-sp-ep2", "pp2"])
def test_a_checkpoint_goes_on_in_another_layout(ranks, tmp_path, layout):
    needed, megatron = cases.LAYOUTS[layout]
    folder, model = str(tmp_path / "step"), tiny_gpt_oss.MODEL
    (wanted,) = ranks(1).run(test_hybrid.go_on, "auto", folder, model, {}, False)
    for found in ranks(needed).run(test_hybrid.go_on, "auto", folder, model, megatron, True):
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
    freeze = {"freeze": (pattern,)}
    for start, end, gradients, frozen in ranks(2).run(
        test_frozen_weights.steps, freeze, tiny_gpt_oss.MODEL, cases.EP2, {}, str(tmp_path / "step")
    ):
        assert frozen == {name for name in start if named in name}
        assert frozen.isdisjoint(gradients)
        for name, weight in start.items():
            assert (end[name] == weight).all() == (name in frozen), name
