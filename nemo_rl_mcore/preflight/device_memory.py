"""Memory of a GPU in the two halves of a step: while ranks train, and while engines on the same GPUs generate.

B bytes of a number, H hidden size, F feed-forward size, Q and K the sizes of all queries and of all keys, T tokens.
"""

from dataclasses import dataclass

from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.preflight.memory import WEIGHT_BYTES, RunMemory, training_tokens


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU, without what CUDA, NCCL and fragmentation take.

    activations: of the microbatches under way, of the model that has most. training: with all that the ranks keep.
    during_generation: what the ranks keep while engines generate on their GPUs; None where none do. engine_share: of a
    GPU, what an engine takes then.
    """

    tokens: int
    activations: int
    training: int
    during_generation: int | None
    engine_share: float

    @property
    def smallest(self) -> int:
        """Return the least bytes that a GPU has to have."""
        kept = self.during_generation
        return max(self.training, 0 if kept is None else round(kept / (1 - self.engine_share)))


def plan_device_memory(config: RunConfig, memory: RunMemory) -> DeviceMemory:
    """Estimate it from the estimates of the models."""
    trained = [plan for plan in config.models.values() if plan.trained]
    tokens = training_tokens(config.policy, config.rows_per_sample)
    activations = max(activation_bytes(plan.policy, tokens) for plan in trained)
    turns = config.policy.generation.takes_turns and not config.cluster.on_cpu
    return DeviceMemory(
        tokens=tokens,
        activations=activations,
        training=memory.total + activations,
        during_generation=_kept_during_generation(config.policy, memory) if turns else None,
        engine_share=config.policy.generation.vllm_cfg.gpu_memory_utilization,
    )


def _kept_during_generation(policy: PolicyConfig, memory: RunMemory) -> int:
    """Bytes of the ranks while nothing is computed with them, so without logits."""
    kept = 0
    for model in memory.models.values():
        kept += model.reference
        kept += 0 if policy.offload == "all" else model.weights
        kept += model.gradients + model.optimizer if policy.offload == "none" else 0
    return kept


def activation_bytes(policy: PolicyConfig, tokens: int) -> int:
    """Bytes that a rank keeps of so many tokens of a microbatch for their backward pass, by its largest stage.

    Counted are the inputs of products, norms, attention and activation functions, with attention that keeps no scores
    (as in https://arxiv.org/abs/2205.05198, section 4, for layers of this kind). A first stage has as many microbatches
    under way as there are stages.
    """
    megatron, size = policy.megatron_cfg, WEIGHT_BYTES[policy.precision]
    tensor, stages = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    layers = megatron.largest_stage(policy.model.num_layers) * stages
    shared = tensor if megatron.sequence_parallel else 1
    kept, whole = _of_a_layer(policy, tensor, shared)
    if megatron.activation_checkpointing and megatron.recompute_granularity == "full":
        return round(size * tokens * (layers * policy.model.hidden_size / shared + whole))
    return round(size * tokens * (layers * kept + (whole - kept)))


def _of_a_layer(policy: PolicyConfig, tensor: int, shared: int) -> tuple[float, float]:
    """Numbers that a layer keeps of each token on a rank, and those that it has while it is computed."""
    model, megatron = policy.model, policy.megatron_cfg
    hidden, queries = model.hidden_size, model.head_dim * model.num_attention_heads
    keys = model.head_dim * model.query_groups
    # Residuals and norms before both parts; queries, keys, values, and what attention gives.
    outside = 4 * hidden / shared + (2 * queries + 2 * keys) / tensor
    inside, experts = _of_feed_forward(policy), _of_experts(policy)
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    again = (megatron.recompute_modules or ()) if selective else ()
    kept = outside
    kept += 0 if "mlp" in again or "moe" in again else inside / tensor
    kept += 0 if "moe" in again else experts / shared
    kept -= 2 * hidden / shared if "layernorm" in again else 0
    return kept, outside + inside / tensor + experts / shared


def _of_feed_forward(policy: PolicyConfig) -> int:
    """Numbers of a gated product: both halves of its input and what it gives; unfused, copies of both besides."""
    model = policy.model
    size = model.ffn_size if model.num_moe_experts is None else model.moe_shared_expert_intermediate_size or 0
    return (5 if policy.megatron_cfg.bias_activation_fusion is False else 3) * size


def _of_experts(policy: PolicyConfig) -> int:
    """Numbers of a token's copies at its experts: what they are given, and compute."""
    model = policy.model
    if model.num_moe_experts is None:
        return 0
    return model.moe_router_topk * (model.hidden_size + 3 * model.expert_ffn_size)
