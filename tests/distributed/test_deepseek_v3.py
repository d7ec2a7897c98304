"""Latent attention with dense layers and experts behind them is transformers' in float64, on every layout."""

import family_cases as cases
import pytest
import tiny
from family_cases import SP, TP2
from tolerances import GRADIENTS, LOGPROBS

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element")  # as no shared experts are

NAMES = ("deepseek-v3", "deepseek-v3-yarn", "moonlight", "deepseek-v3-one-expert")
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0}
"""With a smaller eps a step would multiply the rounding of small gradients."""
EXPERTS = ".mlp.experts."
"""Some have no token."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: see `family_cases.saved_models`."""
    return cases.saved_models(tmp_path_factory, **ADAM)


@pytest.mark.smoke("deepseek-v3-one-packed")
@pytest.mark.quick_cases(
    "deepseek-v3-one-packed",
    "deepseek-v3-tp2-sp-padded",
    "deepseek-v3-yarn-cp2-packed",
    "moonlight-pp2-uneven-padded",
    "deepseek-v3-one-expert-ep2-packed",
)
@pytest.mark.exhaustive_cases("deepseek-v3-one-recomputed-packed", "moonlight-tp2-sp-ep2-packed")
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in NAMES for layout in cases.OF_EXPERTS]
)
def test_log_probabilities_and_gradients(ranks, saved, name, layout, rows):
    cases.assert_a_pass_is_theirs(ranks, saved(name), layout, rows, sections=cases.STILL, unused=EXPERTS)


@pytest.mark.quick_cases("deepseek-v3-one")
@pytest.mark.parametrize(
    ("name", "layout"),
    [("deepseek-v3", "one"), ("deepseek-v3-yarn", "tp2-sp"), ("moonlight", "pp2"), ("deepseek-v3", "ep2")],
)
def test_steps_of_adamw(ranks, saved, name, layout):
    cases.assert_steps_are_theirs(ranks, saved(name), layout, ADAM, sections=cases.STILL, unused=EXPERTS)


LATENT = {
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
