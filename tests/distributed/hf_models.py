"""Tiny random transformers models of each family, saved as folders, and the log-probabilities they give."""

from __future__ import annotations

import json
import re
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

transformers.utils.logging.disable_progress_bar()

# An odd vocabulary, so that two tensor-parallel ranks need a row of padding.
VOCABULARY = 37
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Not hidden_size / num_attention_heads.
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
# Bases for which some rotations are slow and some are between, and both still turn within a test's rows.
_STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Of eight rotations the first stays, the last four are slow, and those between are mixed.
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# Latents narrower than what is made of them, heads of three sizes, and two groups of experts of four.
_LATENT = {
    "head_dim": 8,  # of the rotated part
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
# Of four rotations the first stays, and the others are slow or between; whole queries and keys are scaled too.
_SCALED = {"mscale": 0.7, "mscale_all_dim": 1.2}
# Heads that do not make up the hidden size, odd sizes of heads and states, a Mamba layer behind another.
_MAMBA = {
    "hybrid_override_pattern": "M-MM*-M-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    # transformers lifts shorter time steps to it, and neither Megatron nor vLLM does.
    "time_step_min": 1e-30,
}
_HYBRID_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
# A window that is shorter than a test's rows in the first of two layers; gates that the limit clamps; 4 rotations, of
# which none is rounded to a whole pair.
_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "sliding_window": 5,
    "swiglu_limit": 1.5,
    "rope_parameters": {**_YARN, "truncate": False},
}
# A full-attention layer that is not the last, key heads that value heads share, sizes of heads that differ and are odd.
_DELTA_NETS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "initializer_range": 0.1,  # with more the rounding of transformers in fp32 is above the tolerances
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
SHIFTED = {"dt_bias": 4.0, "A_log": -2.0}
"""With those of a start the states of Mamba layers would hold little, and forget it at once."""
_SLOW = {"A_log": -3.0}
"""The same for gated delta nets."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-8192": ("Llama", {"rope_parameters": _STRETCHED, "max_position_embeddings": 65536}),
    "llama3-32": ("Llama", {"rope_parameters": {**_STRETCHED, "original_max_position_embeddings": 32}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "qwen3": ("Qwen3", {}),
    "one-group": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek-v3": ("DeepseekV3", _LATENT),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {
            **_LATENT,
            "rope_parameters": {**_YARN, **_SCALED},
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
            "topk_group": 4,
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    ),
    "deepseek-v3-one-expert": (
        "DeepseekV3",
        {
            **_LATENT,
            "first_k_dense_replace": 0,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "topk_group": 4,
            "n_shared_experts": 0,
            "routed_scaling_factor": 1.0,
        },
    ),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "gpt-oss-tied": (
        "GptOss",
        {
            **_GPT_OSS,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "nemotron-h": ("NemotronH", _MAMBA),
    "nemotron-h-experts": ("NemotronH", {**_MAMBA, **_HYBRID_EXPERTS, "hybrid_override_pattern": "MEM*EM-E"}),
    "nemotron-h-latent": (
        "NemotronH",
        {
            **_MAMBA,
            **_HYBRID_EXPERTS,
            "hybrid_override_pattern": "EM*E",
            "moe_latent_size": 20,
            "num_nextn_predict_layers": 1,
        },
    ),
    "qwen3.5": ("Qwen3_5", _DELTA_NETS),
    "qwen3.5-tied": ("Qwen3_5", {**_DELTA_NETS, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_DELTA_NETS, **_QWEN_EXPERTS}),
    "qwen3-moe-shares": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": False}),
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save the model; every weight is drawn, norms and biases too."""
    family, keys = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    kind = f"{family}TextConfig" if family.startswith("Qwen3_5") else f"{family}Config"
    config = getattr(transformers, kind)(**_SIZES | keys)
    with _empty_tensors():
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1 or key.endswith("_bias"):
                shifted = _SLOW if family.startswith("Qwen3_5") else SHIFTED
                parameter.add_(0.3 * torch.randn_like(parameter) + shifted.get(key.rsplit(".", 1)[-1], 0.0))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.to(dtype).save_pretrained(folder)
    return folder


@contextmanager
def _empty_tensors() -> Iterator[None]:
    """Allow those that transformers draws for shared experts of a model without."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")
        yield


def logprobs(folder: Path, input_ids: np.ndarray, input_lengths: np.ndarray) -> np.ndarray:
    """What transformers gives each token, in the worker's form: column 0 and right padding are 0."""
    with _empty_tensors():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    ids = torch.from_numpy(input_ids)
    with torch.no_grad():
        every = model(ids).logits.log_softmax(-1)
    found = every[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    found = torch.nn.functional.pad(found, (1, 0))
    found[torch.arange(ids.shape[1]) >= torch.from_numpy(input_lengths).unsqueeze(1)] = 0.0
    return found.numpy()


_PLAIN = re.compile(r"^model\.(?!language_model\.)")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the folder holds, by the names that vLLM accepts too."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return {
        _PLAIN.sub("model.language_model.", name) if kind.startswith("qwen3_5") else name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def set_in_config(folder: Path, **values: object) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def in_float64(folder: Path, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """What transformers makes of a batch with float64 weights: log-probabilities, their mean loss, its gradients."""
    model = _float64(folder)
    with _without_float32(model):
        found, loss = _loss(model, batch)
        loss.backward()
    # A file has the tensors of experts one by one, as weights are exchanged; the model holds them together.
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder / "gradients")
    gradients = {name: tensor.numpy() for name, tensor in tensors(folder / "gradients").items()}
    return found.detach().numpy(), loss.item(), gradients


def stepped_in_float64(
    folder: Path, batches: list[dict[str, np.ndarray]], **adam: Any
) -> dict[str, np.ndarray]:
    """The tensors of a model after a step of AdamW on each batch, in float64."""
    model = _float64(folder)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    for batch in batches:
        optimizer.zero_grad()
        with _without_float32(model):
            _loss(model, batch)[1].backward()
        optimizer.step()
    model.save_pretrained(folder / "stepped")
    return {name: tensor.numpy() for name, tensor in tensors(folder / "stepped").items()}


def _float64(folder: Path) -> Any:
    # Models with sinks have one attention alone, which computes in float64.
    sinks = json.loads((folder / "config.json").read_text())["model_type"] == "gpt_oss"
    with _empty_tensors():
        return transformers.AutoModelForCausalLM.from_pretrained(
            # The other ways to attend and to run experts compute in float32, or not in float64.
            folder,
            dtype=torch.float64,
            attn_implementation="eager" if sinks else "sdpa",
            experts_implementation="eager",
        )


@contextmanager
def _without_float32(model: Any) -> Iterator[None]:
    """Have a gated delta net's code, which names float32 for norms and the rule, compute in float64 there."""
    module = sys.modules[type(model).__module__]
    if "qwen3_5" not in module.__name__:
        yield
        return
    double = types.SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", double)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def _loss(model: Any, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a batch, and its mean negative log-likelihood."""
    ids, lengths = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["input_lengths"])
    every = model(ids).logits.log_softmax(-1)
    found = every[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    found = torch.nn.functional.pad(found, (1, 0)) * (torch.arange(ids.shape[1]) < lengths.unsqueeze(1))
    mask = torch.from_numpy(batch["token_mask"])
    return found, -(found * mask).sum() / mask.sum()
