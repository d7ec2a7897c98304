"""A rough estimate of what one rank keeps in memory; activations and the key-value cache come on top."""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_mcore.config.logits_cache import LogitsCache
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.megatron import MegatronConfig
from nemo_rl_mcore.config.policy import REFERENCE_SHARE, PolicyConfig
from nemo_rl_mcore.config.run_models import ModelPlan, Role

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
        """Return all of it."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.logits


@dataclass(frozen=True)
class RunMemory:
    """The estimates of a run's models by name; each has ranks of its own, which share the machines."""

    models: Mapping[str, MemoryEstimate]

    @property
    def total(self) -> int:
        """Bytes of one rank of every model."""
        return sum(estimate.total for estimate in self.models.values())


def estimate_memory(config: RunConfig) -> RunMemory:
    """Estimate the fullest rank of every model: the pipeline stage with the embedding."""
    return RunMemory({name: _estimate(config, plan) for name, plan in config.models.items()})


def may_be_on_device(config: RunConfig) -> bool:
    """Return whether a reference policy takes memory of the ranks' devices, if there is room."""
    kept, policy = config.policy.reference_on_device, config.policy
    return config.cluster.on_cpu or kept is True or (kept == "auto" and not policy.generation.takes_turns)


def reference_place(config: RunConfig) -> str:
    """Return where the weights of a reference policy are kept, in words; "" without one."""
    if not config.needs_reference:
        return ""
    if config.cluster.on_cpu:
        return "in the ranks' memory"
    if not may_be_on_device(config):
        return "in page-locked memory of the CPU, exchanged with the policy's for each pass"
    if config.policy.reference_on_device is True:
        return "on the GPU"
    enough = estimate_memory(config).models["policy"].reference / REFERENCE_SHARE
    return f"on GPUs with {enough / 2**30:.4g} GiB free when the run starts, else in page-locked memory of the CPU"


def checkpoint_bytes(config: RunConfig) -> int:
    """Roughly what a checkpoint takes on disk: weights, those of the reference, and the optimizer's state."""
    return sum(_saved_bytes(plan) for plan in config.models.values() if plan.trained)


def _saved_bytes(plan: ModelPlan) -> int:
    policy = plan.policy
    weights = WEIGHT_BYTES[policy.precision] * (2 if plan.reference else 1)
    return policy.model.parameters * (weights + _state_bytes(policy))


def _estimate(config: RunConfig, plan: ModelPlan) -> MemoryEstimate:
    policy = plan.policy
    shared, experts = _rank_parameters(policy)
    parameters = shared + experts
    frozen = _frozen(policy)
    weights = parameters * WEIGHT_BYTES[policy.precision]
    ddp = policy.megatron_cfg.distributed_data_parallel_config
    in_fp32 = policy.precision == "float32" or ddp.grad_reduce_in_fp32
    return MemoryEstimate(
        parameters=policy.model.parameters,
        rank_parameters=parameters,
        weights=weights,
        gradients=(parameters - frozen) * (_FP32 if in_fp32 else 2) if plan.trained else 0,
        optimizer=_optimizer(config, policy, shared - frozen, experts) if plan.trained else 0,
        reference=weights if plan.reference and may_be_on_device(config) else 0,
        logits=_logits(plan, config.rows_per_sample) if plan.role is Role.POLICY else 0,
    )


def _optimizer(config: RunConfig, policy: PolicyConfig, shared: int, experts: int) -> int:
    """Bytes of the optimizer's state over so many weights of a rank."""
    megatron, states = policy.megatron_cfg, _state_bytes(policy)
    shards, expert_shards = (1, 1)
    if megatron.optimizer.use_distributed_optimizer:
        stages = megatron.pipeline_model_parallel_size
        shards = config.data_parallel_size * megatron.context_parallel_size
        expert_shards = config.cluster.world_size // (stages * megatron.expert_model_parallel_size)
    return -(-shared * states // shards) - (-experts * states // expert_shards)


def _state_bytes(policy: PolicyConfig) -> int:
    """Of each weight: Adam keeps two moments; under bf16 there are fp32 main parameters besides."""
    moments = 2 if policy.megatron_cfg.optimizer.optimizer == "adam" else 1
    return _FP32 * (moments + (policy.precision != "float32"))


def _rank_parameters(policy: PolicyConfig) -> tuple[int, int]:
    """Weights of the fullest rank: those that tensor parallelism splits, and whole experts."""
    model, megatron = policy.model, policy.megatron_cfg
    both_ends = megatron.pipeline_model_parallel_size == 1 and not model.tie_word_embeddings
    embeddings = model.embedding_parameters * (2 if both_ends else 1)
    layers = megatron.largest_stage(model.num_layers)
    predicting = 0
    if model.mtp_num_layers:
        # The last stage holds those layers; it has an embedding and the output layer as well.
        predicting = model.mtp_num_layers
        embeddings = model.embedding_parameters * (1 if model.tie_word_embeddings else 2)
    split = (layers + predicting) * model.layer_parameters + predicting * model.prediction_parameters
    experts = (layers + predicting) * model.expert_parameters // megatron.expert_model_parallel_size
    return -(-(split + embeddings) // megatron.tensor_model_parallel_size) + model.hidden_size, experts


def _frozen(policy: PolicyConfig) -> int:
    """Weights of the fullest rank that are not trained: those of frozen routers."""
    model, megatron = policy.model, policy.megatron_cfg
    if not megatron.freeze_moe_router:
        return 0
    routers = (model.num_moe_experts or 0) * model.hidden_size
    layers = megatron.largest_stage(model.num_layers)
    return layers * routers // megatron.tensor_model_parallel_size


def _logits(plan: ModelPlan, rows_per_sample: int) -> int:
    policy, megatron = plan.policy, plan.policy.megatron_cfg
    vocab = -(-policy.model.vocab_size // megatron.tensor_model_parallel_size)
    trained, scored = _tokens(policy, rows_per_sample)
    full = max(trained, scored) * vocab * _FP32
    if not megatron.use_fused_linear_logprobs:
        return full * _CHUNK_COPIES
    rows = megatron.fused_linear_logprobs_chunk_size
    chunk = rows * vocab * _FP32 if rows else megatron.fused_linear_logprobs_chunk_bytes
    cached = _cached(megatron, trained * vocab) if plan.trained else 0
    return min(chunk, full) * _CHUNK_COPIES + cached


def training_tokens(policy: PolicyConfig, rows_per_sample: int) -> int:
    """Return the tokens of a rank of the largest microbatch of training."""
    return _tokens(policy, rows_per_sample)[0]


def _tokens(policy: PolicyConfig, rows_per_sample: int) -> tuple[int, int]:
    """Tokens of a rank of the largest microbatch of training, and of log-probabilities."""
    shared, longest = policy.megatron_cfg.context_parallel_size, policy.max_total_sequence_length
    if (budgets := policy.token_budgets) is not None:
        trained, scored = budgets.of_training(rows_per_sample), budgets.logprob
    else:
        trained, scored = (
            policy.train_micro_batch_size * rows_per_sample * longest,
            policy.logprob_batch_size * longest,
        )
    return -(-trained // shared), -(-scored // shared)


def _cached(megatron: MegatronConfig, logits: int) -> int:
    """Bytes of the logits that a forward pass leaves to its backward pass, which the last stage begins at once.

    In every schedule a microbatch's head goes back before that of the next one goes forward.
    """
    cache = LogitsCache.of(megatron.fused_linear_logprobs_cache_bytes)
    return min(cache.most(logits), logits * _FP32)
