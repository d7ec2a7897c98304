"""Plans a run without importing Ray, torch or Megatron: batches, engines, memory, problems.

Memory estimates count elements (weights, activations), or bytes if the name or docstring says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem, as_yaml, value_at
from nemo_rl_mcore.config.model import ATTENTION, EXPERTS, MAMBA, MLP
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import KEPT_BYTES, RunConfig
from nemo_rl_mcore.data.hub import require_whole_weights
from nemo_rl_mcore.driver.run_folder import folder_problems, init_checkpoint_problems
from nemo_rl_mcore.models import count_parameters, layer_slots, outside_of_layers
from nemo_rl_mcore.models.memory import (
    WEIGHT_BYTES,
    MemoryEstimate,
    estimate_memory,
    microbatch_tokens,
    refit_bucket_bytes,
)
from nemo_rl_mcore.models.weights import linear_projected
from nemo_rl_mcore.recipe.load import hidden
from nemo_rl_mcore.recipe.rules.model import FUSED_RULES
from nemo_rl_mcore.tools.check.data import (
    DataPlan,
    examine_data,
    fetched,
    tokenizer_problems,
    turn_problems,
    unread_variables,
)
from nemo_rl_mcore.tools.check.machine import (
    agent_problems,
    gpu_problems,
    import_problems,
    layer_warnings,
    missing_packages,
    transformer_impl,
)

_BYTES_PER_TOKEN = 40
"""Size of a sample's token in the driver and on disk: ids, masks, log-probabilities and versions, as tensors."""


@dataclass(frozen=True)
class BatchArithmetic:
    """The division of a step's samples; a sample of given answers counts as one.

    With token budgets, the numbers of microbatches and passes are those of samples of maximal length.
    """

    samples: int
    samples_per_rank: int
    optimizer_steps: int
    microbatches_per_optimizer_step: int
    logprob_passes: int

    @classmethod
    def of(cls, config: RunConfig) -> BatchArithmetic:
        policy, samples, ranks = config.policy, config.samples_per_step, config.data_parallel_size
        per_pass = ranks * policy.train_micro_batch_size
        return cls(
            samples=samples,
            samples_per_rank=samples // ranks,
            optimizer_steps=samples // policy.train_global_batch_size,
            microbatches_per_optimizer_step=-(-policy.train_global_batch_size // per_pass),
            logprob_passes=-(-(samples // ranks) // policy.logprob_batch_size),
        )


@dataclass(frozen=True)
class KeptGroups:
    """The most groups that an asynchronous run's driver keeps; a group is the answers to one prompt.

    kept_groups: trained since the last checkpoint. step_bytes, disk_bytes: on disk for a replay, per step and in
    total; 0 if the run keeps none.
    """

    kept_groups: int
    driver_bytes: int
    step_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, config: RunConfig) -> KeptGroups:
        saving, per_step = config.checkpointing, config.prompts_per_step
        steps = min(saving.save_period, config.loop.max_num_steps) if saving.enabled else 0
        policy = config.policy
        token_bytes = _BYTES_PER_TOKEN + policy.router_replay.enabled * policy.model.route_bytes
        group_bytes = config.generations_per_prompt * policy.max_total_sequence_length * token_bytes
        step_bytes = per_step * group_bytes if config.asynchronous else 0
        return cls(
            kept_groups=steps * per_step,
            driver_bytes=(steps * per_step + config.group_limits.live) * group_bytes,
            step_bytes=step_bytes,
            disk_bytes=min(max(KEPT_BYTES, steps * step_bytes), config.loop.max_num_steps * step_bytes),
        )


@dataclass(frozen=True)
class ProcessMemory:
    """An engine process's number of weights, their bytes, and those of the buckets that deliver new ones."""

    parameters: int
    weights: int
    buckets: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.buckets


@dataclass(frozen=True)
class EnginesPlan:
    """A run's engines; where: their place, in words.

    memory: each separate embedded engine's. share: that of a vLLM engine's fullest process, if it has several.
    """

    where: str
    memory: ProcessMemory | None = None
    share: ProcessMemory | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a GPU, without CUDA, NCCL and fragmentation.

    activations: of the microbatches in flight, for the model that has the most. training: everything on the ranks.
    during_generation: bytes kept by ranks while engines generate on their GPUs; None if none do. engine_share: an
    engine's share of the GPU then. smallest: the least memory that a GPU needs.
    """

    tokens: int
    activations: int
    training: int
    during_generation: int | None
    engine_share: float
    smallest: int


@dataclass(frozen=True)
class Plan:
    """The resolved run that `check` prints.

    asynchronous: None for a synchronous run. device_memory: None on CPU. missing: problems of this machine that the
    run's machines may not have. fetched: data sets that the run fetches.
    """

    config: RunConfig
    transformer_impl: str
    batch: BatchArithmetic
    engines: EnginesPlan
    asynchronous: KeptGroups | None
    guardrails: tuple[tuple[str, bool], ...]
    memory: Mapping[str, MemoryEstimate]
    device_memory: DeviceMemory | None
    data: DataPlan | None
    steps: int
    missing: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    fetched: tuple[str, ...]


def preflight(
    config: RunConfig,
    *,
    elsewhere: bool = False,
    of_a_run: bool = True,
    starts: bool = False,
    warnings: tuple[Problem, ...] = (),
) -> Plan:
    """Plan a run without starting it; raises ConfigError for missing files and packages.

    elsewhere: it will run on other machines: packages missing here, and folders that cannot be written, only go into
    the plan's `missing`, like checkpoints that another command may still train. starts: the run starts now, on this
    machine's GPUs. of_a_run: False for commands on a checkpoint: the data set and the user's classes are not checked.
    warnings: from loading the recipe; the plan's own follow.
    """
    data, of_data = examine_data(config) if of_a_run else (None, [])
    of_weights, untrained = _weight_problems(config, of_a_run=of_a_run)
    missing, of_layers = [*missing_packages(config)], tuple(layer_warnings(config))
    if of_a_run:
        missing = [*folder_problems(config), *missing, *agent_problems(config)]
    problems = [*tokenizer_problems(config.policy), *of_weights]
    problems += [problem for problem in of_data if not problem.warns]
    problems += import_problems(config.import_paths) if of_a_run else ()
    problems += () if elsewhere else missing
    problems += () if elsewhere or (of_a_run and not starts) else untrained
    problems += gpu_problems(config) if starts else ()
    if problems:
        raise ConfigError(hidden(problem, config.references) for problem in problems)
    warned = [*warnings, *(problem for problem in of_data if problem.warns)]
    warned += [*(() if data is None else data.warnings), *unread_variables(config), *turn_problems(config)]
    warned += () if elsewhere else of_layers
    memory, policy = estimate_memory(config), config.policy
    rules = FUSED_RULES if policy.megatron_cfg.use_fused_linear_logprobs else ()
    settings = [f"policy.{rule.related[0]}: {as_yaml(value_at(policy, rule.related[0]))}" for rule in rules]
    return Plan(
        config=config,
        transformer_impl=transformer_impl(config, elsewhere=elsewhere),
        batch=BatchArithmetic.of(config),
        engines=plan_engines(config),
        asynchronous=KeptGroups.of(config) if config.asynchronous else None,
        guardrails=tuple(zip(settings, [rule.problem(policy) is None for rule in rules], strict=True)),
        memory=memory,
        device_memory=None if config.cluster.on_cpu else plan_device_memory(config, memory),
        data=data,
        steps=config.loop.max_num_steps if data is None else data.steps,
        missing=(*untrained, *missing, *(of_layers if elsewhere else ())),
        warnings=tuple(warned),
        fetched=tuple(fetched(config)) if of_a_run else (),
    )


def _weight_problems(config: RunConfig, *, of_a_run: bool) -> tuple[list[Problem], list[Problem]]:
    """Return problems of existing weights, and missing checkpoints, without repeats for several models."""
    started = [plan for plan in config.models.values() if of_a_run or plan.policy is config.policy]
    of_weights, untrained = dict[Problem, None](), dict[Problem, None]()
    for plan in started:
        there = Path(plan.policy.init_checkpoint or "/").exists()
        (of_weights if there else untrained).update(dict.fromkeys(init_checkpoint_problems(plan)))
    for plan in started:
        folder = plan.policy.model_name
        try:
            if folder is not None and Path(folder).is_dir():  # the run fetches a model from the hub
                require_whole_weights(Path(folder))
        except ValueError as error:
            key, remedy = plan.key("policy.model_name"), "name a folder that holds the weights"
            of_weights[Problem("not-readable", key, str(error), remedy)] = None
    return [*of_weights], [*untrained]


# Engines


def plan_engines(config: RunConfig) -> EnginesPlan:
    """Describe the engines; without rollouts, at most validation uses them."""
    generation, cluster, policy = config.policy.generation, config.cluster, config.policy
    if generation.decodes_on_ranks:
        return EnginesPlan("on the training ranks")
    colocated, resources = generation.colocated.enabled, generation.colocated.resources
    if cluster.on_cpu:
        place = "in processes beside the ranks"
    elif colocated:
        place = "on the ranks' GPUs, taking turns"
    else:
        place = "on GPUs beside those of the ranks"
    embedded, size = generation.backend == "embedded", generation.vllm_cfg.processes
    if embedded or cluster.on_cpu:
        count = generation.engines
    else:
        apart = (resources.gpus_per_node or 0) * (resources.num_nodes or 1)
        count = (cluster.world_size if colocated else apart) // size
    engines = f"{count} {'embedded' if embedded else 'vLLM'} engine{'s' if count != 1 else ''}"
    if embedded:
        parameters = count_parameters(policy.model)
        weights = parameters * WEIGHT_BYTES[policy.precision]
        buckets = 2 * refit_bucket_bytes(policy)  # one is filled, one copied
        return EnginesPlan(f"{engines}, {place}", ProcessMemory(parameters, weights, buckets))
    if size == 1:
        return EnginesPlan(f"{engines}, {place}")
    per_node = cluster.workers_per_node if cluster.on_cpu or colocated else resources.gpus_per_node or size
    over = f" on {size // per_node} machines" if size > per_node else ""
    return EnginesPlan(f"{engines} of {size} processes{over} each, {place}", share=_share_memory(policy))


def _share_memory(policy: PolicyConfig) -> ProcessMemory:
    """Estimate a vLLM engine's fullest process, ignoring the small parts that tensor parallelism does not divide."""
    model, vllm = policy.model, policy.generation.vllm_cfg
    outside, stages = outside_of_layers(model), vllm.pipeline_parallel_size
    layers = [sum(slot.count(model) for slot in layer_slots(model, at)) for at in range(model.num_layers)]
    first = outside.embedding.count(model)
    last = sum(slot.count(model) for slot in outside.of(model) if slot is not outside.embedding)
    ends = first + last if stages == 1 else max(first, last)
    of_stage = -(-len(layers) // stages)
    fullest = max(sum(layers[at : at + of_stage]) for at in range(len(layers) - of_stage + 1))
    parameters = -(-(fullest + ends) // vllm.tensor_parallel_size)
    of_each = 1 if vllm.quantizes else WEIGHT_BYTES[vllm.precision or policy.precision]
    return ProcessMemory(parameters, parameters * of_each)


# A GPU


def plan_device_memory(config: RunConfig, memory: Mapping[str, MemoryEstimate]) -> DeviceMemory:
    """Estimate a GPU's memory during training and generation, from the models' estimates."""
    tokens, policy, during_generation = microbatch_tokens(config, config.policy)[0], config.policy, None
    activations = max(
        activation_bytes(plan.policy, tokens) for plan in config.models.values() if plan.trained
    )
    training = smallest = sum(model.total for model in memory.values()) + activations
    share = policy.generation.vllm_cfg.gpu_memory_utilization
    if policy.generation.takes_turns and not config.cluster.on_cpu:
        during_generation = 0  # ranks compute nothing then, so there are no logits
        for model in memory.values():
            during_generation += model.reference
            during_generation += 0 if policy.offload == "all" else model.weights
            during_generation += model.gradients + model.optimizer if policy.offload == "none" else 0
        beside = round(during_generation / (1 - share))
        smallest = max(training, beside, round(_share_memory(policy).weights / share))
    return DeviceMemory(tokens, activations, training, during_generation, share, smallest)


def activation_bytes(policy: PolicyConfig, tokens: int) -> int:
    """Return the bytes that a rank of the largest stage keeps for the backward pass of a microbatch of `tokens`.

    Counted are the inputs of matrix products, norms, attention and activation functions; attention keeps no scores
    (compare https://arxiv.org/abs/2205.05198, section 4). The first stage has as many microbatches in flight as there
    are stages.
    """
    megatron, model, size = policy.megatron_cfg, policy.model, WEIGHT_BYTES[policy.precision]
    stages = megatron.pipeline_model_parallel_size
    layers = megatron.largest_stage(model.num_layers)
    shared = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    selective = megatron.activation_checkpointing and megatron.recompute_granularity == "selective"
    again = (megatron.recompute_modules or ()) if selective else ()
    modules = {MLP: "mlp", EXPERTS: "moe"}  # Megatron's names for parts that are recomputed as a whole
    kept, whole = list[float](), list[float]()
    for layer in range(model.num_layers):
        of_gpt = ATTENTION + (MLP if layer < model.shape.dense_layers else EXPERTS)
        kept.append(0.0)
        whole.append(0.0)
        for kind in of_gpt if model.hybrid_layer_pattern is None else model.hybrid_layer_pattern[layer]:
            outside = 2 * model.hidden_size / shared  # the residual and the norm's output
            inside = (
                _in_delta_net(policy)
                if kind == ATTENTION and model.is_linear(layer)
                else _inside(policy, kind)
            )
            of_part = outside + inside
            whole[layer] += of_part
            norm = model.hidden_size / shared if "layernorm" in again else 0
            kept[layer] += (outside if modules.get(kind) in again else of_part) - norm
    if megatron.activation_checkpointing and megatron.recompute_granularity == "full":
        return round(size * tokens * (layers * stages * model.hidden_size / shared + max(whole)))
    of_stages = [sum(kept[first : first + layers]) for first in range(model.num_layers - layers + 1)]
    computed = max(of_whole - of_kept for of_whole, of_kept in zip(whole, kept, strict=True))
    return round(size * tokens * (stages * max(of_stages) + computed))


def _in_delta_net(policy: PolicyConfig) -> float:
    """Return the elements kept per token: projections, convolutions, the rule's output, its norm and the gate."""
    (convolved, (values,), *_), tensor = (
        linear_projected(policy.model),
        policy.megatron_cfg.tensor_model_parallel_size,
    )
    return (2 * sum(convolved) + 4 * values) / tensor


def _inside(policy: PolicyConfig, kind: str) -> float:
    """Return the elements kept per token in attention, a feed-forward part, experts or Mamba, on one rank."""
    model, megatron, shape = policy.model, policy.megatron_cfg, policy.model.shape
    tensor = megatron.tensor_model_parallel_size
    if kind == ATTENTION and model.kv_lora_rank is not None:
        latents = (model.q_lora_rank or 0) + (model.kv_lora_rank or 0) + model.qk_pos_emb_head_dim
        return 2 * (shape.head_dim + model.v_head_dim) * model.num_attention_heads / tensor + 2 * latents
    if kind == ATTENTION:
        # Queries, keys, values, and attention's output.
        gates = 0 if model.linear_attention_freq is None else 2 * model.num_attention_heads * shape.head_dim
        of_heads = model.num_attention_heads + max(shape.query_groups, tensor)
        return (2 * shape.head_dim * of_heads + gates) / tensor
    if kind == MAMBA:
        # Projections, convolutions, the scan's output, and its norm.
        keys = model.mamba_num_groups * model.mamba_state_dim
        return (5 * shape.mamba_size + 4 * keys + (model.mamba_num_heads or 0)) / tensor
    # A gated product keeps both halves of its input and its output; unfused, also copies of both halves.
    halves = 5 if megatron.bias_activation_fusion is False else 3
    of_each = halves if shape.gated else 2
    if kind == MLP:
        return of_each * shape.ffn_size / tensor
    own = of_each * (model.moe_shared_expert_intermediate_size or 0)
    # Inputs and outputs of a token's experts.
    products = 3 if shape.gated else 2
    of_one = (model.moe_latent_size or model.hidden_size) + products * shape.expert_ffn_size
    experts = model.moe_router_topk * of_one + (model.moe_latent_size or 0)
    return own / tensor + experts / (tensor if megatron.sequence_parallel else 1)
