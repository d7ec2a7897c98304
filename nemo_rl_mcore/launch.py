"""The composition root: from a checked recipe to a run with its ranks, its data and its observers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from nemo_rl_mcore.algorithms.grpo import GRPO
from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.config import GRPOMasterConfig, PolicyConfig
from nemo_rl_mcore.data.datasets import DigitTaskSource
from nemo_rl_mcore.data.hub import fetched_folder
from nemo_rl_mcore.data.tokenizer import Tokenizer, load_tokenizer
from nemo_rl_mcore.environments import make_environment
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.embedded import EmbeddedGeneration
from nemo_rl_mcore.interfaces import GenerationInterface
from nemo_rl_mcore.observability import RunRecorder
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.policy import Policy
from nemo_rl_mcore.workers.signals import sigterm_as_ctrl_c

EXIT_FAILED = 1
# What a shell reports for a program that Ctrl-C or a batch scheduler ended: 130 and 143.
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def run_grpo(config: GRPOMasterConfig) -> int:
    """Run the recipe and return the exit status: 0, 1 for a failure, 130 after Ctrl-C, 143 after SIGTERM.

    However it ends, the ranks are gone, and the metrics and the report hold every finished step.
    """
    return exit_status(lambda: _grpo(config), f"the finished steps are in {config.logger.log_dir}")


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


def _grpo(config: GRPOMasterConfig) -> None:
    tokenizer = tokenizer_of(config.policy)
    stop_ids = (tokenizer.eos_token_id, *(config.policy.generation.stop_token_ids or ()))
    prompts = DigitTaskSource(config.data.dataset_name, config.data.num_digits, config.seed)
    needs_reference = config.loss_fn.reference_policy_kl_penalty != 0
    checkpoints = open_checkpoints(config, say=lambda line: print_line(sys.stdout, line))
    with (
        RayCluster(config.cluster) as cluster,
        Policy(config.policy, cluster, seed=config.seed, init_reference_model=needs_reference) as policy,
        RunRecorder(
            config.logger,
            config.grpo.max_num_steps,
            title=f"GRPO: {config.data.dataset_name}",
            resumed_step=checkpoints.resumed_step,
        ) as recorder,
        _generation(config, policy, cluster, stop_ids) as generation,
    ):
        collector = RolloutCollector(
            generation,
            make_environment("arithmetic"),
            tokenizer,
            config.data.max_prompt_length,
        )
        GRPO(config, policy, collector, prompts, recorder, checkpoints).run()


@contextmanager
def _generation(
    config: GRPOMasterConfig, policy: Policy, cluster: RayCluster, stop_ids: tuple[int, ...]
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
