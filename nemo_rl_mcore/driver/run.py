"""The composition root, which builds a run's ranks, data and observers from a checked recipe."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nemo_rl_mcore.agents.endpoint import AgentCollector, Endpoint
from nemo_rl_mcore.config import (
    DistillationMasterConfig,
    DPOMasterConfig,
    GRPOMasterConfig,
    ModelPlan,
    PPOMasterConfig,
    RunConfig,
    SFTMasterConfig,
)
from nemo_rl_mcore.config.cluster import seconds_of
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver.actors.one_process import OneProcess
from nemo_rl_mcore.driver.actors.places import agent_environment, given_variables
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepObserver
from nemo_rl_mcore.driver.algorithms.distillation import DistillationTrainer
from nemo_rl_mcore.driver.algorithms.dpo import DPOTrainer
from nemo_rl_mcore.driver.algorithms.engine_comparison import compare_at_start, rows_to_compare
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer
from nemo_rl_mcore.driver.algorithms.loop import TrainingLoop
from nemo_rl_mcore.driver.algorithms.ppo import PPOTrainer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints, open_checkpoints
from nemo_rl_mcore.driver.algorithms.sft import SFTTrainer
from nemo_rl_mcore.driver.observability import RunFacts, RunRecorder
from nemo_rl_mcore.driver.output import count_of, write_line
from nemo_rl_mcore.driver.parts import Parts, open_parts, run_stopping, stop_ids_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, Policy, open_place
from nemo_rl_mcore.driver.rollouts.player import (
    Environments,
    EnvironmentsByName,
    GenerationInterface,
    RolloutCollector,
)
from nemo_rl_mcore.driver.rollouts.saved import SavedRollouts
from nemo_rl_mcore.driver.rollouts.scheduler import Scheduler
from nemo_rl_mcore.driver.rollouts.start import open_rollouts, read_saved
from nemo_rl_mcore.driver.run_folder import leave_recipe, run_folders
from nemo_rl_mcore.driver.signals import current_stop_signals, exit_status
from nemo_rl_mcore.engine.kinds import engine_kind
from nemo_rl_mcore.environment.interface import Environment, LocalEnvironments

if TYPE_CHECKING:
    from nemo_rl_mcore.driver.actors.cluster import RayCluster
    from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration


def run(config: RunConfig, write_page: Callable[[Path], object] | None = None) -> int:
    """Run the recipe and return its `exit_status`. write_page: writes a page about the run's folder.

    However the run ends, its ranks are stopped, and the metrics and the report include every finished step.
    """
    steps = train(config, watch=Watch(write_page))
    return exit_status(lambda: deque(steps, maxlen=0))  # to its end


@dataclass(eq=False)
class Watch:
    """Observes, and may replace, a run's parts as they start; the base class does neither.

    write_page: writes a page about the run's folder at the end. summary: True to print samples and file paths then.
    """

    write_page: Callable[[Path], object] | None = None
    summary: ClassVar[bool] = True

    def model(self, name: str, model: Policy) -> Policy:
        """Return the model that the algorithm uses in place of one of the run's models."""
        return model

    def engine(self, engine: GenerationInterface) -> None:
        """Observe the engine that answers."""


_NOBODY_WATCHES = Watch()


def train(
    config: RunConfig,
    *,
    session: RayCluster | None = None,
    watch: Watch = _NOBODY_WATCHES,
    refuse_changes: bool = False,
) -> Generator[Mapping[str, float]]:
    """Run the recipe, and yield each step's row of metrics.jsonl, with `step`, as it ends.

    session: a started session for the ranks; by default the run starts its own. refuse_changes: see `open_checkpoints`.
    Nothing starts before the first row is requested. A generator that is closed early saves the last finished step, as
    after a signal. Raises ConfigError and RunStoppedError.
    """
    parts = open_parts(config)
    config = parts.config
    with run_folders(config):
        checkpoints = open_checkpoints(
            config,
            lambda line: write_line(sys.stdout, line),
            parts.tokenizer,
            refuse_changes=refuse_changes,
            ended_by=parts.ended_by,
        )
        if checkpoints.nothing_left:
            return
        try:
            current_stop_signals().limit_time(seconds_of(config.checkpointing.checkpoint_must_save_by))
            saved = read_saved(config, checkpoints.start)
            recorder = RunRecorder(
                config.logger,
                config.loop.max_num_steps,
                run=RunFacts(config.algorithm, config.model_dump(mode="json"), checkpoints.resumed_step),
                write_page=watch.write_page,
                summary=watch.summary,
            )
            with ExitStack() as outside:
                outside.callback(torch.set_num_threads, torch.get_num_threads())
                if config.cluster.on_cpu:  # idle threads would busy-wait on the ranks' cores
                    torch.set_num_threads(1)
                if session is not None:  # of a command's runs, which handles its servers and processes
                    cluster = session.shared_with(config.cluster)
                elif isinstance(cluster := open_place(config, engines=not config.in_process), OneProcess):
                    outside.enter_context(cluster)
                else:
                    with recorder.startup("ray", "starting Ray"):
                        outside.enter_context(cluster)
                leave_recipe(config)
                with ExitStack() as stack:
                    yield from _train(parts, cluster, checkpoints, recorder, stack, saved, watch)
        except BaseException as error:
            error.add_note(checkpoints.standing())
            raise


def _train(
    parts: Parts,
    cluster: OneProcess | RayCluster,
    checkpoints: RunCheckpoints,
    recorder: RunRecorder,
    stack: ExitStack,
    saved: SavedRollouts | None,
    watch: Watch,
) -> Generator[Mapping[str, float]]:
    """Start ranks, engine and recorder, which the stack closes, and train. saved: the checkpoint's rollouts."""
    config, tokenizer = parts.config, parts.tokenizer

    def start(plan: ModelPlan, colocated_with: Policy | None = None) -> Policy:
        ranks = count_of(cluster.config.world_size, "rank")
        with recorder.startup(plan.name, f"starting {ranks} of the {plan.name}") as pieces:
            model = start_model(plan, config, cluster, colocated_with)
            stack.enter_context(model)
            if loading_s := model.loading_s():
                pieces[f"{plan.name}_loading_weights"] = loading_s
        return model

    fetch_weights(config)
    of_policy, *others = config.models.values()
    policy = start(of_policy)
    stack.enter_context(recorder)
    first_step = (checkpoints.resumed_step or 0) + 1
    first_prompts = partial(parts.prompts.train_batch, first_step, config.prompts_per_step)
    opened = open_generation(config, tokenizer, policy, cluster, first_prompts, recorder.startup)
    generation = stack.enter_context(opened)
    watch.engine(generation)
    environments = stack.enter_context(open_environments(config, cluster, parts.environments))
    collector = stack.enter_context(open_collector(parts, generation, environments))
    scheduler: Scheduler[Any] | None = None
    if config.generations_per_prompt:
        opened = open_rollouts(
            config, generation, parts.prompts, collector, first_step - 1, saved, checkpoints.extra_parts
        )
        generation = scheduler = stack.enter_context(opened)
        collector = replace(collector, generation=scheduler)
    models = {of_policy.name: policy, **{plan.name: start(plan, policy) for plan in others}}
    models = {name: watch.model(name, model) for name, model in models.items()}
    algorithm = algorithm_of(parts, models, collector, recorder, scheduler)
    trained = {name: model for name, model in models.items() if config.models[name].trained}
    frozen = {name: model for name, model in models.items() if name not in trained}
    loop = TrainingLoop(config, algorithm, trained, generation, recorder, checkpoints, frozen)
    for _ in loop.steps():
        yield recorder.last_row


def algorithm_of(
    parts: Parts,
    models: Mapping[str, Policy],
    collector: RolloutCollector,
    observer: StepObserver,
    rollouts: Scheduler[Any] | None,
) -> Algorithm[Any]:
    config, prompts = parts.config, parts.prompts
    common = models["policy"], collector, prompts, observer
    match config:
        case GRPOMasterConfig():
            return GRPOTrainer(config, *common, rollouts=rollouts)
        case PPOMasterConfig():
            return PPOTrainer(config, *common, critic=models["value"], rollouts=rollouts)
        case DPOMasterConfig():
            pairs = (
                PreferenceSource(prompts, parts.tokenizer, config.data.embedded)
                if config.dpo.num_generations_per_prompt is None
                else None
            )
            return DPOTrainer(config, *common, pairs=pairs, rollouts=rollouts)
        case SFTMasterConfig():
            return SFTTrainer(config, *common)
        case DistillationMasterConfig():
            return DistillationTrainer(config, *common, teacher=models["teacher"], rollouts=rollouts)
        case _:
            raise NotImplementedError(config.algorithm)


def fetch_weights(config: RunConfig) -> None:
    """Fetch the initial weights of a run's models; raise RunStoppedError on failure."""
    with run_stopping():
        for plan in config.models.values():
            if plan.policy.model_name is not None:
                fetched_folder(plan.policy.model_name)


def start_model(
    plan: ModelPlan, config: RunConfig, cluster: OneProcess | RayCluster, colocated_with: Policy | None = None
) -> Policy:
    return Policy(
        plan.policy,
        cluster,
        name=plan.name,
        seed=config.seed,
        # All of the run's models have the same temperature, since their log-probabilities are compared.
        temperature=config.logprob_temperature,
        init_reference_model=plan.reference,
        role=plan.role,
        trained=plan.trained,
        colocated_with=colocated_with,
    )


@contextmanager
def open_generation(
    config: RunConfig,
    tokenizer: Tokenizer,
    policy: Policy,
    cluster: OneProcess | RayCluster,
    first_prompts: Callable[[], Sequence[Prompt]],
    startup: Callable[[str, str], AbstractContextManager[object]],
) -> Iterator[GenerationInterface]:
    """Open the recipe's engine; the end of the block ends engines outside the ranks.

    first_prompts: returns prompts on which such engines are first compared with the ranks. startup: a context manager
    around a part of the start, called with the part's name and its text for the terminal.
    """
    stop_ids = stop_ids_of(config, tokenizer)
    if config.policy.generation.decodes_on_ranks:
        yield EmbeddedGeneration(policy, stop_ids)
        return

    assert not isinstance(cluster, OneProcess)
    # Brings in Ray, as do the imports below.
    from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration

    kind = engine_kind(config)

    def compare(engines: EngineGeneration) -> None:
        with startup("comparison", f"comparing the {kind.noun}s with the ranks"):
            rows = rows_to_compare(config, first_prompts(), tokenizer)
            agreement = compare_at_start(config, policy, engines, rows)
        write_line(sys.stdout, agreement)

    with EngineGeneration(
        kind,
        config.policy,
        cluster,
        policy,
        stop_ids=stop_ids,
        seed=config.seed,
        starting=partial(startup, "engines", f"starting {count_of(kind.engines, kind.noun)}"),
        check=compare if config.policy.generation.compare_at_start else None,
    ) as engines:
        yield engines


@contextmanager
def open_collector(
    parts: Parts, generation: GenerationInterface, environments: Environments
) -> Generator[RolloutCollector]:
    """Yield the episode player: the turn loop, or agents behind an endpoint, which is open during the block."""
    config = parts.config
    collector = RolloutCollector(
        generation,
        parts.tokenizer,
        config.max_prompt_length,
        environments,
        form=parts.form,
        max_drop_rate=config.env.pool.max_drop_rate,
    )
    if config.env.endpoint is None:
        yield collector
        return
    from nemo_rl_mcore.driver.actors.cluster import marked_processes

    variables = agent_environment(os.environ) | given_variables(config.env.pool)
    stop_ids = stop_ids_of(config, parts.tokenizer)
    with (
        marked_processes() as mark,
        Endpoint(config, parts.tokenizer, stop_ids, variables | mark) as endpoint,
    ):
        yield AgentCollector(**vars(collector), endpoint=endpoint, judges=bool(config.env.given))


@contextmanager
def open_environments(
    config: RunConfig, cluster: OneProcess | RayCluster, environments: Mapping[str, Environment]
) -> Iterator[EnvironmentsByName]:
    """Open the environments, in this process or in actors for the block's duration; start them if the run samples."""
    by_name = dict[str, Environments]()
    with ExitStack() as pools:
        for name, section in config.env.by_name.items():
            if not section.pool_size:
                by_name[name] = LocalEnvironments(environments[name], section.reward_weights)
                continue
            assert not isinstance(cluster, OneProcess)
            from nemo_rl_mcore.driver.actors.environment_pool import EnvironmentPool

            by_name[name] = pool = pools.enter_context(EnvironmentPool(section, cluster))
            if config.row_kind is RowKind.PROMPTS:
                pool.start()
        yield EnvironmentsByName(by_name)
