"""The phases of a GRPO step of a random model of 1.5 billion weights, with fused settings on and off."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tiny
import torch
from one_rank import batch, be_the_only_rank
from report import Report
from torch import Tensor
from trained_worker import leave, prepare

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.rank import accelerator

TABLE = "a step by phase"
FUSED = {"bias_activation_fusion": True, "apply_rope_fusion": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": FUSED,
    "SwiGLU unfused": FUSED | {"bias_activation_fusion": False},
    "rotary unfused": FUSED | {"apply_rope_fusion": False},
    "both unfused": {"bias_activation_fusion": False, "apply_rope_fusion": False},
    "fused, full recomputation": FUSED | {"activation_checkpointing": True},
}
# The mean difference of a log-probability.
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-5}


@dataclass(frozen=True)
class Size:
    """The model, the rows of a step with their tokens, those of a microbatch, and how many are generated."""

    model: Mapping[str, Any]
    precision: str
    rows: int
    length: int
    budget: int
    new_tokens: int
    product: int
    steps: int


SIZES = {
    "cuda": Size(
        model={
            "num_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_query_groups": 2, "kv_channels": 128,
            "ffn_hidden_size": 8960, "vocab_size": 151_936, "add_qkv_bias": True, "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
        precision="bfloat16", rows=32, length=1024, budget=8192, new_tokens=64, product=8192, steps=3,
    ),
    "cpu": Size(
        model={
            "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
            "ffn_hidden_size": 128, "vocab_size": 256, "max_position_embeddings": 64,
        },
        precision="float32", rows=4, length=32, budget=64, new_tokens=4, product=256, steps=1,
    ),
}  # fmt: skip


def run(report: Report, device: str) -> None:
    """Every setting, from the same weights; the first one's log-probabilities are those that the others must have."""
    report.doing("importing Megatron")
    be_the_only_rank()
    prepare()
    size = SIZES[device]
    report.doing("the speed of one large product")
    ceiling = product_speed(size)
    expected: Tensor | None = None
    for name, megatron in SETTINGS.items():
        with report.attempt("settings agree", name):
            found, seconds = measured(size, megatron)
            gc.collect()
            accelerator.empty_cache()
            expected = found if expected is None else expected
            difference = float((found - expected).abs().mean())
            report.compared("settings agree", name, difference, TOLERANCES[size.precision])
            report.figure(TABLE, row(name, size, seconds, ceiling))
    report.doing("leaving the process group")
    leave()


def config_of(size: Size, megatron: Mapping[str, Any]) -> Any:
    """The policy of one setting: packed rows and fused log-probabilities, as the recipes for GPUs have them."""
    fixed = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_packed": True}
    tokens = {"enabled": True, "train_mb_tokens": size.budget, "logprob_mb_tokens": 2 * size.budget}
    return PolicyConfig.model_validate(
        {
            "model": {**size.model},
            "tokenizer": {"name": "char"},
            "precision": size.precision,
            "train_global_batch_size": size.rows,
            "train_micro_batch_size": 1,
            "max_total_sequence_length": size.length,
            "generation": {"max_new_tokens": size.new_tokens},
            "sequence_packing": tokens,
            "megatron_cfg": {**fixed, **megatron, "optimizer": {"lr": 1e-6}},
        }
    )


def measured(size: Size, megatron: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Log-probabilities [B, S] of the start, and the least seconds of each phase after a step that warms up."""
    worker = tiny.worker(config_of(size, megatron), init_reference_model=False)
    rows = batch(size.rows, size.length, size.model["vocab_size"], shortest=0.5)
    prompts, loss = prompts_of(rows, size), tiny.grpo_loss(fused=True, reference_policy_kl_penalty=0.0)
    start = worker.get_logprobs(data=rows)["logprobs"]
    torch.cuda.reset_peak_memory_stats()  # nothing without a GPU
    phases: dict[str, Callable[[], object]] = {
        "generation": lambda: worker.generate(data=prompts, step=0, stop_ids=[]),
        "logprobs": lambda: worker.get_logprobs(data=rows),
        "train": lambda: worker.train(rows, loss),
    }
    times: dict[str, list[float]] = {name: [] for name in phases}
    for _ in range(1 + size.steps):
        for name, phase in phases.items():
            times[name].append(seconds_of(phase))
    return start, {name: min(taken[1:]) for name, taken in times.items()}


def prompts_of(rows: Any, size: Size) -> Any:
    """The first half of what a row may have, all of one length, as prompts."""
    length, numbers = size.length // 2, torch.arange(size.rows)
    return BatchedDataDict(
        input_ids=rows["input_ids"][:, :length],
        input_lengths=torch.full((size.rows,), length),
        prompt_index=numbers,
        sample_index=torch.zeros_like(numbers),
    )


def seconds_of(call: Callable[[], object]) -> float:
    accelerator.synchronize(accelerator.device())
    began = time.perf_counter()
    call()
    accelerator.synchronize(accelerator.device())
    return time.perf_counter() - began


def product_speed(size: Size) -> float:
    """Operations a second of a square product in the model's number format."""
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[size.precision]
    square = torch.randn(size.product, size.product, dtype=kind, device=accelerator.device())
    best = min(seconds_of(lambda: square @ square) for _ in range(10))
    return 2 * size.product**3 / best


def row(name: str, size: Size, seconds: Mapping[str, float], ceiling: float) -> dict[str, str | float | None]:
    model = config_of(size, {}).model
    # The embedding is looked up; as the output layer it is multiplied with, once.
    multiplied = model.model_copy(update={"tie_word_embeddings": True})
    weights = count_parameters(multiplied)
    tokens = int(batch(size.rows, size.length, 2, shortest=0.5)["input_lengths"].sum())
    return {
        "": name,
        **{f"{phase} s": taken for phase, taken in seconds.items()},
        "tokens generated a second": size.rows * size.new_tokens / seconds["generation"],
        "tokens trained a second": tokens / seconds["train"],
        "share of the products' speed": 6 * weights * tokens / seconds["train"] / ceiling,
        "peak GB": accelerator.peak_memory_bytes() / 1e9,
    }
