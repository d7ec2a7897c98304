"""Tiny policies and batches for tests on gloo ranks; Megatron is imported by the ranks alone."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import torch

from nemo_rl_mcore.config import ClippedPGLossConfig, ModelConfig, PolicyConfig
from nemo_rl_mcore.config import policy as policies
from nemo_rl_mcore.config.megatron import LOGITS_CACHE, LogitsCache
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.microbatch import split_balanced
from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.models import layer_slots
from nemo_rl_mcore.models.weights import REPLICATED, Packing
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

VOCABULARY = 32


def policy_config(
    *, model: dict[str, Any] | None = None, megatron: dict[str, Any] | None = None, **policy: Any
) -> PolicyConfig:
    """Two layers, hidden 32; every section can be overridden.

    Constants of the ranks are given as if they were keys: reference_on_device, sequence_length_round, and of megatron
    fused_linear_logprobs_cache_bytes, and bucket_size of its buckets. They hold until the next call, or `leave_call`.
    """
    megatron = dict(megatron or {})
    ddp = dict(megatron.get("distributed_data_parallel_config", {}))
    length_round = None
    for name in ("sequence_packing", "dynamic_batching"):
        if "sequence_length_round" in policy.get(name, {}):
            policy[name] = dict(policy[name])
            length_round = policy[name].pop("sequence_length_round")
    on_device, bucket_size = policy.pop("reference_on_device", None), ddp.pop("bucket_size", None)
    cached = megatron.pop("fused_linear_logprobs_cache_bytes", None)
    _set_constants(length_round, on_device, bucket_size, cached)
    if ddp or "distributed_data_parallel_config" in megatron:
        megatron["distributed_data_parallel_config"] = ddp
    model_section = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
        "vocab_size": VOCABULARY, "init_method_std": 0.1, "max_position_embeddings": 64,
    }  # fmt: skip
    megatron_section: dict[str, Any] = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}}
    sections: dict[str, Any] = {
        "tokenizer": {"name": "char"},
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 16,
        "generation": {"max_new_tokens": 4, "temperature": 0.7},
    }
    return PolicyConfig.model_validate(
        sections
        | policy
        | {"model": model_section | (model or {}), "megatron_cfg": megatron_section | megatron}
    )


def _set_constants(
    length_round: int | None = None,
    on_device: bool | None = None,
    bucket_size: int | None = None,
    cached: int | None = None,
) -> None:
    """Set the constants of this process; None is the package's own value."""
    policies.SEQUENCE_LENGTH_ROUND = length_round or 64
    # Importing Megatron takes seconds, and whoever only collects tests or compares answers does without.
    if (on_device, bucket_size, cached) != (None,) * 3 or "nemo_rl_mcore.rank.megatron" in sys.modules:
        from nemo_rl_mcore.rank.megatron import model as built
        from nemo_rl_mcore.rank.megatron import reference_policy, train_backend

        reference_policy.ON_DEVICE, built.BUCKET_SIZE = on_device, bucket_size
        train_backend.LOGITS_CACHE = LOGITS_CACHE if cached is None else LogitsCache(cached)


def worker(config: PolicyConfig, **options: Any) -> MegatronPolicyWorker:
    """A worker in this rank's process; a former worker's layout is left first, the process group stays."""
    leave()
    return MegatronPolicyWorker(config, **options)


def leave_call() -> None:
    """Leave nothing of a call to the next one, which may be on other ranks: neither a layout nor constants."""
    leave()
    _set_constants()


def leave() -> None:
    """End the layout of the last worker, if there is one."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        from nemo_rl_mcore.rank.megatron import parallel_groups

        parallel_groups.destroy()


def grpo_batch(rows: int = 8, length: int = 12, seed: int = 0) -> BatchedDataDict:
    """Random rows of uneven lengths with everything that ClippedPGLossFn reads; one row has no token to train on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    lengths[0] = length
    columns = torch.arange(length)
    mask = ((columns >= 3) & (columns < lengths.unsqueeze(1))).float()
    mask[1] = 0.0
    near_uniform = -torch.rand(rows, length, generator=generator) - 3.0
    return BatchedDataDict(
        input_ids=torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        * (columns < lengths.unsqueeze(1)),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=(torch.arange(rows) != 2).float(),
        advantages=torch.randn(rows, length, generator=generator),
        prev_logprobs=near_uniform,
        generation_logprobs=near_uniform + 0.01 * torch.randn(rows, length, generator=generator),
        reference_policy_logprobs=near_uniform + 0.1 * torch.randn(rows, length, generator=generator),
    )


def returns_batch(seed: int = 0) -> BatchedDataDict:
    """The rows of `grpo_batch` with what a critic learns from."""
    batch, generator = grpo_batch(seed=seed), torch.Generator().manual_seed(5 + seed)
    batch["returns"] = torch.randn(batch["token_mask"].shape, generator=generator)
    batch["values"] = 0.1 * torch.randn(batch["token_mask"].shape, generator=generator)
    return batch


def shard(batch: BatchedDataDict) -> BatchedDataDict:
    """This data-parallel rank's rows."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    return batch.shard_by_batch_size(parallel_groups.group("data").size())[
        parallel_groups.group("data").rank()
    ]


def dealt(policy: PolicyConfig, batch: BatchedDataDict, rows_per_sample: int = 1) -> BatchedDataDict:
    """This data-parallel rank's samples, as the driver deals them."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    ranks, rank = parallel_groups.group("data").size(), parallel_groups.group("data").rank()
    if policy.token_budgets is None:
        return batch.split(ranks, rows_per_sample)[rank]
    return split_balanced(batch, ranks, rows_per_sample)[rank]


def grpo_loss(*, fused: bool = False, **keys: Any) -> ClippedPGLossFn:
    """ClippedPG with an entropy bonus and a KL penalty, so that every term has a gradient."""
    config = ClippedPGLossConfig.model_validate(
        {"entropy_coef": 0.01, "reference_policy_kl_penalty": 0.1} | keys
    )
    return ClippedPGLossFn(config, use_fused_linear_logprobs=fused)


def parameters(of: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters by name."""
    return {
        f"{stage}.{name}": parameter.detach().clone()
        for stage, chunk in enumerate(of.backend.chunks)
        for name, parameter in chunk.named_parameters()
    }


def gradients(of: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    """Copies of this rank's gradients by name; after a step they are what the optimizer was given."""
    return {
        f"{stage}.{name}": parameter.main_grad.clone()
        for stage, chunk in enumerate(of.backend.chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def load_full_weights(to: MegatronPolicyWorker, weights: dict[str, np.ndarray]) -> None:
    """Fill this rank's parameters with its part of a single rank's weights; one chunk a stage."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in to.backend.chunks[0].named_parameters():
        full = torch.from_numpy(weights[f"0.{global_name(name, to.policy)}"])
        with torch.no_grad():
            parameter.copy_(shard_of(full, parameter, rank, name, to.policy.model))
    if to.backend.trained:
        to.backend.optimizer.reload_model_params()


def global_name(name: str, policy: PolicyConfig) -> str:
    """What a parameter of this rank is called in a GPTModel that one rank holds: stages and experts count on."""
    from megatron.core import parallel_state

    config, model = policy.megatron_cfg, policy.model
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first = stage * model.num_layers // config.pipeline_model_parallel_size
    name = _renumbered(name, "decoder.layers.", first, policy.parts_of_a_layer)
    experts = (model.num_moe_experts or 0) // config.expert_model_parallel_size
    rank = parallel_state.get_expert_model_parallel_rank()
    return _renumbered(name, "local_experts.", rank * experts)


def _renumbered(name: str, marker: str, offset: int, parts: int = 1) -> str:
    head, found, tail = name.partition(marker)
    if not found:
        return name
    number, rest = tail.split(".", 1)
    return f"{head}{marker}{int(number) // parts + offset}.{rest}"


def shard_of(
    full: torch.Tensor, parameter: torch.Tensor, rank: int, name: str, model: ModelConfig
) -> torch.Tensor:
    """The part of a whole parameter that a tensor-parallel rank holds: a share of each section of it."""
    if full.shape == parameter.shape:
        return full
    dimension = next(i for i in range(full.ndim) if full.shape[i] != parameter.shape[i])
    ranks = full.shape[dimension] // parameter.shape[dimension]
    sections = full.split(_sections(name, full.shape[dimension], model), dimension)
    return torch.cat([section.chunk(ranks, dimension)[rank] for section in sections], dimension)


def _sections(name: str, size: int, model: ModelConfig) -> list[int]:
    name = name.replace(
        ".lora.lora_B", ".weight"
    )  # an adapter's rows are cut as those of the weight beside it
    slots = (slot for layer in range(model.num_layers) for slot in layer_slots(model, layer))
    layout = next(
        (slot.layout for slot in slots if re.fullmatch(rf".*\.({slot.megatron})", name)), REPLICATED
    )
    if layout.sections is not None:
        return [part for tensor in layout.sections(model) for part in tensor]
    return [size // 2] * 2 if layout.packing is Packing.JOINED else [size]


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference over all parameters, relative to the parameter's largest entry or to 1."""
    assert left.keys() == right.keys()
    return max(
        float((left[name] - right[name]).abs().max() / left[name].abs().max().clamp(min=1.0)) for name in left
    )
