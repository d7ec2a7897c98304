"""The composition root: from a checked recipe to a run with its ranks, its data and its observers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from nemo_rl_mcore.algorithms.distillation import Distillation
from nemo_rl_mcore.algorithms.dpo import DPO
from nemo_rl_mcore.algorithms.grpo import GRPO
from nemo_rl_mcore.algorithms.ppo import PPO
from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import RunCheckpoints, open_checkpoints
from nemo_rl_mcore.algorithms.sft import SFT
from nemo_rl_mcore.config import (
    DistillationMasterConfig,
    DPOMasterConfig,
    GRPOMasterConfig,
    ModelPlan,
    PolicyConfig,
    PPOMasterConfig,
    RunConfig,
    SFTMasterConfig,
)
from nemo_rl_mcore.config.data_files import steps_of_epochs
from nemo_rl_mcore.config.saved_run import changes_since, read_recipe_of
from nemo_rl_mcore.config.warm_start import warm_start_recipe
from nemo_rl_mcore.data.datasets import PromptSource
from nemo_rl_mcore.data.epochs import EpochSource
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.data.sources import open_pairs, open_prompts
from nemo_rl_mcore.data.tokenizer import Tokenizer, load_tokenizer
from nemo_rl_mcore.environments import make_environment, require_golds, require_golds_run_first
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.embedded import EmbeddedGeneration
from nemo_rl_mcore.interfaces import EnvironmentInterface, GenerationInterface
from nemo_rl_mcore.losses import check_losses
from nemo_rl_mcore.observability import RunRecorder
from nemo_rl_mcore.training.checkpoints import CheckpointStore
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.policy import Policy
from nemo_rl_mcore.workers.signals import sigterm_as_ctrl_c

EXIT_FAILED = 1
# What a shell reports for a program that Ctrl-C or a batch scheduler ended: 130 and 143.
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def run(config: RunConfig) -> int:
    """Run the recipe and return the exit status: 0, 1 for a failure, 130 after Ctrl-C, 143 after SIGTERM.

    However it ends, the ranks are gone, and the metrics and the report hold every finished step.
    """
    return exit_status(
        lambda: _run(_open_parts(config)), f"the finished steps are in {config.logger.log_dir}"
    )


def exit_status(run: Callable[[], None], left_behind: str) -> int:
    """Run to the end, to a failure or to a signal; say on stderr how it ended, and what it left when interrupted."""
    with sigterm_as_ctrl_c() as terminated:
        try:
            run()
        except KeyboardInterrupt:
            ended, status = "interrupted", EXIT_INTERRUPTED
            if terminated.is_set():
                ended, status = "terminated", EXIT_TERMINATED
            sys.stderr.write(f"{ended}; {left_behind}\n")
            return status
        except RunStoppedError as error:
            sys.stderr.write(f"the run stopped: {error}\n")
            return EXIT_FAILED
    return 0


@dataclass(frozen=True)
class _Parts:
    """What a run needs beside its ranks; it is all there before they start. `config` ends when the data set does."""

    config: RunConfig
    tokenizer: Tokenizer
    prompts: PromptSource
    environment: EnvironmentInterface


def _open_parts(config: RunConfig) -> _Parts:
    tokenizer = tokenizer_of(config.policy)
    try:
        check_losses(config)
        environment = make_environment(config.env)
        prompts = open_prompts(config, tokenizer)
        require_golds(config, prompts)
        require_golds_run_first(config)
    except ValueError as error:
        raise RunStoppedError(str(error)) from error
    if isinstance(prompts, EpochSource):
        steps = steps_of_epochs(config, len(prompts.train))
        loop = config.loop.model_copy(update={"max_num_steps": steps})
        config = config.model_copy(update={config.algorithm: loop})
    return _Parts(config, tokenizer, prompts, environment)


def _run(parts: _Parts) -> None:
    config = parts.config
    with RayCluster(config.cluster) as cluster:
        checkpoints = open_checkpoints(config, say=lambda line: print_line(sys.stdout, line))
        if config.warm_start is not None and checkpoints.resumed_step is None:
            weights = _weights_of(config.warm_start, config, "warm_start")
            config = config.model_copy(update={"policy": _starting_from(weights, config.policy)})
        with ExitStack() as stack:
            _algorithm(replace(parts, config=config), cluster, checkpoints, stack).run()


def _weights_of(recipe: str, config: RunConfig, name: str) -> str:
    """The last checkpoint of a recipe that is run first, in a folder of this run; it is not run twice.

    One that another seed or recipe left there is set aside.
    """
    first = _open_parts(warm_start_recipe(recipe, config, Path(config.logger.log_dir) / name))
    store = CheckpointStore(Path(first.config.checkpointing.checkpoint_dir))
    last = store.latest()
    if last is not None and changes_since(read_recipe_of(last.folder), first.config):
        anew = first.config.checkpointing.model_copy(update={"resume": "never"})
        first, last = replace(first, config=first.config.model_copy(update={"checkpointing": anew})), None
    if last is None or last.step < first.config.loop.max_num_steps:
        print_line(sys.stdout, f"{name}: running {recipe}")
        _run(first)
        last = store.latest()
    assert last is not None
    return str(last.folder.absolute())


def _starting_from(checkpoint: str, policy: PolicyConfig) -> PolicyConfig:
    return policy.model_copy(update={"init_checkpoint": checkpoint})


def _algorithm(
    parts: _Parts, cluster: RayCluster, checkpoints: RunCheckpoints, stack: ExitStack
) -> GRPO | PPO | DPO | SFT | Distillation:
    """The algorithm over its parts, which end with the stack."""
    config, tokenizer, prompts = parts.config, parts.tokenizer, parts.prompts
    stop_ids = (tokenizer.eos_token_id, *(config.policy.generation.stop_token_ids or ()))
    of_policy, *others = [_with_weights(plan, config) for plan in config.models.values()]
    policy = stack.enter_context(_start(of_policy, config, cluster))
    recorder = stack.enter_context(
        RunRecorder(
            config.logger,
            config.loop.max_num_steps,
            title=f"{config.algorithm}: {config.data.dataset_name}",
            resumed_step=checkpoints.resumed_step,
        )
    )
    generation = stack.enter_context(_generation(config, policy, cluster, stop_ids))
    collector = RolloutCollector(generation, parts.environment, tokenizer, config.max_prompt_length)
    beside = {plan.name: stack.enter_context(_start(plan, config, cluster, beside=policy)) for plan in others}
    match config:
        case GRPOMasterConfig():
            return GRPO(config, policy, collector, prompts, recorder, checkpoints)
        case PPOMasterConfig():
            return PPO(config, policy, beside["value"], collector, prompts, recorder, checkpoints)
        case DPOMasterConfig():
            pairs = None if config.dpo.online else open_pairs(config, prompts, tokenizer)
            return DPO(config, policy, collector, prompts, pairs, recorder, checkpoints)
        case SFTMasterConfig():
            return SFT(config, policy, collector, prompts, recorder, checkpoints)
        case DistillationMasterConfig():
            return Distillation(config, policy, beside["teacher"], collector, prompts, recorder, checkpoints)
        case _:
            raise NotImplementedError(config.algorithm)


def _with_weights(plan: ModelPlan, config: RunConfig) -> ModelPlan:
    """A model of the run, whose start weights then are on this machine."""
    if plan.policy.model_name is not None:
        try:
            fetched_folder(plan.policy.model_name)
        except ValueError as error:
            raise RunStoppedError(str(error)) from error
    if plan.warm_start is None:
        return plan
    return replace(plan, policy=_starting_from(_weights_of(plan.warm_start, config, plan.name), plan.policy))


def _start(plan: ModelPlan, config: RunConfig, cluster: RayCluster, beside: Policy | None = None) -> Policy:
    return Policy(
        plan.policy,
        cluster,
        seed=config.seed,
        # One for all models of the run: their log-probabilities are compared with each other.
        temperature=config.logprob_temperature,
        init_reference_model=plan.reference,
        role=plan.role,
        trained=plan.trained,
        beside=beside,
    )


@contextmanager
def _generation(
    config: RunConfig, policy: Policy, cluster: RayCluster, stop_ids: tuple[int, ...]
) -> Iterator[GenerationInterface]:
    """The engine that the recipe asks for; one of its own ends with the block."""
    if config.policy.generation.backend == "embedded":
        yield EmbeddedGeneration(policy, stop_ids)
        return
    # Brings in what only runs with vLLM need.
    from nemo_rl_mcore.workers.vllm_generation import VllmGeneration

    folder = Path(config.logger.log_dir)
    with VllmGeneration(
        config.policy, cluster, policy, folder=folder, stop_ids=stop_ids, seed=config.seed
    ) as engines:
        yield engines


def tokenizer_of(policy: PolicyConfig) -> Tokenizer:
    """Load the tokenizer; only now is it known which tokens a Hugging Face directory adds while it loads.

    Its files may come from the hub with the weights, which are fetched here: the ranks have less time to start.
    """
    try:
        if policy.model_name is not None:
            fetched_folder(policy.model_name)
        tokenizer = load_tokenizer(policy.tokenizer.name)
    except ValueError as error:
        raise RunStoppedError(str(error)) from error
    if tokenizer.vocab_size > policy.model.vocab_size:
        raise RunStoppedError(
            f"policy.model.vocab_size: {policy.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"policy.tokenizer.name: {policy.tokenizer.name}; raise it"
        )
    return tokenizer


def print_line(stream: TextIO, line: str) -> None:
    """Write a line that is seen at once, before the ranks start."""
    stream.write(f"{line}\n")
    stream.flush()
