"""What an environment says to turns: of one that takes part in episodes, and of one that only scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from nemo_rl_mcore.config.custom_code import custom_code
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.environment.interface import (
    Environment,
    EnvironmentInterface,
    EnvironmentReturn,
    Rewards,
    ScoresAnswers,
)
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError

_LONGEST_ROLE = 100
_ONE = ""
"""The name of a reward that has none."""


@dataclass(frozen=True)
class LocalEnvironments:
    """Implements `Environments` in this process: what the environment raises passes through.

    weights: of rewards by name, 1 where there is none. max_chars: of an observation.
    """

    environment: Environment
    weights: Mapping[str, float] | None = None
    max_chars: int | None = None

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        return replies_of(self.environment, turns, self.weights or {}, self.max_chars)

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        """See `Environments.replies_soon`; it is waited for, as the environments here take no time."""
        return self.replies(turns)

    def take_counts(self) -> dict[str, float]:
        return {}

    @property
    def drop_reasons(self) -> dict[str, int]:
        return {}


def replies_of(
    environment: Environment,
    turns: Sequence[Turn],
    weights: Mapping[str, float],
    max_chars: int | None = None,
) -> list[Reply]:
    """Return the reply to each turn. weights: of rewards by name. max_chars: at which an observation is cut.

    Raises ValueError for a return that is not one value a turn, RunStoppedError for a weight of a reward that there is
    not and for a reward whose name is not printable, and what the environment raises.
    """
    if not turns:
        return []
    if hasattr(environment, "step"):
        logs, metadata = (list(of_turns) for of_turns in zip(*map(_shown, turns), strict=True))
        returned = cast("EnvironmentInterface", environment).step(logs, metadata)
        return [_cut(reply, max_chars) for reply in read_return(returned, len(turns), weights)]
    _require_rewards(weights, ())
    scores = cast("ScoresAnswers", environment).score(
        [turn.prompt for turn in turns],
        [turn.answer for turn in turns],
        [turn.finished for turn in turns],
    )
    given = [number_or_none(score) for score in _one_each("score", scores, len(turns))]
    return [Reply(0.0, unscored=True) if score is None else Reply(score) for score in given]


def _cut(reply: Reply, max_chars: int | None) -> Reply:
    if max_chars is None or all(len(said.content) <= max_chars for said in reply.observation):
        return reply
    kept = tuple(replace(said, content=said.content[:max_chars]) for said in reply.observation)
    cut = sum(len(said.content) for said in reply.observation) - sum(len(said.content) for said in kept)
    return replace(reply, observation=kept, cut=cut)


def _shown(turn: Turn) -> tuple[list[dict[str, Any]], Any]:
    """Return the log and the metadata that a turn is to an environment."""
    log: list[dict[str, Any]] = [
        {**message.fields(parsed=False), "content": message.content} for message in turn.messages
    ]
    log[-1]["finished"] = turn.finished
    if turn.metadata is not None:
        return log, turn.metadata
    prompt = turn.prompt
    known = {"prompt": prompt.text, "answer": prompt.answer, "index": prompt.index, "source": prompt.source}
    return log, known | ({"columns": prompt.columns} if prompt.columns else {})


def read_return(returned: EnvironmentReturn, turns: int, weights: Mapping[str, float]) -> list[Reply]:
    """Return the replies that a return holds; raises as `replies_of`."""
    named = isinstance(returned.rewards, Mapping)
    given = cast("Mapping[str, Rewards]", returned.rewards if named else {_ONE: returned.rewards})
    rewards = {
        name: [*map(number_or_none, _one_each(f"rewards {name}".strip(), values, turns))]
        for name, values in given.items()
    }
    names = cast("Iterable[object]", rewards)  # of the user's own; they stand in tables, files and keys
    if wrong := [name for name in names if not isinstance(name, str) or not name.isprintable()]:
        raise RunStoppedError(
            f"a reward of the environment is called {wrong[0]!r:.80}: name it in printable text"
        )
    _require_rewards(weights, rewards)
    terminateds = _one_each("terminateds", returned.terminateds, turns)
    observations = _one_each("observations", returned.observations, turns)
    metadata = _one_each("metadata", returned.metadata, turns)
    stop_strings = _one_each("next_stop_strings", returned.next_stop_strings, turns)
    answers = [None] * turns if returned.answers is None else _one_each("answers", returned.answers, turns)
    replies: list[Reply] = []
    for place in range(turns):
        parts = {name: value for name, values in rewards.items() if (value := values[place]) is not None}
        if unscored := len(parts) < len(rewards):
            parts.clear()
        replies.append(
            Reply(
                reward=math.fsum(weights.get(name, 1.0) * value for name, value in parts.items()),
                unscored=unscored,
                terminated=bool(terminateds[place]),
                observation=_observation(observations[place]),
                metadata=metadata[place],
                stop_strings=_stop_strings(stop_strings[place]),
                rewards={} if _ONE in parts else parts,
                answer=None if answers[place] is None else _text("answers", answers[place]),
            )
        )
    return replies


def _require_rewards(weights: Mapping[str, float], rewards: Collection[str]) -> None:
    if unknown := [name for name in weights if name not in rewards]:
        given = ", ".join(filter(None, rewards)) or "one without a name"
        raise RunStoppedError(
            f"env.reward_weights.{unknown[0]}: no such reward; those of the environment are: {given}",
            code="unknown-reward",
        )


def _one_each(name: str, values: Iterable[Any], turns: int) -> list[Any]:
    listed = [*values]
    if len(listed) != turns:
        raise ValueError(f"{name}: {len(listed)} values for {turns} answers")
    return listed


def number_each(name: str, given: object, prompts: Sequence[int], *, unscored: bool) -> list[float | None]:
    """Return what code of the user's gave as a number for each answer; prompts: of which these are, by their index.

    unscored: whether None may be one. Raises CustomCodeError for anything else. name: of the code, for the message.
    """
    count = len(prompts)
    try:
        values = iter(cast("Iterable[object]", given))
    except TypeError as error:
        raise CustomCodeError(
            f"{name} gave {given!r:.80}, which is no list of {count} numbers", code="reward-count"
        ) from error
    with custom_code(name):  # a generator runs on
        listed = [*values]
    if len(listed) != count:
        raise CustomCodeError(
            f"{name} gave {len(listed)} rewards of {count} responses: {listed!r:.80}", code="reward-count"
        )
    numbers: list[float | None] = []
    read = number_or_none if unscored else number_of
    for value, prompt in zip(listed, prompts, strict=True):
        try:
            numbers.append(read(value))
        except ValueError as error:
            raise CustomCodeError(f"{name}: prompt {prompt}: {error}", code="reward-number") from error
    return numbers


def number_or_none(value: object) -> float | None:
    """Return a reward as a finite float, or None for an answer that is not scored; raises as `number_of`."""
    return None if value is None else number_of(value)


def number_of(value: object) -> float:
    """Return a reward as a finite float; raises ValueError for anything else."""
    try:
        number = float(cast("float", value))
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "; env.unscored: drop leaves such answers out of training" if value is None else ""
        raise ValueError(f"a reward of {value!r:.80} is no number{hint}") from error
    if not math.isfinite(number):
        raise ValueError(f"a reward of {number} is not finite")
    return number


def _observation(given: Mapping[str, str] | None) -> tuple[Message, ...]:
    if given is None:
        return ()
    role = _text("an observation's role", given["role"])
    if len(role) > _LONGEST_ROLE:
        raise ValueError(
            f"an observation's role has {len(role)} characters, and {_LONGEST_ROLE} are the most"
        )
    return (Message(role, _text("an observation", given["content"])),)


def _stop_strings(given: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValueError(f"next_stop_strings: {given!r} is one text, and each answer has a list of them")
    found = tuple(_text("next_stop_strings", text) for text in given or ())
    if "" in found:
        raise ValueError("next_stop_strings: an empty text would end every answer")
    return found


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r:.80} is no text")
    value.encode()  # halves of a character are none, and raise a ValueError
    return value
