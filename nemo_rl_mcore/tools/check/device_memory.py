"""Memory of a GPU in the two halves of a step: while ranks train, and while engines on the same GPUs generate.

B bytes of a number, H hidden size, F feed-forward size, Q and K the sizes of all queries and of all keys, T tokens.
"""

from dataclasses import dataclass

from nemo_rl_mcore.config.hybrid_layers import ATTENTION, EXPERTS, MAMBA, MLP
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models.memory import WEIGHT_BYTES, RunMemory, training_tokens
from nemo_rl_mcore.tools.check.engines import share_memory

_MODULES = {MLP: "mlp", EXPERTS: "moe"}
"""What Megatron calls the parts that can be computed again as a whole."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU, without what CUDA, NCCL and fragmentation take.

    activations: of the microbatches under way, of the model that has most. training: with all that the ranks keep.
    during_generation: what the ranks keep while engines generate on their GPUs; None where none do. engine_share: of a
    GPU, what an engine takes then, and engine_weights: the bytes of the weights that this has to hold.
    """

    tokens: int
    activations: int
    training: int
    during_generation: int | None
    engine_share: float
    engine_weights: int = 0

    @property
    def smallest(self) -> int:
        """Return the least bytes that a GPU has to have."""
        if self.during_generation is None:
            return self.training
        beside = round(self.during_generation / (1 - self.engine_share))
        return max(self.training, beside, round(self.engine_weights / self.engine_share))


def plan_device_memory(config: RunConfig, memory: RunMemory) -> DeviceMemory:
    """Estimate it from the estimates of the models."""
    trained = [plan for plan in config.models.values() if plan.trained]
    tokens = training_tokens(config)
    activations = max(activation_bytes(plan.policy, tokens) for plan in trained)
    turns = config.policy.generation.takes_turns and not config.cluster.on_cpu
    return DeviceMemory(
        tokens=tokens,
        activations=activations,
        training=memory.total + activations,
        during_generation=_kept_during_generation(config.policy, memory) if turns else None,
        engine_share=config.policy.generation.vllm_cfg.gpu_memory_utilization,
        engine_weights=share_memory(config.policy).weights if turns else 0,
    )


def _kept_during_generation(policy: PolicyConfig, memory: RunMemory) -> int:
    """Return the bytes of the ranks while nothing is computed with them, so without logits."""
    kept = 0
    for model in memory.models.values():
        kept += model.reference
        kept += 0 if policy.offload == "all" else model.weights
        kept += model.gradients + model.optimizer if policy.offload == "none" else 0
    return kept


def activation_bytes(policy: PolicyConfig, tokens: int) -> int:
    """Return bytes that a rank keeps of so many tokens of a microbatch for their backward pass, by its largest stage.

    Counted are the inputs of products, norms, attention and activation functions, with attention that keeps no scores
    (as in https://arxiv.org/abs/2205.05198, section 4, for layers of this kind). A first stage has as many microbatches
    under way as there are stages.
    """
    megatron, model, size = policy.megatron_cfg, policy.model, WEIGHT_BYTES[policy.precision]
    stages = megatron.pipeline_model_parallel_size
    layers = megatron.largest_stage(model.num_layers)
    kept, whole = zip(*(_of_layer(policy, layer) for layer in range(model.num_layers)), strict=True)
    if megatron.activation_checkpointing and megatron.recompute_granularity == "full":
        shared = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
        return round(size * tokens * (layers * stages * model.hidden_size / shared + max(whole)))
    of_stages = [sum(kept[first : first + layers]) for first in range(model.num_layers - layers + 1)]
    computed = max(of_whole - of_kept for of_whole, of_kept in zip(whole, kept, strict=True))
    return round(size * tokens * (stages * max(of_stages) + computed))


def _of_layer(policy: PolicyConfig, layer: int) -> tuple[float, float]:
    """Return the numbers that a layer keeps of each token on a rank, and those that it has while it is computed."""
    pattern = policy.model.hybrid_layer_pattern
    of_gpt = ATTENTION + (MLP if layer < policy.model.dense_layers else EXPERTS)
    kinds = of_gpt if pattern is None else pattern[layer]
    kept, whole = zip(*(_of_part(policy, kind) for kind in kinds), strict=True)
    return sum(kept), sum(whole)


def _of_part(policy: PolicyConfig, kind: str) -> tuple[float, float]:
    """Return the same of attention, of a feed-forward part, of experts or of Mamba, with the norm before it."""
    model, megatron = policy.model, policy.megatron_cfg
    tensor = megatron.tensor_model_parallel_size
    shared = tensor if megatron.sequence_parallel else 1
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    again = (megatron.recompute_modules or ()) if selective else ()
    outside = 2 * model.hidden_size / shared  # the residual and what the norm gives
    whole = outside + _inside(policy, kind, tensor, shared)
    kept = outside if _MODULES.get(kind) in again else whole
    kept -= model.hidden_size / shared if "layernorm" in again else 0
    return kept, whole


def _inside(policy: PolicyConfig, kind: str, tensor: int, shared: int) -> float:
    """Return the numbers of the part itself."""
    model = policy.model
    if kind == ATTENTION:
        if model.multi_latent_attention:
            latents = (model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim
            return 2 * (model.head_dim + model.value_dim) * model.num_attention_heads / tensor + 2 * latents
        # Queries, keys, values, and what attention gives.
        return 2 * model.head_dim * (model.num_attention_heads + model.query_groups) / tensor
    if kind == MAMBA:
        return _of_mamba(policy) / tensor
    if kind == MLP:
        return _of_feed_forward(policy, model.ffn_size) / tensor
    own = _of_feed_forward(policy, model.moe_shared_expert_intermediate_size or 0)
    return own / tensor + _of_experts(policy) / shared


def _of_feed_forward(policy: PolicyConfig, size: int) -> int:
    """Numbers of a gated product: both halves of its input and what it gives; unfused, copies of both besides."""
    if not policy.model.gated:
        return 2 * size
    return (5 if policy.megatron_cfg.bias_activation_fusion is False else 3) * size


def _of_mamba(policy: PolicyConfig) -> int:
    """Return the numbers of what is projected, of what is convolved, of what the scan gives, and of its norm."""
    model = policy.model
    keys = model.mamba_num_groups * model.mamba_state_dim
    return 5 * model.mamba_size + 4 * keys + (model.mamba_num_heads or 0)


def _of_experts(policy: PolicyConfig) -> int:
    """Return the numbers of a token's copies at its experts: what they are given, and compute."""
    model = policy.model
    of_one = model.expert_input_size + (3 if model.gated else 2) * model.expert_ffn_size
    return model.moe_router_topk * of_one + (model.moe_latent_size or 0)
