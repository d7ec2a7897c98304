"""Everything that can be known about a run before Ray, torch or Megatron is imported."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem, as_yaml, value_at
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import ModelPlan, RunConfig
from nemo_rl_mcore.data.hub import require_whole_weights
from nemo_rl_mcore.data.tokenizer_folder import tokenizer_problems
from nemo_rl_mcore.driver.folders import folder_problems
from nemo_rl_mcore.driver.run_folder import init_checkpoint_problems
from nemo_rl_mcore.models.memory import RunMemory, estimate_memory
from nemo_rl_mcore.recipe.load import hidden
from nemo_rl_mcore.recipe.rules.model import FUSED_RULES
from nemo_rl_mcore.tools.check.chat_template import turn_problems, unread_variables
from nemo_rl_mcore.tools.check.data import DataPlan, data_warnings, examine_data, fetched
from nemo_rl_mcore.tools.check.machine import (
    agent_problems,
    gpu_problems,
    import_problems,
    layer_warnings,
    missing_packages,
    transformer_impl,
)
from nemo_rl_mcore.tools.check.memory import DeviceMemory, EnginesPlan, plan_device_memory, plan_engines

_BYTES_PER_TOKEN = 40
"""Of a sample in the driver, and where it is kept: ids, masks, log-probabilities, versions, as tensors."""


@dataclass(frozen=True)
class BatchArithmetic:
    """How the samples of a step are divided; where nothing is sampled, each has one given answer.

    With token budgets the numbers of microbatches and passes depend on the samples' lengths; the two given are those
    of samples as long as can be.
    """

    samples: int
    samples_per_rank: int
    optimizer_steps: int
    microbatches_per_optimizer_step: int
    logprob_passes: int


@dataclass(frozen=True)
class KeptGroups:
    """What the driver of an asynchronous run keeps at most; a group is the answers to one prompt.

    kept_groups: those that were trained on since the last checkpoint, where there are some. step_bytes, disk_bytes: on
    disk, for a replay: of a step, and of all at most; 0 where the run keeps none.
    """

    kept_groups: int
    driver_bytes: int
    step_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Plan:
    """The resolved run: what `check` prints and what the launcher goes by.

    asynchronous: None for a run that takes turns. device_memory: of a GPU; None on CPU. missing: what this machine
    lacks, and those of the run need not. fetched: data sets that the run fetches.
    """

    config: RunConfig
    transformer_impl: str
    batch: BatchArithmetic
    engines: EnginesPlan
    asynchronous: KeptGroups | None
    guardrails: tuple[tuple[str, bool], ...]
    memory: RunMemory
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
    """Resolve a run on paper; raises ConfigError for files and packages that are missing.

    `elsewhere` says that it is to run on other machines, which have the packages that the recipe asks for: what is
    missing on this one, and folders that it cannot write to, are then the plan's `missing`. So are checkpoints that
    another command may train before the run starts.
    `starts` says that it is to start here now, on the GPUs of this machine.
    `warnings` are those of loading the recipe, and stand in the plan before its own.
    Without `of_a_run`, which is for a checkpoint, the data set and the classes of the user's own are not looked for.
    """
    data, of_data = examine_data(config) if of_a_run else (None, [])
    started = [plan for plan in config.models.values() if of_a_run or plan.policy is config.policy]
    absent = [plan for plan in started if not Path(plan.policy.init_checkpoint or "/").exists()]
    untrained = tuple(dict.fromkeys(problem for plan in absent for problem in init_checkpoint_problems(plan)))
    missing = (
        *(folder_problems(config) if of_a_run else ()),
        *missing_packages(config),
        *(agent_problems(config) if of_a_run else ()),
    )
    of_layers = tuple(layer_warnings(config))
    problems = (
        *_file_problems(config, started),
        *(problem for problem in of_data if not problem.warns),
        *(import_problems(config.import_paths) if of_a_run else ()),
        *(() if elsewhere else missing),
        *(() if elsewhere or (of_a_run and not starts) else untrained),
        *(gpu_problems(config) if starts else ()),
    )
    if problems:
        raise ConfigError(hidden(problem, config.references) for problem in problems)
    memory = estimate_memory(config)
    return Plan(
        config=config,
        transformer_impl=transformer_impl(config, elsewhere=elsewhere),
        batch=_batch(config),
        engines=plan_engines(config),
        asynchronous=_kept_groups(config) if config.asynchronous else None,
        guardrails=tuple(_guardrails(config.policy)),
        memory=memory,
        device_memory=None if config.cluster.on_cpu else plan_device_memory(config, memory),
        data=data,
        steps=config.loop.max_num_steps if data is None else data.steps,
        missing=(*untrained, *missing, *(of_layers if elsewhere else ())),
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


def _batch(config: RunConfig) -> BatchArithmetic:
    policy, samples, ranks = config.policy, config.samples_per_step, config.data_parallel_size
    return BatchArithmetic(
        samples=samples,
        samples_per_rank=samples // ranks,
        optimizer_steps=samples // policy.train_global_batch_size,
        microbatches_per_optimizer_step=-(
            -policy.train_global_batch_size // (ranks * policy.train_micro_batch_size)
        ),
        logprob_passes=-(-(samples // ranks) // policy.logprob_batch_size),
    )


def _kept_groups(config: RunConfig) -> KeptGroups:
    saving, per_step = config.checkpointing, config.prompts_per_step
    steps = min(saving.save_period, config.loop.max_num_steps) if saving.enabled else 0
    group_bytes = config.generations_per_prompt * config.policy.max_total_sequence_length * _BYTES_PER_TOKEN
    step_bytes = per_step * group_bytes if config.keeps_groups else 0
    most = max(int(config.asynchrony.keep_groups_gb * 1e9), steps * step_bytes)
    return KeptGroups(
        kept_groups=steps * per_step,
        driver_bytes=(steps * per_step + config.max_live_groups) * group_bytes,
        step_bytes=step_bytes,
        disk_bytes=min(most, config.loop.max_num_steps * step_bytes),
    )


def _guardrails(policy: PolicyConfig) -> Iterator[tuple[str, bool]]:
    """Yield each key that the fused log-probabilities ask something of, with its value, and whether it is as asked."""
    for rule in FUSED_RULES if policy.megatron_cfg.use_fused_linear_logprobs else ():
        value = as_yaml(value_at(policy, rule.related[0]))
        yield f"policy.{rule.related[0]}: {value}", rule.problem(policy) is None


def _file_problems(config: RunConfig, started: Sequence[ModelPlan]) -> Iterator[Problem]:
    """Yield what is wrong with files of the tokenizer and of weights; those of the hub are fetched by the run."""
    yield from tokenizer_problems(config.policy)
    # Models that start from the same folder have the same problems with it.
    problems = dict[Problem, None]()
    for plan in started:
        if Path(plan.policy.init_checkpoint or "/").exists():
            problems |= dict.fromkeys(init_checkpoint_problems(plan))
    for plan in started:
        folder = plan.policy.model_name
        try:
            if folder is not None and Path(folder).is_dir():
                require_whole_weights(Path(folder))
        except ValueError as error:
            key, remedy = plan.key("policy.model_name"), "name a folder that holds the weights"
            problems[Problem("not-readable", key, str(error), remedy)] = None
    yield from problems
