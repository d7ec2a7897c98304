"""Answers to given prompts, with the tokenizer and the sampling of the weights' recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.data.datasets import EpochSource, Prompt
from nemo_rl_mcore.data.rows import prompt_of, read_prompts
from nemo_rl_mcore.data.sources import RowLimits, open_prompts
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.parts import stop_ids_of, tokenizer_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, open_place, start_frozen
from nemo_rl_mcore.driver.rollouts.player import Responder, Rollout
from nemo_rl_mcore.driver.signals import exit_status
from nemo_rl_mcore.errors import RunStoppedError, code_of, quoted

_HELD_OUT_PROMPTS = 8


@dataclass(frozen=True)
class Asked:
    """The command's options.

    prompts, file: texts, or conversations as lists of messages, or lists of these; without any of them held-out ones
    are taken. samples: answers to each prompt. output: the JSONL file to write instead of lines.
    """

    prompts: Sequence[object] = ()
    file: str | None = None
    samples: int = 1
    greedy: bool = False
    output: str | None = None


def run_generate(config: RunConfig, asked: Asked) -> int:
    """Answer the prompts with the weights of the policy, by its ranks; see `exit_status`.

    Answers are written as they come: to standard output, or as rows of JSON to a new file.
    """
    output = asked.output

    def generate() -> None:
        if output is None:
            for answered in answers(config, asked):
                for prompt, response in zip(answered.prompts, answered.responses, strict=True):
                    write_line(sys.stdout, f"{prompt.text}{response}")
            return
        try:
            Path(output).touch(exist_ok=False)
        except FileExistsError as error:
            raise RunStoppedError(f"--output {output!r} exists already; name another file") from error
        except OSError as error:
            raise RunStoppedError(f"--output {output!r} cannot be written: {error.strerror}") from error
        with Path(output).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for answered in answers(config, asked):
                rows = rows_of(answered)
                file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
                file.flush()
        write_line(sys.stdout, f"the answers are in {output}")

    told = "the answers above are" if output is None else f"the answers in {output} are"
    return exit_status(generate, lambda: f"{told} all there are")


def answers(config: RunConfig, asked: Asked) -> Generator[Rollout]:
    """Answer the prompts batch by batch, by the ranks of the policy; raises ConfigError and RunStoppedError."""
    if config.policy.init_checkpoint is not None:
        require_whole(config.policy.init_checkpoint, "--checkpoint")
    tokenizer = tokenizer_of(config.policy, config.data)
    prompts = prompts_to_answer(config, asked, tokenizer)
    stop_ids = stop_ids_of(config, tokenizer)
    with open_place(config) as cluster, start_frozen(config, cluster) as policy:
        responder = Responder(EmbeddedGeneration(policy, stop_ids), tokenizer, config.max_prompt_length)
        for batch in batched(prompts, config.loop.val_batch_size):
            yield responder.respond(batch, asked.samples, step=0, greedy=asked.greedy)


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
    """Return prompts that the responder will take; one that it would refuse is refused before the ranks start.

    Raises RunStoppedError.
    """
    texts: list[object] = []
    for given in asked.prompts:
        several = cast("list[object]", given) if isinstance(given, list | tuple) else []
        is_list = several and not isinstance(several[0], Mapping)  # and no conversation
        texts += several if is_list else [given]
    train = config.data.train
    first = train[0] if isinstance(train, tuple) else train
    try:
        prompts = [prompt_of(one, f"--prompt {quoted(one)}") for one in texts]
        if asked.file is not None:
            prompts += read_prompts(Path(asked.file), None if first is None else first.input_key)
    except ValueError as error:
        place = "--prompt-file " if asked.file else ""
        raise RunStoppedError(f"{place}{error}", code=code_of(error)) from error
    if prompts:
        limits = RowLimits(config, tokenizer, RowKind.PROMPTS)
        return [_checked(limits, replace(prompt, index=index)) for index, prompt in enumerate(prompts)]
    try:
        source = open_prompts(config, tokenizer)
    except ValueError as error:
        raise RunStoppedError(str(error), code=code_of(error)) from error
    if isinstance(source, EpochSource):
        if not source.held_out:
            raise RunStoppedError(
                "the recipe holds no prompts out; name some: --prompt or --prompt-file", code="no-prompts"
            )
        return list(source.held_out[:_HELD_OUT_PROMPTS])
    there = config.data.validation_prompts if config.data.embedded else _HELD_OUT_PROMPTS
    return source.validation(min(_HELD_OUT_PROMPTS, there))


def _checked(limits: RowLimits, prompt: Prompt) -> Prompt:
    config, tokenizer = limits.config, limits.tokenizer
    if prompt.context and not config.data.apply_chat_template:
        raise RunStoppedError(f"{prompt.place}: messages need data.apply_chat_template: true")
    try:
        prompt = limits.rendered(prompt)
        length = len(tokenizer.encode(prompt.text, prompt.literal))
    except ValueError as error:
        raise RunStoppedError(f"{prompt.place}: {error}") from error
    if not 0 < length <= config.max_prompt_length:
        what = f"it has {length} tokens; 1 to {config.max_prompt_length} are allowed"
        raise RunStoppedError(f"{prompt.place}: {what}")
    return prompt
