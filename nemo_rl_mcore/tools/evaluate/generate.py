"""Answers to given prompts: the recipe of the weights says which tokenizer, and how to sample."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import TextIO, cast

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.data.datasets import EpochSource, Prompt
from nemo_rl_mcore.data.rows import prompt_of, read_prompts
from nemo_rl_mcore.data.sources import RowLimits, StreamSource, open_prompts
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.driver.observability.ending import exit_status
from nemo_rl_mcore.driver.output import say_aside, write_line
from nemo_rl_mcore.driver.parts import stop_ids_of, tokenizer_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, open_place, start_frozen
from nemo_rl_mcore.driver.rollouts.player import Responder, Rollout
from nemo_rl_mcore.errors import RunStoppedError, code_of, quoted

_HELD_OUT_PROMPTS = 8


@dataclass(frozen=True)
class Asked:
    """What the command asks for.

    prompts, file: texts, or conversations as lists of messages, or lists of these; without any of them held-out ones
    are taken. samples: answers to each prompt. output: the JSONL file to write instead of lines.
    """

    prompts: Sequence[object] = ()
    file: str | None = None
    samples: int = 1
    greedy: bool = False
    output: str | None = None


def run_generate(config: RunConfig, asked: Asked) -> int:
    """Answer the prompts with the weights of the policy, by its ranks; see `exit_status`."""
    told = "the answers above are" if asked.output is None else f"the answers in {asked.output} are"
    return exit_status(lambda: _generate(config, asked), lambda: f"{told} all there are")


def _generate(config: RunConfig, asked: Asked) -> None:
    with _written_to(asked.output) as write:
        for answered in answers(config, asked):
            write(answered)


def answers(config: RunConfig, asked: Asked) -> Generator[Rollout]:
    """Answer the prompts batch by batch, by the ranks of the policy; raises ConfigError and RunStoppedError."""
    if config.policy.init_checkpoint is not None:
        require_whole(config.policy.init_checkpoint, "--checkpoint", config.checkpointing, say_aside)
    tokenizer = tokenizer_of(config.policy, config.data)
    prompts = prompts_to_answer(config, asked, tokenizer)
    stop_ids = stop_ids_of(config, tokenizer)
    with open_place(config) as cluster, start_frozen(config, cluster) as policy:
        responder = Responder(EmbeddedGeneration(policy, stop_ids), tokenizer, config.max_prompt_length)
        for batch in batched(prompts, config.loop.val_batch_size):
            yield responder.respond(batch, asked.samples, step=0, greedy=asked.greedy)


@contextmanager
def _written_to(output: str | None) -> Generator[Callable[[Rollout], None]]:
    """Give what writes answers as they come: to standard output, or to a new file."""
    if output is None:
        yield _as_lines
        return
    with _new_file(output) as file:

        def write(answered: Rollout) -> None:
            for row in rows_of(answered):
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
            file.flush()

        yield write
    write_line(sys.stdout, f"the answers are in {output}")


def _new_file(output: str) -> TextIO:
    try:
        return Path(output).open("x", encoding="utf-8", errors="backslashreplace")
    except FileExistsError as error:
        raise RunStoppedError(f"--output {output!r} exists already; name another file") from error
    except OSError as error:
        raise RunStoppedError(f"--output {output!r} cannot be written: {error.strerror}") from error


def _as_lines(answered: Rollout) -> None:
    for prompt, response in zip(answered.prompts, answered.responses, strict=True):
        write_line(sys.stdout, f"{prompt.text}{response}")


def rows_of(answered: Rollout) -> Iterator[dict[str, object]]:
    """Yield each answer as a row of JSON: index, sample, prompt, response, tokens, finished."""
    batch = answered.batch
    for place, (prompt, response) in enumerate(zip(answered.prompts, answered.responses, strict=True)):
        yield {
            "index": prompt.index,
            "sample": int(batch["sample_index"][place]),
            "prompt": prompt.text,
            "response": response,
            "tokens": int(batch["token_mask"][place].sum()),
            "finished": bool(batch["finished"][place]),
        }


def prompts_to_answer(config: RunConfig, asked: Asked, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts that the responder will take; one that it would refuse is refused before the ranks start."""
    try:
        given = [prompt_of(one, f"--prompt {quoted(one)}") for one in _each(asked.prompts)]
        if asked.file is not None:
            given += read_prompts(Path(asked.file), _input_key(config))
    except ValueError as error:
        raise RunStoppedError(
            f"{'--prompt-file ' if asked.file else ''}{error}", code=code_of(error)
        ) from error
    if not given:
        return _held_out(config, tokenizer)
    return [_checked(config, replace(prompt, index=index), tokenizer) for index, prompt in enumerate(given)]


def _each(prompts: Iterable[object]) -> Iterator[object]:
    """Yield texts and conversations, those of a list of them one by one."""
    for given in prompts:
        several = cast("list[object]", given) if isinstance(given, list | tuple) else []
        if several and not isinstance(several[0], Mapping):
            yield from several
        else:
            yield given


def _input_key(config: RunConfig) -> str | None:
    """Return the key of a prompt in the rows that are trained on."""
    train = config.data.train
    first = train[0] if isinstance(train, tuple) else train
    return None if first is None else first.input_key


def _checked(config: RunConfig, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    if prompt.context and not config.data.apply_chat_template:
        raise RunStoppedError(f"{prompt.place}: messages need data.apply_chat_template: true")
    try:
        prompt = RowLimits(config, tokenizer, RowKind.PROMPTS).rendered(prompt)
        length = len(tokenizer.encode(prompt.text, prompt.literal))
    except ValueError as error:
        raise RunStoppedError(f"{prompt.place}: {error}") from error
    if not 0 < length <= config.max_prompt_length:
        raise RunStoppedError(
            f"{prompt.place}: it has {length} tokens; 1 to {config.max_prompt_length} are allowed"
        )
    return prompt


def _held_out(config: RunConfig, tokenizer: Tokenizer) -> list[Prompt]:
    try:
        source = open_prompts(config, tokenizer)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if isinstance(source, EpochSource | StreamSource):
        if not source.held_out:
            raise RunStoppedError(
                "the recipe holds no prompts out; name some: --prompt or --prompt-file", code="no-prompts"
            )
        return list(source.held_out[:_HELD_OUT_PROMPTS])
    there = config.data.validation_prompts if config.data.embedded else _HELD_OUT_PROMPTS
    return source.validation(min(_HELD_OUT_PROMPTS, there))
