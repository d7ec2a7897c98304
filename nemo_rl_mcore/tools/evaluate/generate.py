"""Answers given prompts with the tokenizer and sampling parameters of the weights' recipe."""

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
from nemo_rl_mcore.data.messages import as_object, read_row_message
from nemo_rl_mcore.data.rows import TORN
from nemo_rl_mcore.data.sources import RowLimits, open_prompts
from nemo_rl_mcore.data.strict_json import parse_json, read_regular, torn_text
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.parts import stop_ids_of, tokenizer_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, open_place, start_frozen
from nemo_rl_mcore.driver.rollouts.player import Responder, Rollout
from nemo_rl_mcore.driver.signals import exit_status
from nemo_rl_mcore.errors import RefusedError, RunStoppedError, code_of, quoted

_HELD_OUT_PROMPTS = 8


@dataclass(frozen=True)
class Asked:
    """The command's options.

    prompts: texts, conversations (lists of messages), or lists of either. file: contains more prompts; without both,
    held-out prompts are used. samples: answers per prompt. output: the JSONL file to write instead of printing.
    """

    prompts: Sequence[object] = ()
    file: str | None = None
    samples: int = 1
    greedy: bool = False
    output: str | None = None


def run_generate(config: RunConfig, asked: Asked) -> int:
    """Answer the prompts on the policy's ranks; see `exit_status`.

    Each batch of answers is written at once, to standard output or as JSON lines to a new file.
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

    place = "above" if output is None else f"in {output}"
    return exit_status(generate, lambda: f"there are no answers beyond those {place}")


def answers(config: RunConfig, asked: Asked) -> Generator[Rollout]:
    """Answer the prompts in batches on the policy's ranks; raises ConfigError and RunStoppedError."""
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
    """Yield a JSON row per answer: index, sample, prompt, response, tokens, finished."""
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
    """Return the prompts, rendered; raises RunStoppedError, before any rank starts, for one that cannot be answered."""
    texts: list[object] = []
    for given in asked.prompts:
        several = cast("list[object]", given) if isinstance(given, list | tuple) else []
        is_list = several and not isinstance(several[0], Mapping)  # else a conversation
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
                "the recipe has no held-out prompts; use --prompt or --prompt-file", code="no-prompts"
            )
        return list(source.held_out[:_HELD_OUT_PROMPTS])
    there = config.data.task.validation_prompts if config.data.embedded else _HELD_OUT_PROMPTS
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


def read_prompts(path: Path, input_key: str | None = None) -> list[Prompt]:
    """Return a file's prompts in order: a text per line or, in JSONL, a text or list of messages per line.

    Empty lines are skipped. input_key: key to try before `prompt` and `messages`.
    Raises RefusedError with file and line.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        code = "unreadable-file" if isinstance(error, OSError) else "no-text"
        raise RefusedError(f"{str(path)!r} cannot be read as text: {error}", code=code) from error
    keys = [*dict.fromkeys(key for key in (input_key, "prompt", "messages") if key is not None)]
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        place, key = f"{path}:{number}", None
        if not line.strip():
            continue
        given: object = line.removesuffix("\r")
        if path.suffix == ".jsonl":
            try:
                row = parse_json(line)
            except ValueError as error:
                raise RefusedError(f"{place}: not JSON: {error}", code="no-json") from error
            if torn := torn_text(row):
                raise RefusedError(f"{place}: {TORN} {torn}", code="no-text")
            key = next((key for key in keys if key in as_object(row)), None)
            if key is None:
                what = f"{place}: no object with one of the keys {', '.join(keys)}"
                raise RefusedError(what, code="no-prompt-key")
            given = as_object(row)[key]
        prompts.append(replace(prompt_of(given, place, key or ""), index=len(prompts)))
    if not prompts:
        raise RefusedError(f"{str(path)!r} holds no prompt", code="no-prompt")
    return prompts


def prompt_of(given: object, place: str, key: str = "") -> Prompt:
    """Make a prompt from a text or a list of messages; raises RefusedError for anything else.

    key: the prompt's key in its row, for messages.
    """
    if isinstance(given, str):
        return Prompt(0, given, "", place=place)
    turns = cast("Sequence[object]", given if isinstance(given, list | tuple) else [])
    name = key or "messages"
    try:
        messages = tuple(read_row_message(turn, f"{name}[{number}]") for number, turn in enumerate(turns))
    except ValueError as error:
        raise RefusedError(f"{place}: {error}", code="prompt-type") from error
    if not messages:
        shown = quoted(cast("object", given))
        what = f"{place}: {key or 'a prompt'} is {shown}, and must be text or a list of messages"
        raise RefusedError(what, code="prompt-type")
    return Prompt(0, "", "", context=messages, place=place)
