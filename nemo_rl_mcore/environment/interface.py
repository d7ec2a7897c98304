"""The interface of environments: replies to each answer of an episode, or a score for one answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, SupportsFloat, cast

from nemo_rl_mcore.config.custom_code import custom_code
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.environment.turns import Reply, Turn
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError

MOST_CHARS = 100_000
"""Maximum characters of an observation shown to the model; `episodes/observations_cut` counts longer ones."""

type Rewards = Iterable[SupportsFloat | None]
"""A list, tensor or array with a number per answer."""


class EnvironmentReturn(NamedTuple):
    """Replies to B answers, modelled on NeMo RL's tuple of this name.

    observations: messages with `role` and `content`; ignored at the end of an episode. metadata: passed with the next
    answer. next_stop_strings: end the next answer, besides the recipe's. rewards: fp [B], or several of them by name;
    an episode's reward is their sum. With `env.unscored: drop`, a reward of None ends the episode, which is then not
    scored. terminateds: true at the end of an episode. answers: parsed from the responses.
    """

    observations: Sequence[Mapping[str, str] | None]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[Sequence[str] | None]
    rewards: Rewards | Mapping[str, Rewards]
    terminateds: Iterable[object]
    answers: Sequence[str | None] | None = None


class EnvironmentInterface(Protocol):
    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Reply to the last message of each log; the only state between calls is the metadata.

        message_log_batch: messages with `role` and `content`; an answer also has `finished`, true if it ended by
        itself. metadata: the previous reply's; for the first answer, a dict with the prompt's `prompt`, `answer`,
        `index` and `source`.
        """
        ...


class ScoresAnswers(Protocol):
    """An environment that only scores: an episode is one answer."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> Sequence[float | None]:
        """Return one reward per response; finished: true for those that ended by themselves, not at the length limit.

        With `env.unscored: drop`, a reward of None drops the answer.
        """
        ...


type Environment = EnvironmentInterface | ScoresAnswers


@dataclass(frozen=True)
class Vote:
    """The answer parsed from a response, and the index of the first response with an equal answer.

    Both are None for a response without an answer.
    """

    answer: str | None
    first: int | None


def votes_of(environment: Environment, responses: Sequence[str]) -> list[Vote]:
    """Return the votes of responses to one prompt, by their texts if the environment parses no answers."""
    if hasattr(environment, "votes"):
        return cast("Any", environment).votes(responses)
    return [Vote(response, responses.index(response)) for response in responses]


_LONGEST_ROLE = 100
_ONE = ""


@dataclass(frozen=True)
class LocalEnvironments:
    """An environment in this process, which replies at once; errors propagate.

    weights: reward weights by name, 1 by default.
    """

    environment: Environment
    weights: Mapping[str, float] | None = None
    drop_reasons: Mapping[str, int] = field(default_factory=dict[str, int])

    def replies(self, turns: Sequence[Turn]) -> list[Reply]:
        return replies_of(self.environment, turns, self.weights or {})

    async def replies_soon(self, turns: Sequence[Turn]) -> list[Reply]:
        return self.replies(turns)

    def take_counts(self) -> dict[str, float]:
        return {}


def replies_of(
    environment: Environment, turns: Sequence[Turn], weights: Mapping[str, float], max_chars: int = MOST_CHARS
) -> list[Reply]:
    """Return the reply to each turn. weights: the rewards', by name. max_chars: limit at which an observation is cut.

    Raises ValueError for a return value without one value per turn, RunStoppedError for a weight of an unknown reward
    and for a reward with an unprintable name, and the environment's own errors.
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
        given = [number_of(score, unscored=True) for score in _one_each("score", scores, len(turns))]
        return [Reply(0.0, unscored=True) if score is None else Reply(score) for score in given]
    logs, metadata = list[list[dict[str, Any]]](), list[Any]()
    for turn in turns:
        logs.append(
            [message.fields(parsed=False) | {"content": message.content} for message in turn.messages]
        )
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
    """Return the replies in a return value; raises as `replies_of`."""
    named = isinstance(returned.rewards, Mapping)
    given = cast("Mapping[str, Rewards]", returned.rewards if named else {_ONE: returned.rewards})
    rewards = {
        name: [
            number_of(value, unscored=True) for value in _one_each(f"rewards {name}".strip(), values, turns)
        ]
        for name, values in given.items()
    }
    names = cast("Iterable[object]", rewards)  # the user's; they appear in tables, files and keys
    if wrong := [name for name in names if not isinstance(name, str) or not name.isprintable()]:
        what = f"the environment has a reward with the name {wrong[0]!r:.80}: use printable text"
        raise RunStoppedError(what)
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
                what = f"an observation's role has {len(role)} characters; the maximum is {_LONGEST_ROLE}"
                raise ValueError(what)
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
        what = f"env.reward_weights.{unknown[0]}: no such reward; those of the environment are: {given}"
        raise RunStoppedError(what, code="unknown-reward")


def _one_each(name: str, values: Iterable[Any], turns: int) -> list[Any]:
    listed = [*values]
    if len(listed) != turns:
        raise ValueError(f"{name}: {len(listed)} values for {turns} answers")
    return listed


def number_each(name: str, given: object, prompts: Sequence[int], *, unscored: bool) -> list[float | None]:
    """Validate the user's rewards, one per answer; prompts: the index of each answer's prompt.

    unscored: a reward may be None. Raises CustomCodeError for anything else. name: the code's name in the message.
    """
    count = len(prompts)
    try:
        values = iter(cast("Iterable[object]", given))
    except TypeError as error:
        what = f"{name} returned {given!r:.80}, which is not a list of {count} numbers"
        raise CustomCodeError(what, code="reward-count") from error
    with custom_code(name):  # a generator runs here
        listed = [*values]
    if len(listed) != count:
        what = f"{name} returned {len(listed)} rewards of {count} responses: {listed!r:.80}"
        raise CustomCodeError(what, code="reward-count")
    numbers: list[float | None] = []
    for value, prompt in zip(listed, prompts, strict=True):
        try:
            numbers.append(number_of(value, unscored=unscored))
        except ValueError as error:
            raise CustomCodeError(f"{name}: prompt {prompt}: {error}", code="reward-number") from error
    return numbers


def number_of(value: object, *, unscored: bool) -> float | None:
    """Return a reward as a finite float; raises ValueError for anything else. unscored: None is valid, too."""
    if unscored and value is None:
        return None
    try:
        number = float(cast("float", value))
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "; env.unscored: drop leaves such answers out of training" if value is None else ""
        raise ValueError(f"a reward of {value!r:.80} is not a number{hint}") from error
    if not math.isfinite(number):
        raise ValueError(f"a reward of {number} is not finite")
    return number


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r:.80} is not a string")
    value.encode()  # a lone surrogate raises a ValueError
    return value
