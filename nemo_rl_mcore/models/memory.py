"""Roughly what a rank keeps in memory beside activations and caches, and the bytes that an engine gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
_CPU_CACHE_SEQUENCES = 64
"""Sequences of full length that the key-value cache on CPU has room for by default; more wait their turn."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a model takes on its fullest rank, and its numbers of weights: in all, on that rank, trained there."""

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


@dataclass(frozen=True)
class RunMemory:
    """The estimates of a run's models by name; each has ranks of its own, which share the machines."""

    models: Mapping[str, MemoryEstimate]

    @property
    def total(self) -> int:
        return sum(estimate.total for estimate in self.models.values())


def estimate_memory(config: RunConfig) -> RunMemory:
    """Estimate the fullest rank of every model: the pipeline stage with the embedding."""
    found, on_device = dict[str, MemoryEstimate](), _may_be_on_device(config)
    for name, plan in config.models.items():
        policy, megatron = plan.policy, plan.policy.megatron_cfg
        held, trained = _held(policy), _held(policy, without_frozen=True)
        weights = (held["shared"] + held["experts"]) * WEIGHT_BYTES[policy.precision] + held[
            "buffers"
        ] * _FP32
        in_fp32 = (
            policy.precision == "float32" or megatron.distributed_data_parallel_config.grad_reduce_in_fp32
        )
        gradients = optimizer = 0
        if plan.trained:
            gradients = (trained["shared"] + trained["experts"]) * (_FP32 if in_fp32 else 2)
            states, shards, expert_shards = _state_bytes(policy), 1, 1
            if megatron.optimizer.use_distributed_optimizer:
                shards = config.data_parallel_size * megatron.context_parallel_size
                of_experts = megatron.pipeline_model_parallel_size * megatron.expert_model_parallel_size
                expert_shards = config.cluster.world_size // of_experts
            optimizer = -(-trained["shared"] * states // shards) - (
                -trained["experts"] * states // expert_shards
            )
        found[name] = MemoryEstimate(
            parameters=count_parameters(policy.model) + count_adapters(policy),
            rank_parameters=held.total(),
            rank_trained=trained["shared"] + trained["experts"] if plan.trained else 0,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            reference=weights if plan.reference and on_device and not megatron.peft.enabled else 0,
            logits=_logits(config, plan) if plan.role is Role.POLICY else 0,
        )
    return RunMemory(found)


def _may_be_on_device(config: RunConfig) -> bool:
    """Return whether a reference policy takes memory of the ranks' devices, if there is room."""
    return config.cluster.on_cpu or not config.policy.generation.takes_turns


def reference_place(config: RunConfig) -> str:
    """Return where the weights of a reference policy are kept, in words; "" without one."""
    if not config.needs_reference:
        return ""
    if config.policy.megatron_cfg.peft.enabled:
        return "the policy without its adapters"
    if config.cluster.on_cpu:
        return "in the ranks' memory"
    if not _may_be_on_device(config):
        return "in page-locked memory of the CPU, exchanged with the policy's for each pass"
    enough = estimate_memory(config).models["policy"].reference / REFERENCE_SHARE
    return f"on GPUs with {enough / 2**30:.4g} GiB free when the run starts, else in page-locked memory of the CPU"


def checkpoint_bytes(config: RunConfig) -> int:
    """Return roughly what a checkpoint takes on disk: weights, those of the reference, and the optimizer's state."""
    return sum(_saved_bytes(plan) for plan in config.models.values() if plan.trained)


def copied_bytes(config: RunConfig) -> int:
    """Return roughly what copies for `async_save` take of the memory of all machines, until they are written."""
    return sum(_saved_bytes(plan) for plan in config.models.values() if plan.saved_in_background)


def _saved_bytes(plan: ModelPlan) -> int:
    policy = plan.policy
    of_each = WEIGHT_BYTES[policy.precision]
    if policy.megatron_cfg.peft.enabled:
        unnamed = 0 if policy.weights is not None else count_parameters(policy.model) * of_each
        return count_adapters(policy) * (of_each + _state_bytes(policy)) + unnamed
    weights = of_each * (2 if plan.reference else 1)
    return count_parameters(policy.model) * (weights + _state_bytes(policy))


def _state_bytes(policy: PolicyConfig) -> int:
    """Of each weight: Adam keeps two moments; under bf16 there are fp32 main parameters besides."""
    return _FP32 * (2 + (policy.precision != "float32"))


def _held(policy: PolicyConfig, *, without_frozen: bool = False) -> Counter[str]:
    """Count the weights of the fullest rank: the embedding, and the heaviest layers that a stage may have.

    experts: their optimizer state is shared among other ranks. buffers: in fp32, without gradients.
    """
    model, megatron = policy.model, policy.megatron_cfg
    frozen = frozen_of(policy) if without_frozen else frozenset[Weight]()
    left_out = {(weight.slot, weight.layer) for weight in frozen}

    def of(slots: Sequence[Slot], layer: int | None = None) -> Counter[str]:
        counts = Counter[str]()
        for slot in slots:
            if (slot, layer) in left_out:
                continue
            count = slot.count(model)
            if slot.of_expert:
                count //= megatron.expert_model_parallel_size
            elif slot.layout.dimension is not None:
                count = -(-count // megatron.tensor_model_parallel_size)
            kind = "experts" if slot.of_expert else "shared"
            counts["buffers" if slot.buffer else kind] += count
        return counts

    adapted = {(weight.slot, weight.layer) for weight in adapted_weights(policy)}

    def slots_of(layer: int) -> list[Slot]:
        slots = layer_slots(model, layer)
        with_adapter = [slot for slot in slots if (slot, layer) in adapted]
        return slots + [part for slot in with_adapter for part in adapter_slots(slot, megatron.peft.dim)]

    of_layers = [of(slots_of(layer), layer) for layer in all_layers(model)]
    stage = megatron.largest_stage(model.num_layers)
    stages = [sum(of_layers[at : at + stage], Counter[str]()) for at in range(model.num_layers - stage + 1)]
    ends = outside_of_layers(model)
    outside = [ends.embedding, ends.final_norm]
    if megatron.pipeline_model_parallel_size == 1 or model.mtp_num_layers:
        # One stage has both ends; and the last one an embedding, where it predicts further tokens.
        outside = ends.of(model)
    return sum(of_layers[model.num_layers :], max(stages, key=lambda one: one.total()) + of(outside))


def _logits(config: RunConfig, plan: ModelPlan) -> int:
    policy, megatron = plan.policy, plan.policy.megatron_cfg
    vocab = -(-policy.model.vocab_size // megatron.tensor_model_parallel_size)
    trained, scored = _tokens(config, policy)
    full = max(trained, scored) * vocab * _FP32
    if not megatron.use_fused_linear_logprobs:
        return full * _CHUNK_COPIES
    rows = megatron.fused_linear_logprobs_chunk_size
    chunk = rows * vocab * _FP32 if rows else LOGITS_CHUNK_BYTES
    cached = 0
    if plan.trained:
        # What a forward pass leaves to its backward pass: in every schedule a microbatch's head goes back before that
        # of the next one goes forward.
        cached = min(LOGITS_CACHE.most(trained * vocab), trained * vocab * _FP32)
    return min(chunk, full) * _CHUNK_COPIES + cached


def training_tokens(config: RunConfig) -> int:
    return _tokens(config, config.policy)[0]


def _tokens(config: RunConfig, policy: PolicyConfig) -> tuple[int, int]:
    """Return the tokens of a rank of the largest microbatch of training, and of the largest without gradients."""
    shared, longest = policy.megatron_cfg.context_parallel_size, policy.max_total_sequence_length
    if (budgets := policy.token_budgets) is not None:
        trained, scored = budgets.of_training(config.rows_per_sample), budgets.logprob
    else:
        trained = policy.train_micro_batch_size * config.rows_per_sample * longest
        scored = policy.logprob_batch_size * longest
    return -(-trained // shared), -(-scored // shared)


def refit_bucket_bytes(policy: PolicyConfig) -> int:
    """Size of each of the two buffers of weights on their way: 64 MiB, and in any case the largest tensor."""
    kinds = {weight.slot for weight in all_weights(policy.model)}
    largest = max(prod(shape) for slot in kinds for shape in slot.tensor_shapes(policy.model))
    return max(_BUCKET_BYTES, largest * WEIGHT_BYTES[policy.precision])


def cpu_cache_bytes(policy: PolicyConfig) -> int:
    """Size of the key-value cache on CPU, unless vllm_kwargs says another."""
    vllm, model = policy.generation.vllm_cfg, policy.model
    block = 128  # tokens; the cache is cut into whole blocks
    length = -(-policy.max_total_sequence_length // block) * block
    number = WEIGHT_BYTES[vllm.number_format(policy.precision) or policy.precision]
    return _CPU_CACHE_SEQUENCES * length * 2 * model.num_layers * model.query_groups * model.head_dim * number
