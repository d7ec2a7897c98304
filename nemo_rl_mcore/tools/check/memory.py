"""Engines of a run in words, and memory: of engines, and of a GPU in the two halves of a step.

B bytes of a number, H hidden size, F feed-forward size, Q and K the sizes of all queries and of all keys, T tokens.
"""

from dataclasses import dataclass

from nemo_rl_mcore.config.generation import EmbeddedConfig
from nemo_rl_mcore.config.model import ATTENTION, EXPERTS, MAMBA, MLP
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.models import count_parameters, layer_slots, outside_of_layers
from nemo_rl_mcore.models.engine_sizes import refit_bucket_bytes
from nemo_rl_mcore.models.memory import WEIGHT_BYTES, RunMemory, training_tokens


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that an embedded engine takes, whatever the layout of the ranks: it is one process."""

    parameters: int
    weights: int
    buckets: int

    @property
    def total(self) -> int:
        """Return all of it."""
        return self.weights + self.buckets


@dataclass(frozen=True)
class ShareMemory:
    """The weights of the fullest process of a vLLM engine that has several: how many, and their bytes."""

    parameters: int
    weights: int


@dataclass(frozen=True)
class EnginesPlan:
    """The engines of a run, in words.

    memory: of each one, where it is embedded and not the ranks. share: of a process, where each engine has several.
    """

    where: str
    memory: EngineMemory | None = None
    share: ShareMemory | None = None


def plan_engines(config: RunConfig) -> EnginesPlan:
    """Say who answers; an offline run has an engine for its validation at most."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.decodes_on_ranks:
        return EnginesPlan("on the training ranks")
    if cluster.on_cpu:
        place = "in processes beside the ranks"
    elif generation.colocated.enabled:
        place = "on the ranks' GPUs in turn with them"
    else:
        place = "on GPUs beside those of the ranks"
    engine = generation.engine
    embedded = isinstance(engine, EmbeddedConfig)
    count = engine.engines if embedded else _vllm_engines(config)
    engines = f"{count} {engine.noun}{'s' if count != 1 else ''}"
    if embedded:
        return EnginesPlan(f"{engines}, {place}", _engine_memory(config.policy))
    size = generation.vllm_cfg.processes
    if size == 1:
        return EnginesPlan(f"{engines}, {place}")
    shared = cluster.on_cpu or generation.colocated.enabled
    per_node = cluster.workers_per_node if shared else generation.colocated.resources.gpus_per_node or size
    over = f" on {size // per_node} machines" if size > per_node else ""
    where = f"{engines} of {size} processes{over} each, {place}"
    return EnginesPlan(where, share=share_memory(config.policy))


def _vllm_engines(config: RunConfig) -> int:
    vllm, colocated = config.policy.generation.vllm_cfg, config.policy.generation.colocated
    if config.cluster.on_cpu:
        return vllm.cpu_engines
    resources = colocated.resources
    apart = (resources.gpus_per_node or 0) * (resources.num_nodes or 1)
    return (config.cluster.world_size if colocated.enabled else apart) // vllm.processes


def _engine_memory(policy: PolicyConfig) -> EngineMemory:
    parameters = count_parameters(policy.model)
    weights = parameters * WEIGHT_BYTES[policy.precision]
    return EngineMemory(parameters, weights, 2 * refit_bucket_bytes(policy))  # one is filled, one copied


def share_memory(policy: PolicyConfig) -> ShareMemory:
    """Estimate the fullest process of a vLLM engine; what tensor parallelism leaves whole, such as norms, is small."""
    model, vllm = policy.model, policy.generation.vllm_cfg
    outside, stages = outside_of_layers(model), vllm.pipeline_parallel_size
    layers = [sum(slot.count(model) for slot in layer_slots(model, at)) for at in range(model.num_layers)]
    first = outside.embedding.count(model)
    last = sum(slot.count(model) for slot in outside.of(model) if slot is not outside.embedding)
    ends = first + last if stages == 1 else max(first, last)
    of_stage = -(-len(layers) // stages)
    fullest = max(sum(layers[at : at + of_stage]) for at in range(len(layers) - of_stage + 1))
    parameters = -(-(fullest + ends) // vllm.tensor_parallel_size)
    of_each = 1 if vllm.precision == "fp8" else WEIGHT_BYTES[vllm.precision or policy.precision]
    return ShareMemory(parameters, parameters * of_each)


# A GPU

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
