"""Everything that can be known about a run before Ray, torch or Megatron is imported."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.policy import PolicyConfig, TokenBudgets
from nemo_rl_mcore.config.prev_logprobs import source_of_prev_logprobs
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.run_models import ModelPlan
from nemo_rl_mcore.data.chat_template import turn_problems, unread_variables
from nemo_rl_mcore.data.tokenizer_folder import tokenizer_problems
from nemo_rl_mcore.data.weight_files import require_whole_weights
from nemo_rl_mcore.driver.data_files import DataPlan, data_warnings, examine_data, fetched
from nemo_rl_mcore.driver.folders import checkpoints_on_disk, folder_problems
from nemo_rl_mcore.driver.saved_run import init_checkpoint_problems
from nemo_rl_mcore.driver.warm_start import warm_start_problems
from nemo_rl_mcore.models.memory import RunMemory, estimate_memory, reference_place
from nemo_rl_mcore.recipe.load import hidden
from nemo_rl_mcore.recipe.rules import context_parallelism, packing
from nemo_rl_mcore.recipe.rules.fused_logprobs import Guardrail, fused_guardrails
from nemo_rl_mcore.tools.check.agents import agent_problems
from nemo_rl_mcore.tools.check.asynchronous import AsyncPlan, plan_asynchronous
from nemo_rl_mcore.tools.check.device_memory import DeviceMemory, plan_device_memory
from nemo_rl_mcore.tools.check.engines import EnginesPlan, plan_engines
from nemo_rl_mcore.tools.check.gpus import gpu_problems
from nemo_rl_mcore.tools.check.packages import (
    import_problems,
    layer_warnings,
    missing_packages,
    transformer_impl,
)
from nemo_rl_mcore.tools.check.subject import subject_of
from nemo_rl_mcore.tools.check.wandb_key import wandb_key_problems


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided."""

    device: str
    num_nodes: int
    workers_per_node: int
    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    sequence_parallel: bool
    transformer_impl: str


@dataclass(frozen=True)
class BatchArithmetic:
    """How the samples of a step are divided; where nothing is sampled, each has one given answer.

    With token budgets the numbers of microbatches and passes depend on the samples' lengths; the two given are those
    of samples as long as can be. prev_logprobs: what gives them, and why; None where nothing reads them.
    """

    prompts: int
    generations_per_prompt: int
    samples: int
    rows_per_sample: int
    samples_per_rank: int
    optimizer_steps: int
    microbatches_per_optimizer_step: int
    logprob_passes: int
    prev_logprobs: str | None
    token_budgets: TokenBudgets | None
    longest_prompt: int
    max_new_tokens: int
    max_sequence: int


@dataclass(frozen=True)
class Plan:
    """The resolved run: what `check` prints and what the launcher goes by.

    device_memory: of a GPU; None on CPU. subject: what is trained, name and value of each line.
    reference_policy: where its weights are kept; empty without one.
    """

    subject: tuple[tuple[str, str], ...]
    layout: Layout
    batch: BatchArithmetic
    engines: EnginesPlan
    asynchronous: AsyncPlan | None
    fused_logprobs: bool
    guardrails: tuple[Guardrail, ...]
    memory: RunMemory
    device_memory: DeviceMemory | None
    data: DataPlan | None
    steps: int
    reference_policy: str
    log_dir: str
    checkpoints: str
    missing: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    fetched: tuple[str, ...] = ()


def preflight(
    config: RunConfig,
    *,
    elsewhere: bool = False,
    of_a_run: bool = True,
    starts: bool = False,
    warnings: tuple[Problem, ...] = (),
) -> Plan:
    """Resolve a run on paper; raises ConfigError for files and packages that are missing.

    `elsewhere` says that it is to run on other machines, which have the packages that the recipe asks for: what is
    missing on this one, and folders that it cannot write to, are then the plan's `missing`.
    `starts` says that it is to start here now, on the GPUs of this machine.
    `warnings` are those of loading the recipe, and stand in the plan before its own.
    Without `of_a_run`, which is for a checkpoint, the data set and the classes of the user's own are not looked for.
    """
    data, of_data = examine_data(config) if of_a_run else (None, [])
    missing = (
        *(folder_problems(config) if of_a_run else ()),
        *missing_packages(config),
        *(wandb_key_problems(config, os.environ) if of_a_run else ()),
        *(agent_problems(config) if of_a_run else ()),
    )
    of_layers = tuple(layer_warnings(config))
    problems = (
        *_environment_problems(config, of_a_run),
        *(problem for problem in of_data if not problem.warns),
        *(import_problems(config.import_paths) if of_a_run else ()),
        *(() if elsewhere else missing),
        *(gpu_problems(config) if starts else ()),
    )
    if problems:
        raise ConfigError(hidden(problem, config.references) for problem in problems)
    memory = estimate_memory(config)
    return Plan(
        subject=tuple(subject_of(config, data.first if data else ())),
        layout=_layout(config, elsewhere=elsewhere),
        batch=_batch(config),
        engines=plan_engines(config),
        asynchronous=plan_asynchronous(config),
        fused_logprobs=config.policy.megatron_cfg.use_fused_linear_logprobs,
        guardrails=tuple(_guardrails(config.policy)),
        memory=memory,
        device_memory=None if config.cluster.on_cpu else plan_device_memory(config, memory),
        data=data,
        steps=config.loop.max_num_steps if data is None else data.steps,
        reference_policy=reference_place(config),
        log_dir=config.logger.log_dir,
        checkpoints=checkpoints_on_disk(config),
        missing=(*missing, *(of_layers if elsewhere else ())),
        warnings=(
            *warnings,
            *(problem for problem in of_data if problem.warns),
            *data_warnings(data),
            *unread_variables(config),
            *turn_problems(config),
            *(() if elsewhere else of_layers),
        ),
        fetched=tuple(fetched(config)) if of_a_run else (),
    )


def _guardrails(policy: PolicyConfig) -> Iterator[Guardrail]:
    if policy.megatron_cfg.use_fused_linear_logprobs:
        yield from fused_guardrails(policy)
        yield packing.fused_guardrail(policy)
        yield context_parallelism.fused_guardrail(policy)


def _layout(config: RunConfig, *, elsewhere: bool) -> Layout:
    cluster, megatron = config.cluster, config.policy.megatron_cfg
    return Layout(
        device="CPU (gloo)" if cluster.on_cpu else "GPU (NCCL)",
        num_nodes=cluster.num_nodes,
        workers_per_node=cluster.workers_per_node,
        world_size=cluster.world_size,
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        data=config.data_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
        transformer_impl=transformer_impl(config, elsewhere=elsewhere),
    )


def _batch(config: RunConfig) -> BatchArithmetic:
    policy, loop, samples, ranks = (
        config.policy,
        config.loop,
        config.samples_per_step,
        config.data_parallel_size,
    )
    generations = loop.num_generations_per_prompt if isinstance(loop, RolloutConfig) else 1
    per_rank = samples // ranks
    per_pass = ranks * policy.train_micro_batch_size
    return BatchArithmetic(
        prompts=samples // generations,
        generations_per_prompt=generations,
        samples=samples,
        rows_per_sample=config.rows_per_sample,
        samples_per_rank=per_rank,
        optimizer_steps=samples // policy.train_global_batch_size,
        microbatches_per_optimizer_step=-(-policy.train_global_batch_size // per_pass),
        logprob_passes=-(-per_rank // policy.logprob_batch_size),
        prev_logprobs=source_of_prev_logprobs(config),
        token_budgets=policy.token_budgets,
        longest_prompt=config.max_prompt_length,
        max_new_tokens=policy.generation.max_new_tokens,
        max_sequence=policy.max_total_sequence_length,
    )


def _environment_problems(config: RunConfig, of_a_run: bool) -> Iterator[Problem]:
    policy = config.policy
    yield from tokenizer_problems(policy)
    # Models that start from the same folder have the same problems with it.
    started = [plan for plan in config.models.values() if of_a_run or plan.policy is policy]
    yield from dict.fromkeys(problem for plan in started for problem in init_checkpoint_problems(plan))
    yield from dict.fromkeys(problem for plan in started for problem in _folder_problems(plan))
    yield from warm_start_problems(config)


def _folder_problems(plan: ModelPlan) -> Iterator[Problem]:
    """Yield what is wrong with the files of weights in a local folder; those of the hub are fetched by the run."""
    folder = plan.policy.model_name
    if folder is None or not Path(folder).is_dir():
        return
    try:
        require_whole_weights(Path(folder))
    except ValueError as error:
        key, remedy = plan.key("policy.model_name"), "name a folder that holds the weights"
        yield Problem("not-readable", key, str(error), remedy)
