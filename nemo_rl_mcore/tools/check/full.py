"""`check --full`: tokenizes the data, reads its reference answers, and scores one row."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

from nemo_rl_mcore.config import EnvConfig, RunConfig
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.environment import PROCESS_START_S
from nemo_rl_mcore.data.answers import answer_row, pair_rows
from nemo_rl_mcore.data.datasets import EpochSource, Prompt
from nemo_rl_mcore.driver.actors.places import (
    given_variables,
    only_environment,
    rank_environment,
    session_environment,
)
from nemo_rl_mcore.driver.parts import Parts, open_parts
from nemo_rl_mcore.environment.interface import replies_of
from nemo_rl_mcore.environment.registry import EnvironmentProcess
from nemo_rl_mcore.environment.turns import Reply, Turn, first_turn
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError, shortened
from nemo_rl_mcore.tools.check.plan import Plan
from nemo_rl_mcore.tools.check.render import Finding


def full_check(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Open the run's parts, and yield findings about them.

    Raises RunStoppedError for errors that would stop the run before its ranks start: data that cannot be fetched or
    read, a row with too many tokens, a reference answer that the environment cannot read, a class that does not
    import. Raises CustomCodeError for a reward function or class that raises or returns a wrong value, which would
    stop the run later.
    """
    parts = open_parts(config)
    source = parts.prompts
    # All rows of a finite source; of others those of the first step, and of a validation if there is one.
    if isinstance(source, EpochSource):
        trained, held_out = source.train, source.held_out
    else:
        held_out = source.validation(config.loop.max_val_samples) if config.loop.validates else []
        trained = source.train_batch(1, config.prompts_per_step)
    for name, prompts in (("to train on", trained), ("held out", held_out)):
        yield from _lengths(name, prompts, parts)
    if plan.data is not None and isinstance(source, EpochSource):
        left_out = plan.data.rows + plan.data.held_out - len(source.train) - len(source.held_out)
        yield Finding("left out", f"{left_out} rows with too many tokens (data.overlong)")
    first = (trained or held_out)[0]
    yield Finding("first prompt", shortened(first.text, 400))
    # Rows with given answers are not scored in training; only validation generates answers to held-out ones.
    sampled = config.row_kind is RowKind.PROMPTS
    named, rows = ("its answer", [first, *trained, *held_out]) if sampled else ("first held out", held_out)
    firsts = dict[str, Prompt]()
    for row in rows:
        firsts.setdefault(row.env_name, row)
    for name, prompt in firsts.items():
        yield from _scored(f"{named}, {name}" if name else named, parts, prompt)
    for key, path in config.import_paths.items():
        yield Finding("imported", f"{key}: {path}")


def _lengths(name: str, prompts: Sequence[Prompt], parts: Parts) -> Iterator[Finding]:
    """Yield the prompts' tokens and, if answers are given, those of whole rows."""
    if not prompts:
        return
    kind, tokenizer = parts.config.row_kind, parts.tokenizer
    lengths = [len(tokenizer.encode(prompt.text, prompt.literal)) for prompt in prompts]
    longest = max(lengths)
    tokens = f"median {median(lengths):g} tokens per prompt, at most {longest}"
    yield Finding(name, f"{len(prompts)} rows; {tokens}")
    if place := prompts[lengths.index(longest)].place:
        yield Finding("", f"the longest is {place}")
    whole: list[int] = []
    for prompt in prompts if kind is not RowKind.PROMPTS else ():
        pairs = kind is RowKind.PAIRS and prompt.rejected is not None
        rows = pair_rows(prompt, tokenizer) if pairs else (answer_row(prompt, tokenizer),)
        whole.append(max(len(row.ids) for row in rows))
    if whole:
        yield Finding("", f"with answers: median {median(whole):g} tokens, at most {max(whole)}")


def _scored(name: str, parts: Parts, prompt: Prompt) -> Iterator[Finding]:
    """Yield the rewards of the data's answer and of an empty one; nothing if agents give the rewards."""
    env = parts.config.env.by_name[prompt.env_name]
    if env.endpoint is not None and not env.given:
        return
    turns = [first_turn(prompt, prompt.imitated), first_turn(prompt, "")]
    if env.pool_size:
        given, none = _replies_of_process(env, turns)
    else:
        given, none = replies_of(parts.environments[prompt.env_name], turns, env.reward_weights or {})
    earned = list[str]()
    for reply in (given, none):
        rewards = ", ".join(f"{name} {value:g}" for name, value in reply.rewards.items())
        earned.append(f"{reply.reward:g}{rewards and f' ({rewards})'}")
    yield Finding(name, f"{shortened(prompt.imitated)} earns {earned[0]}, an empty response {earned[1]}")
    if given.terminated and given.reward <= none.reward:
        what = "the data's answer earns no more than an empty one: see env (env.math.response defines where a response "
        yield Finding("", f"{what}states its answer) and the source's answer key")


def _replies_of_process(env: EnvConfig, turns: Sequence[Turn]) -> Sequence[Reply]:
    """Return the replies of an environment in its own process, with the environment variables that a run gives it."""
    variables = rank_environment(os.environ, on_cpu=not env.pool.num_gpus) | given_variables(env.pool)
    context = get_context("spawn")
    replies, there = context.Pipe(duplex=False)
    process = context.Process(target=_reply, args=(there, env, turns), daemon=True)
    with only_environment(session_environment(os.environ) | variables):
        process.start()
    there.close()
    try:
        for limit_s, key in ((PROCESS_START_S, "start"), (env.pool.timeout_s, "env.pool.timeout_s")):
            if not replies.poll(limit_s):
                raise CustomCodeError(f"{key}: the environment did not reply within {limit_s:g} s")
            if isinstance(received := replies.recv(), RunStoppedError):
                raise received
        return received
    except EOFError:
        process.join()
        raise CustomCodeError(
            f"the environment's process ended with status {process.exitcode}, without a reply"
        ) from None
    finally:
        process.kill()
        process.join()


def _reply(driver: Connection, env: EnvConfig, turns: Sequence[Turn]) -> None:
    """Send None after the start, then the replies; an error replaces either. Runs in the environment's process."""
    try:
        process = EnvironmentProcess(env, {})
        driver.send(None)
        replies = process.replies(turns, env.pool.timeout_s)
        driver.send([replace(reply, metadata=None) for reply in replies])
    except RunStoppedError as error:  # any other error ends the process with a traceback
        driver.send(error)
