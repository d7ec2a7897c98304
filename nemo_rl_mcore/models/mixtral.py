"""Mixtral: a Mistral with experts in every layer, whose shares are made to sum to 1."""

from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.models.family import WINDOW, Family, HFConfig, Refusal
from nemo_rl_mcore.models.weights import ATTENTION, experts


def _write(model: ModelConfig, origin: HFConfig) -> dict[str, object]:
    return {
        "intermediate_size": model.expert_ffn_size,
        "router_aux_loss_coef": origin.get("router_aux_loss_coef", model.moe_aux_loss_coeff),
    }


def _problems(values: HFConfig) -> Iterator[Problem]:
    if values.get("num_experts_per_tok") == 1:
        yield Problem(
            "no-signal",
            "num_experts_per_tok",
            "1 of a mixtral model gives every expert the share 1, so that the router has no gradient",
            "use a model with more experts per token",
        )


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    fields={"moe_router_pre_softmax": False},
    sizes={"num_moe_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
    layer=(*ATTENTION, *experts("block_sparse_moe", gate_up_down=("w1", "w3", "w2"))),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    refusals=(
        WINDOW,
        Refusal("router_jitter_noise", (0.0, None), "noise on the router's input is not supported"),
    ),
    write=_write,
    problems=_problems,
)
