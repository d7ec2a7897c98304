"""A rough estimate of what one rank keeps in memory; activations and the key-value cache come on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_mcore.config.megatron import LOGITS_CHUNK_BYTES, LogitsCache
from nemo_rl_mcore.config.policy import REFERENCE_SHARE, PolicyConfig, Role
from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig
from nemo_rl_mcore.models import all_layers, count_parameters, layer_slots, outside_of_layers
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.models.weights import Slot, Weight

_FP32 = 4
_CHUNK_COPIES = 2  # a chunk's logits and their gradient
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a model takes on its fullest rank; how many weights it has, in all and on that rank."""

    parameters: int
    rank_parameters: int
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
        """Return the bytes of one rank of every model."""
        return sum(estimate.total for estimate in self.models.values())


def estimate_memory(config: RunConfig) -> RunMemory:
    """Estimate the fullest rank of every model: the pipeline stage with the embedding."""
    found = dict[str, MemoryEstimate]()
    for name, plan in config.models.items():
        policy = plan.policy
        held, trained = _held(policy), _held(policy, without_frozen=True)
        weights = held.trained * WEIGHT_BYTES[policy.precision] + held.buffers * _FP32
        ddp = policy.megatron_cfg.distributed_data_parallel_config
        in_fp32 = policy.precision == "float32" or ddp.grad_reduce_in_fp32
        found[name] = MemoryEstimate(
            parameters=count_parameters(policy.model),
            rank_parameters=held.trained + held.buffers,
            weights=weights,
            gradients=trained.trained * (_FP32 if in_fp32 else 2) if plan.trained else 0,
            optimizer=_optimizer(config, policy, trained) if plan.trained else 0,
            reference=weights if plan.reference and _may_be_on_device(config) else 0,
            logits=_logits(config, plan) if plan.role is Role.POLICY else 0,
        )
    return RunMemory(found)


def _may_be_on_device(config: RunConfig) -> bool:
    """Return whether a reference policy takes memory of the ranks' devices, if there is room."""
    kept, policy = config.policy.reference_on_device, config.policy
    return config.cluster.on_cpu or kept is True or (kept == "auto" and not policy.generation.takes_turns)


def reference_place(config: RunConfig) -> str:
    """Return where the weights of a reference policy are kept, in words; "" without one."""
    if not config.needs_reference:
        return ""
    if config.cluster.on_cpu:
        return "in the ranks' memory"
    if not _may_be_on_device(config):
        return "in page-locked memory of the CPU, exchanged with the policy's for each pass"
    if config.policy.reference_on_device is True:
        return "on the GPU"
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
    weights = WEIGHT_BYTES[policy.precision] * (2 if plan.reference else 1)
    return count_parameters(policy.model) * (weights + _state_bytes(policy))


def _optimizer(config: RunConfig, policy: PolicyConfig, trained: _Held) -> int:
    """Return the bytes of the optimizer's state over the trained weights of a rank."""
    megatron, states = policy.megatron_cfg, _state_bytes(policy)
    shards, expert_shards = (1, 1)
    if megatron.optimizer.use_distributed_optimizer:
        stages = megatron.pipeline_model_parallel_size
        shards = config.data_parallel_size * megatron.context_parallel_size
        expert_shards = config.cluster.world_size // (stages * megatron.expert_model_parallel_size)
    return -(-trained.shared * states // shards) - (-trained.experts * states // expert_shards)


def _state_bytes(policy: PolicyConfig) -> int:
    """Of each weight: Adam keeps two moments; under bf16 there are fp32 main parameters besides."""
    moments = 2 if policy.megatron_cfg.optimizer.optimizer == "adam" else 1
    return _FP32 * (moments + (policy.precision != "float32"))


@dataclass(frozen=True)
class _Held:
    """Numbers that a rank holds; experts' apart, since their optimizer state is shared among other ranks.

    buffers: those in fp32 that have neither gradients nor optimizer state.
    """

    shared: int = 0
    experts: int = 0
    buffers: int = 0

    @property
    def trained(self) -> int:
        return self.shared + self.experts

    def __add__(self, other: _Held) -> _Held:
        return _Held(self.shared + other.shared, self.experts + other.experts, self.buffers + other.buffers)


def _held(policy: PolicyConfig, *, without_frozen: bool = False) -> _Held:
    """Count the weights of the fullest rank: the embedding, and the heaviest layers that a stage may have."""
    model, megatron = policy.model, policy.megatron_cfg
    frozen = frozen_of(policy) if without_frozen else frozenset[Weight]()
    left_out = {(weight.slot, weight.layer) for weight in frozen}

    def of(slots: Sequence[Slot], layer: int | None = None) -> _Held:
        counts = {"shared": 0, "experts": 0, "buffers": 0}
        for slot in slots:
            if (slot, layer) in left_out:
                continue
            count = slot.count(model)
            if slot.of_expert:
                count //= megatron.expert_model_parallel_size
            elif slot.layout.dimension is not None:
                count = -(-count // megatron.tensor_model_parallel_size)
            counts["buffers" if slot.buffer else "experts" if slot.of_expert else "shared"] += count
        return _Held(**counts)

    of_layers = [of(layer_slots(model, layer), layer) for layer in all_layers(model)]
    stage = megatron.largest_stage(model.num_layers)
    stages = [sum(of_layers[at : at + stage], _Held()) for at in range(model.num_layers - stage + 1)]
    ends = outside_of_layers(model)
    outside = [ends.embedding, ends.final_norm]
    if megatron.pipeline_model_parallel_size == 1 or model.mtp_num_layers:
        # One stage has both ends; and the last one an embedding, where it predicts further tokens.
        outside = ends.of(model)
    fullest = max(stages, key=lambda one: one.trained + one.buffers)
    return sum(of_layers[model.num_layers :], fullest + of(outside))


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
        # What a forward pass leaves to its backward pass, which the last stage begins at once: in every schedule a
        # microbatch's head goes back before that of the next one goes forward.
        cache = LogitsCache.of(megatron.fused_linear_logprobs_cache_bytes)
        cached = min(cache.most(trained * vocab), trained * vocab * _FP32)
    return min(chunk, full) * _CHUNK_COPIES + cached


def training_tokens(config: RunConfig) -> int:
    """Return the tokens of a rank of the largest microbatch of training."""
    return _tokens(config, config.policy)[0]


def _tokens(config: RunConfig, policy: PolicyConfig) -> tuple[int, int]:
    """Return the tokens of a rank of the largest microbatch of training, and of the largest without gradients."""
    shared, longest = policy.megatron_cfg.context_parallel_size, policy.max_total_sequence_length
    if (budgets := policy.token_budgets) is not None:
        trained, scored = budgets.of_training(config.rows_per_sample), budgets.logprob
    else:
        validated = (config.given_rows and config.given_rows.val_micro_batch_size) or 0
        trained = policy.train_micro_batch_size * config.rows_per_sample * longest
        scored = max(policy.logprob_batch_size, validated * config.rows_per_sample) * longest
    return -(-trained // shared), -(-scored // shared)
