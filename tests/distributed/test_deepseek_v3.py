"""Latent attention with dense layers and experts behind them is transformers' in float64, on every layout."""

import hf_models
import hf_weight_cases as cases
import numpy as np
import pytest
import test_hf_gradients
from tolerances import FIVE_STEPS, GRADIENTS, LOGPROBS, METRICS

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element")  # as no shared experts are

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2, EP2 = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
LAYOUTS = {
    "one": (1, {}),
    "one-recomputed": (1, {"activation_checkpointing": True}),
    "one-recomputed-attention": (
        1,
        {"activation_checkpointing": True, "recompute_granularity": "selective"},
    ),
    "one-fused": (
        1,
        {
            "use_fused_linear_logprobs": True,
            "fused_linear_logprobs_packed": True,
            "fused_linear_logprobs_chunk_size": 5,
        },
    ),
    "dp2": (2, {}),
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
NAMES = ("deepseek-v3", "deepseek-v3-yarn", "moonlight", "deepseek-v3-one-expert")
STILL = {"model": {"moe_router_bias_update_rate": 0.0}}
BIAS = "e_score_correction_bias"
"""No gradient moves it, but a rate, unless that is 0."""
ROWS = test_hf_gradients.ROWS
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}
"""With a smaller eps a step would multiply the rounding of small gradients."""


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


@pytest.mark.smoke("deepseek-v3-one-packed")
@pytest.mark.quick_cases(
    "deepseek-v3-one-packed",
    "deepseek-v3-tp2-sp-padded",
    "deepseek-v3-yarn-cp2-packed",
    "moonlight-pp2-uneven-padded",
    "deepseek-v3-one-expert-ep2-packed",
)
@pytest.mark.exhaustive_cases("deepseek-v3-one-recomputed-packed", "moonlight-tp2-sp-ep2-packed")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in NAMES for layout in LAYOUTS])
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    folder, (logprobs, loss, gradients), _ = saved(name)
    world_size, megatron = LAYOUTS[layout]
    sections = ROWS[rows] | STILL
    for found in ranks(world_size).run(
        cases.trained_on, folder, megatron, sections, test_hf_gradients.batch()
    ):
        assert abs(found[0] - logprobs).max() < LOGPROBS
        assert found[1] == pytest.approx(loss, **METRICS)
        assert found[2].keys() == {tensor for tensor, gradient in gradients.items() if gradient.size}
        for tensor, gradient in found[2].items():
            if tensor.endswith(BIAS):
                continue
            largest = abs(gradients[tensor]).max()
            assert largest > 1e-5 or ".mlp.experts." in tensor, tensor  # some experts have no token
            assert abs(gradient - gradients[tensor]).max() <= GRADIENTS * largest, tensor
        used = [gradient.any() for tensor, gradient in found[2].items() if ".mlp.experts." in tensor]
        assert sum(used) > len(used) / 2


@pytest.mark.quick_cases("deepseek-v3-one")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("deepseek-v3", "one"), ("deepseek-v3-yarn", "tp2-sp"), ("moonlight", "pp2"), ("deepseek-v3", "ep2")],
)
def test_steps_of_adamw(ranks, saved, name, layout):
    folder, _, wanted = saved(name)
    world_size, megatron = LAYOUTS[layout]
    adam = {"lr": ADAM["lr"], "adam_eps": ADAM["eps"]}
    start = hf_models.tensors(folder)
    for found in ranks(world_size).run(cases.stepped, folder, megatron, STILL, batches(), adam):
        assert found.keys() == wanted.keys()
        moved = {tensor: abs(weight - start[tensor].numpy()).max() for tensor, weight in wanted.items()}
        for tensor, weight in wanted.items():
            used = moved[tensor] > 1e-5
            assert used or tensor.endswith(BIAS) or ".mlp.experts." in tensor, tensor
            assert abs(found[tensor] - weight).max() < FIVE_STEPS, tensor


LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "num_query_groups": None,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}


def gradients_from(megatron, weights):
    """Weights under the names of a whole model, log-probabilities, and the gradients of this rank's step."""
    import tiny

    plain = {"optimizer": {"lr": 1e-2, "use_distributed_optimizer": False}}
    worker = tiny.worker(tiny.policy_config(model=LATENT, megatron=megatron | plain, max_grad_norm=0.0))
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
