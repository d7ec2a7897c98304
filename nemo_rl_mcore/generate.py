"""Sampling from a checkpoint: its own recipe says which model, which tokenizer and how to sample."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nemo_rl_mcore.algorithms.rollout import Responder
from nemo_rl_mcore.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.chat import with_template
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.epochs import EpochSource
from nemo_rl_mcore.data.sources import open_prompts
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.embedded.policy import EmbeddedGeneration
from nemo_rl_mcore.launch import exit_status, say_aside, start_frozen
from nemo_rl_mcore.output import write_line
from nemo_rl_mcore.parts import stop_ids_of, tokenizer_of
from nemo_rl_mcore.workers.cluster import RayCluster

_HELD_OUT_PROMPTS = 8


def run_generate(config: RunConfig, texts: Sequence[str], *, greedy: bool) -> int:
    """Answer the texts, or some held-out prompts, with the weights of `policy.init_checkpoint`; see `exit_status`."""
    return exit_status(
        lambda: _generate(config, texts, greedy=greedy), lambda: "the answers above are all there are"
    )


def _generate(config: RunConfig, texts: Sequence[str], *, greedy: bool) -> None:
    assert config.policy.init_checkpoint is not None
    require_whole(config.policy.init_checkpoint, "--checkpoint", config.checkpointing, say_aside)
    tokenizer = tokenizer_of(config.policy)
    prompts = _prompts(config, texts, tokenizer)
    stop_ids = stop_ids_of(config, tokenizer)
    with (
        RayCluster(config.cluster) as cluster,
        start_frozen(config, cluster) as policy,
    ):
        responder = Responder(EmbeddedGeneration(policy, stop_ids), tokenizer, config.max_prompt_length)
        answered = responder.respond(prompts, 1, step=0, greedy=greedy)
    for prompt, response in zip(answered.prompts, answered.responses, strict=True):
        write_line(sys.stdout, f"{prompt.text}{response}")


def _prompts(config: RunConfig, texts: Sequence[str], tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts that the collector will take; a text that it would refuse is refused before the ranks start."""
    if not texts:
        return _held_out(config, tokenizer)
    longest = config.max_prompt_length
    prompts = [Prompt(index, text, answer="") for index, text in enumerate(texts)]
    if config.data.apply_chat_template:
        prompts = [with_template(prompt, tokenizer) for prompt in prompts]
    for text, prompt in zip(texts, prompts, strict=True):
        try:
            length = len(tokenizer.encode(prompt.text))
        except ValueError as error:
            raise RunStoppedError(f"--prompt {text!r}: {error}") from error
        if not 0 < length <= longest:
            raise RunStoppedError(f"--prompt {text!r}: it has {length} tokens; 1 to {longest} are allowed")
    return prompts


def _held_out(config: RunConfig, tokenizer: Tokenizer) -> list[Prompt]:
    try:
        source = open_prompts(config, tokenizer)
    except ValueError as error:
        raise RunStoppedError(str(error)) from error
    if isinstance(source, EpochSource):
        return list(source.held_out[:_HELD_OUT_PROMPTS])
    there = config.data.validation_prompts if config.data.embedded else _HELD_OUT_PROMPTS
    return source.validation(min(_HELD_OUT_PROMPTS, there))
