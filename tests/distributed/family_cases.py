"""What the tests of a family of models beside transformers have in common: layouts, batches, and what is compared."""

import hf_models
import hf_weight_cases as cases
import numpy as np
import pytest
from tolerances import FIVE_STEPS, GRADIENTS, GRADIENTS_THAT_CANCEL, LOGPROBS, METRICS

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
LAYOUTS = {
    "one": (1, {}),
    "one-recomputed": (1, {"activation_checkpointing": True}),
    "one-recomputed-attention": (1, {"activation_checkpointing": True, "recompute_granularity": "selective"}),
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
    "pp2-uneven": (2, PP2 | {"num_layers_in_last_pipeline_stage": 1}),
    "pp2-vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, CP2),
    "cp2-tp2-sp": (4, CP2 | TP2 | SP),
    "ep2": (2, EP2),
    "tp2-sp-ep2": (2, TP2 | SP | EP2),
    "pp2-ep2": (4, PP2 | EP2),
}
OF_EXPERTS = [layout for layout in LAYOUTS if layout != "tp2"]
"""Experts and tensor-parallel ranks need sequence parallelism."""
BUDGETS = {"train_mb_tokens": 64, "logprob_mb_tokens": 64}
ROWS = {"padded": {}, "packed": {"sequence_packing": {"enabled": True} | BUDGETS}}
STILL = {"model": {"moe_router_bias_update_rate": 0.0}}
BIAS = "e_score_correction_bias"
"""No gradient moves it, but a rate, unless that is 0."""


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


def batches():
    """Three batches of uneven rows."""
    first = batch()
    return [first | {"input_ids": np.roll(first["input_ids"], shift, axis=1)} for shift in range(3)]


def saved_models(tmp_path_factory, **adam):
    """`saved(name)`: a tiny model's folder, what transformers makes of a batch, and weights after steps of adam."""
    found = {}

    def of(name):
        if name not in found:
            folder = hf_models.save(name, tmp_path_factory.mktemp(name))
            said = hf_models.in_float64(folder, batch())
            stepped = hf_models.stepped_in_float64(folder, batches(), **adam) if adam else None
            found[name] = folder, said, stepped
        return found[name]

    return of


def assert_a_pass_is_theirs(ranks, saved, layout, rows, *, sections=None, unused="", within=GRADIENTS):
    """Compare log-probabilities, loss and gradients; `unused`: what is in the names of tensors that may have none."""
    folder, (logprobs, loss, gradients), _ = saved
    world_size, megatron = LAYOUTS[layout] if isinstance(layout, str) else layout
    sections = ROWS[rows] | (sections or {})
    for found in ranks(world_size).run(cases.trained_on, folder, megatron, sections, batch()):
        assert abs(found[0] - logprobs).max() < LOGPROBS
        assert found[1] == pytest.approx(loss, **METRICS)
        assert found[2].keys() == {tensor for tensor, gradient in gradients.items() if gradient.size}
        for tensor, gradient in found[2].items():
            if tensor.endswith(BIAS):
                continue
            largest = abs(gradients[tensor]).max()
            assert largest > 1e-5 or (unused and unused in tensor), tensor
            share = GRADIENTS_THAT_CANCEL if tensor.endswith("router.bias") else within
            assert abs(gradient - gradients[tensor]).max() <= share * largest, tensor
        used = [gradient.any() for tensor, gradient in found[2].items() if unused and unused in tensor]
        assert not used or sum(used) > len(used) / 2


def assert_steps_are_theirs(ranks, saved, layout, adam, *, least=1e-5, sections=None, unused=""):
    """Compare weights after three steps of AdamW, which move each tensor by `least` somewhere."""
    folder, _, wanted = saved
    world_size, megatron = LAYOUTS[layout] if isinstance(layout, str) else layout
    own = {"lr": adam["lr"], "adam_eps": adam["eps"]}
    start = hf_models.tensors(folder)
    for found in ranks(world_size).run(cases.stepped, folder, megatron, sections or {}, batches(), own):
        assert found.keys() == wanted.keys()
        for tensor, weight in wanted.items():
            moved = abs(weight - start[tensor].numpy()).max()
            if tensor.endswith(BIAS):
                assert moved == 0, tensor
            else:
                assert moved > least or (unused and unused in tensor), tensor
            assert abs(found[tensor] - weight).max() < FIVE_STEPS, tensor
