"""Sampling from a checkpoint: its own recipe says which model, which tokenizer and how to sample."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.environments import make_environment
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.embedded import EmbeddedGeneration
from nemo_rl_mcore.launch import exit_status, print_line, tokenizer_of
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.policy import Policy

_HELD_OUT_PROMPTS = 8


def run_generate(config: RunConfig, texts: Sequence[str], *, greedy: bool) -> int:
    """Answer the texts, or some held-out prompts, with the weights of `policy.init_checkpoint`; see `exit_status`."""
    return exit_status(lambda: _generate(config, texts, greedy=greedy), "the answers above are all there are")


def _generate(config: RunConfig, texts: Sequence[str], *, greedy: bool) -> None:
    tokenizer = tokenizer_of(config.policy)
    prompts = _prompts(config, texts, tokenizer)
    stop_ids = (tokenizer.eos_token_id, *(config.policy.generation.stop_token_ids or ()))
    with (
        RayCluster(config.cluster) as cluster,
        Policy(config.policy, cluster, seed=config.seed, init_reference_model=False) as policy,
    ):
        collector = RolloutCollector(
            EmbeddedGeneration(policy, stop_ids),
            make_environment("arithmetic"),
            tokenizer,
            config.data.max_prompt_length,
        )
        answered = collector.collect(prompts, 1, step=0, greedy=greedy)
    for prompt, response in zip(answered.prompts, answered.responses, strict=True):
        print_line(sys.stdout, f"{prompt.text}{response}")


def _prompts(config: RunConfig, texts: Sequence[str], tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts that the collector will take; a text that it would refuse is refused before the ranks start."""
    if not texts:
        source = DigitTaskSource(config.data.dataset_name, config.data.num_digits, config.seed)
        return source.validation(min(_HELD_OUT_PROMPTS, config.data.validation_prompts))
    longest = config.data.max_prompt_length
    for text in texts:
        try:
            length = len(tokenizer.encode(text))
        except ValueError as error:
            raise RunStoppedError(f"--prompt {text!r}: {error}") from error
        if not 0 < length <= longest:
            raise RunStoppedError(f"--prompt {text!r}: it has {length} tokens; 1 to {longest} are allowed")
    return [Prompt(index, text, answer="") for index, text in enumerate(texts)]
