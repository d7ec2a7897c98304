"""Log-probabilities, loss and gradients of ranks that share sequences are those of transformers in float64."""

import hf_models
import hf_weight_cases as cases
import numpy as np
import pytest
from tolerances import GRADIENTS, LOGPROBS, METRICS

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
BUDGETS = {"train_mb_tokens": 64, "logprob_mb_tokens": 64, "sequence_length_round": 1}
ROWS = {"padded": {}, "packed": {"sequence_packing": {"enabled": True} | BUDGETS}}


def batch():
    """Rows of 40, 7, 2 and 31 tokens; first ones, and observations in the middle, are not trained on."""
    generator = np.random.default_rng(5)
    lengths, columns = np.array([cases.LENGTH, 7, 2, 31]), np.arange(cases.LENGTH)
    mask = (columns >= 1) & (columns < lengths[:, None])
    mask[:, 12:19] = False
    return {
        "input_ids": generator.integers(0, hf_models.VOCABULARY, (len(lengths), cases.LENGTH)),
        "input_lengths": lengths,
        "token_mask": mask.astype(np.float32),
        "sample_mask": np.ones(len(lengths), np.float32),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: the folder of a tiny model, and what transformers makes of the batch."""
    found = {}

    def of(name):
        if name not in found:
            folder = hf_models.save(name, tmp_path_factory.mktemp(name))
            found[name] = folder, hf_models.in_float64(folder, batch())
        return found[name]

    return of


@pytest.mark.quick_cases("llama-cp2-padded", "qwen3-cp2-fused-packed", "qwen3-moe-cp2-packed")
@pytest.mark.exhaustive_cases("llama-cp2-tp2-sp-packed", "qwen3-cp4-packed", "qwen3-moe-cp2-ep2-packed")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("llama", "qwen3") for layout in LAYOUTS if layout != "cp2-ep2"),
        *(("qwen3-moe", layout) for layout in LAYOUTS),
    ],
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    folder, (logprobs, loss, gradients) = saved(name)
    world_size, megatron = LAYOUTS[layout]
    for found in ranks(world_size).run(cases.trained_on, folder, megatron, ROWS[rows], batch()):
        assert abs(found[0] - logprobs).max() < LOGPROBS
        assert found[1] == pytest.approx(loss, **METRICS)
        assert found[2].keys() == gradients.keys()
        for tensor, gradient in gradients.items():
            largest = abs(gradient).max()
            assert largest > 1e-4, tensor
            assert abs(found[2][tensor] - gradient).max() < GRADIENTS * largest, tensor
