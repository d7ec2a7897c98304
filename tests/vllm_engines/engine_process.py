"""What tests run inside a process with vLLM: tiny models of transformers, their weights sent in buckets."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nemo_rl_mcore.engine.engine import Request, Response
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine, EngineSettings, VllmEngine

VOCABULARY = 32
FAMILIES = {
    "llama": {},
    "llama_scaled_rotary": {
        "rope_scaling": {
            "factor": 8.0, "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
}  # fmt: skip
LONGER_THAN_A_BLOCK = 150
PROMPT_LENGTHS = (3, 40, LONGER_THAN_A_BLOCK)


def prepare_engine(_rank: int) -> None:
    from nemo_rl_mcore.driver.actors.places import rank_environment
    from nemo_rl_mcore.engine.kinds import vllm_environment

    os.environ.update(rank_environment(os.environ, on_cpu=True) | vllm_environment(os.environ, on_cpu=True))


def hf_config(family: str, *, tied: bool) -> dict[str, object]:
    from nemo_rl_mcore.config import ModelConfig
    from nemo_rl_mcore.models.config_json import hf_config_of

    sizes: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 32,
        "ffn_hidden_size": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "init_method_std": 0.2,
    }  # fmt: skip
    model = ModelConfig.model_validate(sizes | {"tie_word_embeddings": tied} | FAMILIES[family])
    return hf_config_of(model)


def model_folder(folder: Path, family: str = "llama", *, tied: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(family, tied=tied)))
    return folder


def transformers_model(folder: Path, seed: int) -> Any:
    """The model of the folder with weights of a seed, in float32; biases and norms are random too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors as a checkpoint holds them: a tied output layer has none of its own."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def settings(folder: Path, **changes: Any) -> EngineSettings:
    from nemo_rl_mcore.engine.vllm.engine import EngineSettings

    return EngineSettings(
        **{
            "model_dir": str(folder), "precision": "float32", "max_model_len": 256, "max_num_seqs": 32,
            "kv_cache_memory_bytes": 32 << 20, **changes,
        }
    )  # fmt: skip


async def refit_soon(
    engine: AsyncVllmEngine | VllmEngine, model: Any, version: int, bucket_bytes: int = 40_000
) -> None:
    from engine_contract import load  # imports torch, which must find the environment ready

    await load(engine, weights(model), version, bucket_bytes=bucket_bytes)


def refit(engine: VllmEngine, model: Any, version: int, bucket_bytes: int = 40_000) -> None:
    asyncio.run(refit_soon(engine, model, version, bucket_bytes))


def requests(lengths: Iterable[int] = PROMPT_LENGTHS) -> list[Request]:
    import torch

    from nemo_rl_mcore.engine.engine import Request

    generator = torch.Generator().manual_seed(5)
    return [
        Request(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist(), seed)
        for seed, length in enumerate(lengths)
    ]


def largest_error(
    model: Any, asked: list[Request], answered: list[Response], temperature: float, **filters: Any
) -> float:
    import torch
    from plain_filters import filtered_logprobs

    model = model.double()
    errors = []
    for request, response in zip(asked, answered, strict=True):
        tokens = torch.tensor(response.tokens)
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt, *response.tokens]])).logits[0]
        before = logits[len(request.prompt) - 1 : -1]
        expected, _ = filtered_logprobs(before, tokens, temperature, **filters)
        found = torch.tensor(response.logprobs, dtype=torch.float64)
        errors.append((expected - found).abs().max().item())
    model.float()
    return max(errors)
