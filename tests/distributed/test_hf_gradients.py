"""Ranks that share sequences, or a query group, have transformers' log-probabilities, loss and gradients in float64."""

import family_cases as cases
import pytest

CP2 = {"context_parallel_size": 2}
FUSED = CP2 | {
    "use_fused_linear_logprobs": True,
    "fused_linear_logprobs_context_parallel": True,
    "fused_linear_logprobs_packed": True,
    "fused_linear_logprobs_chunk_size": 5,
}
LAYOUTS = {
    "cp2": (2, CP2),
    "cp2-fused": (2, FUSED),
    "cp2-tp2-sp": (4, CP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2-pp2": (4, CP2 | {"pipeline_model_parallel_size": 2}),
    "cp2-pp2-vpp2": (
        4,
        CP2 | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "cp4": (4, {"context_parallel_size": 4}),
    "cp2-ep2": (2, CP2 | {"expert_model_parallel_size": 2}),
}
SHARED_GROUPS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp-fused": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_fused_linear_logprobs": True},
    ),
    "tp4-sp": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return cases.saved_models(tmp_path_factory)


@pytest.mark.quick_cases("llama-cp2-padded", "qwen3-cp2-fused-packed", "qwen3-moe-cp2-packed")
@pytest.mark.exhaustive_cases("llama-cp2-tp2-sp-packed", "qwen3-cp4-packed", "qwen3-moe-cp2-ep2-packed")
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("llama", "qwen3") for layout in LAYOUTS if layout != "cp2-ep2"),
        *(("qwen3-moe", layout) for layout in LAYOUTS),
    ],
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    cases.assert_a_pass_is_theirs(ranks, saved(name), LAYOUTS[layout], rows)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("one-group", "tp2"), ("one-group", "tp2-sp-fused"), ("one-group", "tp4-sp"), ("qwen3", "tp4-sp")],
)
def test_ranks_beyond_the_query_groups(ranks, saved, name, layout):
    cases.assert_a_pass_is_theirs(ranks, saved(name), SHARED_GROUPS[layout], "padded")
