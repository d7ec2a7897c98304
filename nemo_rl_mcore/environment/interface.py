"""What an environment implements: replies to each answer of an episode, or a score for one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nemo_rl_mcore.data.datasets import Prompt

if TYPE_CHECKING:
    from torch import Tensor

type Rewards = Tensor | Sequence[float | None]


class EnvironmentReturn(NamedTuple):
    """What an environment says to B answers, after NeMo RL's tuple of this name.

    observations: a message each, with `role` and `content`; not read where the episode ends. metadata: given back with
    the next answer. next_stop_strings: end the next answer besides those of the recipe. rewards: fp [B] of these
    answers, or several such by name; an episode's is their sum. None among them ends the episode, which is then not
    scored, where the recipe has `env.unscored: drop`. terminateds: bool [B], the episode is over. answers:
    what was read of the texts.
    """

    observations: Sequence[Mapping[str, str] | None]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[Sequence[str] | None]
    rewards: Rewards | Mapping[str, Rewards]
    terminateds: Tensor
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
