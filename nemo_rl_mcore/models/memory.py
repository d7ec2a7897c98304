"""Estimates of a rank's memory without activations and caches, and of an engine's cache and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nemo_rl_mcore.config.megatron import LOGITS_CACHE, LOGITS_CHUNK_BYTES
from nemo_rl_mcore.config.policy import REFERENCE_SHARE, PolicyConfig, Role
from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig
from nemo_rl_mcore.models import all_layers, all_weights, count_parameters, layer_slots, outside_of_layers
from nemo_rl_mcore.models.adapters import adapted_weights, adapter_slots, count_adapters
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.models.weights import Slot, Weight

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_FP32 = WEIGHT_BYTES["float32"]
_CHUNK_COPIES = 2  # a chunk's logits and their gradient
_BUCKET_BYTES = 64 << 20
_CPU_CACHE_BLOCK = 128  # tokens
_CPU_CACHE_SEQUENCES = 64
"""Number of full-length sequences for which the key-value cache on CPUs has room by default; others wait."""


@dataclass(frozen=True)
class MemoryEstimate:
    """A model's bytes on its fullest rank, and its numbers of parameters: in total, on that rank, and trained there."""

    parameters: int
    rank_parameters: int
    rank_trained: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + self.logits


def estimate_memory(config: RunConfig) -> dict[str, MemoryEstimate]:
    """Estimate each model's memory on its fullest rank: the pipeline stage with the embedding."""
    found = dict[str, MemoryEstimate]()
    for name, plan in config.models.items():
        policy, megatron, size = plan.policy, plan.policy.megatron_cfg, WEIGHT_BYTES[plan.policy.precision]
        held, trained = _held(policy), _held(policy, without_frozen=True)
        weights = (held["shared"] + held["experts"]) * size + held["buffers"] * _FP32
        of_experts, shared, gradients, optimizer = trained["experts"], trained["shared"], 0, 0
        if plan.trained:
            reduced = _FP32 if megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else size
            gradients = (shared + of_experts) * reduced
            shards = expert_shards = 1
            if megatron.optimizer.use_distributed_optimizer:
                shards = config.data_parallel_size * megatron.context_parallel_size
                copies = megatron.pipeline_model_parallel_size * megatron.expert_model_parallel_size
                expert_shards = config.cluster.world_size // copies
            states = _state_bytes(policy)
            optimizer = -(-shared * states // shards) - (-of_experts * states // expert_shards)
        stays = config.cluster.on_cpu or not config.policy.generation.takes_turns
        on_device = plan.reference and stays and not megatron.peft.enabled
        found[name] = MemoryEstimate(
            parameters=count_parameters(policy.model) + count_adapters(policy),
            rank_parameters=held.total(),
            rank_trained=shared + of_experts if plan.trained else 0,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            reference=weights if on_device else 0,
            logits=_logits(config, plan) if plan.role is Role.POLICY else 0,
        )
    return found


def reference_place(config: RunConfig) -> str:
    """Describe the place of a reference policy's weights; "" without a reference policy."""
    if not config.models["policy"].reference:
        return ""
    if config.policy.megatron_cfg.peft.enabled:
        return "the policy without its adapters"
    if config.cluster.on_cpu:
        return "in the ranks' memory"
    if config.policy.generation.takes_turns:
        return "in page-locked memory of the CPU, exchanged with the policy's for each pass"
    enough = estimate_memory(config)["policy"].reference / REFERENCE_SHARE
    return f"on GPUs with {enough / 2**30:.4g} GiB free when the run starts, else in page-locked memory of the CPU"


def checkpoint_bytes(config: RunConfig, *, copies: bool = False) -> int:
    """Return a checkpoint's approximate size on disk: weights, reference weights and optimizer state.

    copies: return instead the memory, over all machines, of copies for `async_save` until they are written.
    """
    total = 0
    for plan in config.models.values():
        policy, megatron = plan.policy, plan.policy.megatron_cfg
        if not plan.trained or (copies and not megatron.checkpoint.async_save):
            continue
        parameters, size = count_parameters(policy.model), WEIGHT_BYTES[policy.precision]
        if megatron.peft.enabled:
            total += 0 if policy.weights is not None else parameters * size
            total += count_adapters(policy) * (size + _state_bytes(policy))
        else:
            total += parameters * (size * (2 if plan.reference else 1) + _state_bytes(policy))
    return total


def _state_bytes(policy: PolicyConfig) -> int:
    """Return the optimizer's bytes per weight: two moments and, under bf16, the fp32 main parameter."""
    return _FP32 * (2 + (policy.precision != "float32"))


def _held(policy: PolicyConfig, *, without_frozen: bool = False) -> Counter[str]:
    """Count the fullest rank's weights: the embedding and the largest layers that a stage may have.

    experts: counted separately, since other ranks share their optimizer state. buffers: fp32, without gradients.
    """
    model, megatron = policy.model, policy.megatron_cfg
    frozen = frozen_of(policy) if without_frozen else frozenset[Weight]()
    left_out = {(weight.slot, weight.layer) for weight in frozen}

    adapted = {(weight.slot, weight.layer) for weight in adapted_weights(policy)}

    def of(slots: Sequence[Slot], layer: int | None = None) -> Counter[str]:
        counts = Counter[str]()
        beside = [slot for slot in slots if (slot, layer) in adapted]
        adapters = (part for slot in beside for part in adapter_slots(slot, megatron.peft.dim))
        for slot in (*slots, *adapters):
            count = 0 if (slot, layer) in left_out else slot.count(model)
            if slot.of_expert:
                count //= megatron.expert_model_parallel_size
            elif slot.layout.dimension is not None:
                count = -(-count // megatron.tensor_model_parallel_size)
            counts["buffers" if slot.buffer else "experts" if slot.of_expert else "shared"] += count
        return counts

    of_layers = [of(layer_slots(model, layer), layer) for layer in all_layers(model)]
    stage = megatron.largest_stage(model.num_layers)
    stages = [sum(of_layers[at : at + stage], Counter[str]()) for at in range(model.num_layers - stage + 1)]
    ends = outside_of_layers(model)
    outside = [ends.embedding, ends.final_norm]
    if megatron.pipeline_model_parallel_size == 1 or model.mtp_num_layers:
        # A single stage has both ends; the last stage also has an embedding if it predicts further tokens.
        outside = ends.of(model)
    return sum(of_layers[model.num_layers :], max(stages, key=lambda one: one.total()) + of(outside))


def _logits(config: RunConfig, plan: ModelPlan) -> int:
    policy, megatron = plan.policy, plan.policy.megatron_cfg
    vocab = -(-policy.model.vocab_size // megatron.tensor_model_parallel_size)
    trained, scored = microbatch_tokens(config, policy)
    full = max(trained, scored) * vocab * _FP32
    if not megatron.use_fused_linear_logprobs:
        return full * _CHUNK_COPIES
    rows = megatron.fused_linear_logprobs_chunk_size
    chunk = rows * vocab * _FP32 if rows else LOGITS_CHUNK_BYTES
    # A forward pass keeps this for its backward pass: in every schedule the output layer finishes a microbatch's
    # backward pass before the next microbatch's forward pass.
    logits = trained * vocab if plan.trained else 0
    cached = min(LOGITS_CACHE.limit, logits * min(LOGITS_CACHE.bytes_per_logit or _FP32, _FP32))
    return min(chunk, full) * _CHUNK_COPIES + cached


def microbatch_tokens(config: RunConfig, policy: PolicyConfig) -> tuple[int, int]:
    """Return a rank's tokens in the largest training microbatch, and in the largest microbatch without gradients."""
    shared, longest = policy.megatron_cfg.context_parallel_size, policy.max_total_sequence_length
    if (budgets := policy.token_budgets) is not None:
        trained, scored = budgets.of_training(config.rows_per_sample), budgets.logprob
    else:
        trained = policy.train_micro_batch_size * config.rows_per_sample * longest
        scored = policy.logprob_batch_size * longest
    return -(-trained // shared), -(-scored // shared)


def refit_bucket_bytes(policy: PolicyConfig) -> int:
    """Return the bytes of each of a refit's two buffers: 64 MiB, or the largest tensor if that is larger."""
    kinds = {weight.slot for weight in all_weights(policy.model)}
    largest = max(prod(shape) for slot in kinds for shape in slot.tensor_shapes(policy.model))
    return max(_BUCKET_BYTES, largest * WEIGHT_BYTES[policy.precision])


def cpu_cache_bytes(policy: PolicyConfig) -> int:
    """Return the bytes of the key-value cache on CPUs, unless vllm_kwargs overrides them."""
    vllm, model = policy.generation.vllm_cfg, policy.model
    length = -(-policy.max_total_sequence_length // _CPU_CACHE_BLOCK) * _CPU_CACHE_BLOCK
    number = WEIGHT_BYTES[vllm.number_format(policy.precision)]
    keys_and_values = 2 * model.num_layers * model.shape.query_groups * model.shape.head_dim
    return _CPU_CACHE_SEQUENCES * length * keys_and_values * number
