"""What an environment implements: replies to each answer of an episode, or a score for one answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, SupportsFloat, cast, runtime_checkable

from nemo_rl_mcore.config.custom_code import custom_code
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError

MOST_CHARS = 100_000
"""Of an observation that the model is shown; each that is cut counts in `episodes/observations_cut`."""

type Rewards = Iterable[SupportsFloat | None]
"""A list, a tensor or an array, of a number an answer."""


class EnvironmentReturn(NamedTuple):
    """What an environment says to B answers, after NeMo RL's tuple of this name.

    observations: a message each, with `role` and `content`; not read where the episode ends. metadata: given back with
    the next answer. next_stop_strings: end the next answer besides those of the recipe. rewards: fp [B] of these
    answers, or several such by name; an episode's is their sum. None among them ends the episode, which is then not
    scored, where the recipe has `env.unscored: drop`. terminateds: a truth value each, the episode is over. answers:
    what was read of the texts.
    """

    observations: Sequence[Mapping[str, str] | None]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[Sequence[str] | None]
    rewards: Rewards | Mapping[str, Rewards]
    terminateds: Iterable[object]
    answers: Sequence[str | None] | None = None


class EnvironmentInterface(Protocol):
    """What takes part in episodes of several turns."""

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Reply to the last message of each log; nothing may be kept between calls but in the metadata.

        message_log_batch: messages with `role` and `content`; an answer also has `finished`, whether it ended by
        itself. metadata: what was said to the answer before; to the first one `prompt`, `answer`, `index` and `source`
        of the prompt, as a dict.
        """
        ...


class ScoresAnswers(Protocol):
    """An environment that only scores: an episode is one answer."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> Sequence[float | None]:
        """Return one reward a response; `finished` says that it ended by itself, not at the length limit.

        None is of an answer that is not scored, where the recipe has `env.unscored: drop`.
        """
        ...


type Environment = EnvironmentInterface | ScoresAnswers


@dataclass(frozen=True)
class Vote:
    """The answer that is read of a response, and the number of the first response that gives an equal one.

    Both are None for a response without an answer.
    """

    answer: str | None
    first: int | None


@runtime_checkable
class ReadsAnswers(Protocol):
    """An environment that looks for the answer in a response."""

    def votes(self, responses: Sequence[str]) -> list[Vote]:
        """Return the vote of each response to one prompt."""
        ...


def votes_of(environment: Environment, responses: Sequence[str]) -> list[Vote]:
    """Return the votes of responses to one prompt; where the environment reads no answers, equal texts are equal."""
    if isinstance(environment, ReadsAnswers):
        return environment.votes(responses)
    return [Vote(response, responses.index(response)) for response in responses]


_LONGEST_ROLE = 100
_ONE = ""
"""The name of a reward that has none."""


@dataclass(frozen=True)
class LocalEnvironments:
    """Environments in this process, which take no time: what they raise passes through.

    weights: of rewards by name, 1 where there is none.
    """

    environment: Environment
    weights: Mapping[str, float] | None = None

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        return replies_of(self.environment, turns, self.weights or {})

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        return self.replies(turns)

    def take_counts(self) -> dict[str, float]:
        return {}

    @property
    def drop_reasons(self) -> dict[str, int]:
        return {}


def replies_of(
    environment: Environment, turns: Sequence[Turn], weights: Mapping[str, float], max_chars: int = MOST_CHARS
) -> list[Reply]:
    """Return the reply to each turn. weights: of rewards by name. max_chars: at which an observation is cut.

    Raises ValueError for a return that is not one value a turn, RunStoppedError for a weight of a reward that there is
    not and for a reward whose name is not printable, and what the environment raises.
    """
    if not turns:
        return []
    if not hasattr(environment, "step"):
        _require_rewards(weights, ())
        scores = cast("ScoresAnswers", environment).score(
            [turn.prompt for turn in turns],
            [turn.answer for turn in turns],
            [turn.finished for turn in turns],
        )
        given = [number_or_none(score) for score in _one_each("score", scores, len(turns))]
        return [Reply(0.0, unscored=True) if score is None else Reply(score) for score in given]
    logs: list[list[dict[str, Any]]] = []
    metadata: list[Any] = []
    for turn in turns:
        shown = turn.messages
        logs.append([{**message.fields(parsed=False), "content": message.content} for message in shown])
        logs[-1][-1]["finished"] = turn.finished
        prompt, known = turn.prompt, turn.metadata
        if known is None:
            known = {"prompt": prompt.text, "answer": prompt.answer, "index": prompt.index}
            known |= {"source": prompt.source} | ({"columns": prompt.columns} if prompt.columns else {})
        metadata.append(known)
    returned = cast("EnvironmentInterface", environment).step(logs, metadata)
    replies = read_return(returned, len(turns), weights)
    for place, reply in enumerate(replies):
        kept = tuple(replace(said, content=said.content[:max_chars]) for said in reply.observation)
        cut = sum(len(said.content) for said in reply.observation) - sum(len(said.content) for said in kept)
        if cut:
            replies[place] = replace(reply, observation=kept, cut=cut)
    return replies


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
        observation: tuple[Message, ...] = ()
        if (said := observations[place]) is not None:
            role = _text("an observation's role", said["role"])
            if len(role) > _LONGEST_ROLE:
                raise ValueError(
                    f"an observation's role has {len(role)} characters, and {_LONGEST_ROLE} are the most"
                )
            observation = (Message(role, _text("an observation", said["content"])),)
        if isinstance(stops := stop_strings[place], str):
            raise ValueError(f"next_stop_strings: {stops!r} is one text, and each answer has a list of them")
        stops = tuple(_text("next_stop_strings", text) for text in stops or ())
        if "" in stops:
            raise ValueError("next_stop_strings: an empty text would end every answer")
        replies.append(
            Reply(
                reward=math.fsum(weights.get(name, 1.0) * value for name, value in parts.items()),
                unscored=unscored,
                terminated=bool(terminateds[place]),
                observation=observation,
                metadata=metadata[place],
                stop_strings=stops,
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


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r:.80} is no text")
    value.encode()  # halves of a character are none, and raise a ValueError
    return value
