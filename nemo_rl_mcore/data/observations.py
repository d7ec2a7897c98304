"""What an environment says, as the token ids that stand between a sampled answer and the next one.

Sampled ids are never encoded again: the chat template is asked what it writes after an answer, whatever that is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Protocol

from nemo_rl_mcore.data.answers import content_ids
from nemo_rl_mcore.data.chat import ASSISTANT, USER, asked, joined, rendered, rewritten
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Extras, Message, Rendered, Tools
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError

_ENVIRONMENT = "environment"
_ASKED = Message(USER, "question")
_ANSWER = "some-answer-7319"
"""A text that no template writes or cuts."""
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"
_CONTENT = "some-content-4821"
_KEY = "data.apply_chat_template"
_ANSWERS = ("the answer", "<think>\nthe thought\n</think>\n\nthe answer")


class Observer(Protocol):
    """Turns observations into token ids."""

    def ids_of(self, answer_ids: Sequence[int], observation: Sequence[Message]) -> list[int]:
        """Return the ids between a sampled answer, its end of sequence or stop string included, and the next answer.

        Raises ValueError for what the tokenizer or its template does not take.
        """
        ...

    def whole_prompt(
        self, prompt: Prompt, messages: Sequence[Message], observation: Sequence[Message]
    ) -> list[int] | None:
        """Return the ids of all messages, of which the last is an answer, and the observation; None for those at hand.

        messages: what a prompt shows, and what was said since, the first answer as it was sampled.

        They are others where a template shows earlier turns in another way once more follows, as one does that drops
        earlier thoughts. Raises ValueError as `ids_of`.
        """
        ...


def make_observer(tokenizer: Tokenizer, *, chat: bool) -> Observer:
    """chat: observations are messages of the tokenizer's chat template; else plain text, as NeMo RL encodes them."""
    return _Chat(tokenizer, _first_rewritten(tokenizer) is not None) if chat else _PlainText(tokenizer)


@dataclass(frozen=True)
class _PlainText:
    """The contents as they are, one after the other."""

    tokenizer: Tokenizer

    def ids_of(self, answer_ids: Sequence[int], observation: Sequence[Message]) -> list[int]:
        return [token for message in observation for token in content_ids(message.content, self.tokenizer)]

    def whole_prompt(
        self, prompt: Prompt, messages: Sequence[Message], observation: Sequence[Message]
    ) -> None:
        """See `Observer.whole_prompt`: nothing is rewritten."""


@dataclass(frozen=True)
class _Chat:
    """The end of the assistant's turn as far as it was not sampled, the observation, and the generation prompt.

    The role `environment` is shown as `user` by a template that does not know it. rewrites: whether the template may
    show earlier turns in another way.
    """

    tokenizer: Tokenizer
    rewrites: bool

    def ids_of(self, answer_ids: Sequence[int], observation: Sequence[Message]) -> list[int]:
        """See `Observer.ids_of`; ValueError also for a role that the template refuses or leaves out."""
        known = [self._in_known_role(message) for message in observation]
        behind = _behind_answer(self.tokenizer, known, add_generation_prompt=True)
        return _ids_behind(self.tokenizer, answer_ids, behind, end_of_answers(self.tokenizer))

    def whole_prompt(
        self, prompt: Prompt, messages: Sequence[Message], observation: Sequence[Message]
    ) -> list[int] | None:
        tools = prompt.extras.tools
        if not (self.rewrites or tools):
            return None
        *before, answer = messages
        if len(before) == len(prompt.context):
            shown = asked(before, self.tokenizer, prompt.extras)
        else:
            shown = rendered(joined(before, prompt), self.tokenizer, add_generation_prompt=True, tools=tools)
        said = [*joined(messages, prompt), *map(self._in_known_role, observation)]
        whole = rendered(said, self.tokenizer, add_generation_prompt=True, tools=tools)
        if whole.text.startswith(shown.text + answer.content):
            return None
        return self.tokenizer.encode(whole.text, whole.literal)

    def _in_known_role(self, message: Message) -> Message:
        if _knows(self.tokenizer, message.role):
            return message
        if message.role == _ENVIRONMENT:
            return replace(message, role=USER)
        raise RefusedError(
            f"{_KEY}: the chat template does not show messages of the role {message.role!r}, in which the "
            f"environment answers; give them the role {USER!r} or {_ENVIRONMENT!r}",
            code="unknown-role",
        )


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered, in which some of the answers were sampled.

    tools: functions that answers may call, see `Tokenizer.render_chat`. goes_on: the last message is the beginning of
    the answer; else one that is an assistant's is followed by another one.
    """

    tokenizer: Tokenizer
    messages: Sequence[Message]
    tools: Tools = ()
    goes_on: bool = False

    @cached_property
    def shown(self) -> Rendered:
        """Return all of it, up to the beginning of the next answer, as the template shows it."""
        return asked(self.messages, self.tokenizer, Extras(self.tools, own_turn=not self.goes_on))

    def ids_behind(self, place: int, answer_ids: Sequence[int]) -> list[int] | None:
        """Return the ids between the answer `messages[place]`, whose ids were sampled, and the next answer.

        None where what was shown up to that answer, its thoughts included, is not shown so any more; then the
        conversation has to be encoded again.
        """
        before = self._beginning(place, add_generation_prompt=True)
        answered = self._beginning(place + 1, add_generation_prompt=False)
        if not (self.shown.begins_with(before) and self.shown.begins_with(answered)):
            return None
        said, thought = self.messages[place], self.messages[place].reasoning.strip()
        in_content, ends, _ = said.content.partition(_THOUGHT_ENDS)
        if ends and not thought:
            thought = in_content.strip().removeprefix(_THOUGHT_BEGINS).strip()
        if thought not in answered.text[len(before.text) :]:
            return None
        end = self._end_of(answered, behind=len(before.text))
        if end is None:
            return None
        behind = self.shown.part(len(answered.text) - len(end))
        return _ids_behind(self.tokenizer, answer_ids, behind, end)

    def _beginning(self, count: int, *, add_generation_prompt: bool) -> Rendered:
        return rendered(
            self.messages[:count],
            self.tokenizer,
            add_generation_prompt=add_generation_prompt,
            tools=self.tools,
        )

    def _end_of(self, answered: Rendered, behind: int) -> str | None:
        """Return what the template has written after the last answer; None where that cannot be told.

        It ends other answers in another way: calls of tools, for one.
        """
        if answered.text.endswith(end := end_of_answers(self.tokenizer)):
            return end
        tokens = map(self.tokenizer.text_of, ([end] for end in self.tokenizer.ends))
        starts = (answered.text.rfind(token, behind) for token in tokens if token)
        spelt = [range(*span) for span in answered.literal]
        found = [start for start in starts if start >= 0 and not any(start in span for span in spelt)]
        return answered.text[min(found) :] if found else None


def require_append_only(tokenizer: Tokenizer, name: str) -> None:
    """Check that the chat template shows the beginning of a conversation the same, however it goes on.

    name: of the tokenizer, for the message. Raises ValueError, with the first text that differs, where it does not:
    then an episode is several rows.
    """
    if (difference := _first_rewritten(tokenizer)) is not None:
        raise RefusedError(
            f"{_KEY}: the chat template of {name} rewrites earlier turns, so that an episode is several rows, of which "
            f"a critic cannot say what the next one is worth: {difference}; use a template that keeps earlier turns as "
            "they were, or grpo",
            code="rewritten-turns",
        )


def _first_rewritten(tokenizer: Tokenizer) -> str | None:
    """Return where the template shows some beginning of a conversation in another way once more follows."""
    others = [role for role in ("tool", _ENVIRONMENT) if _knows(tokenizer, role)]
    for role in (USER, *others):
        for answer in _ANSWERS:
            turn = (Message(ASSISTANT, answer), Message(role, "the reply"))
            if (found := _rewritten_in(tokenizer, [_ASKED, *turn * 2, turn[0]])) is not None:
                return found
    return None


def _rewritten_in(tokenizer: Tokenizer, messages: Sequence[Message]) -> str | None:
    shown = [
        tokenizer.render_chat(messages[:count], add_generation_prompt=messages[count - 1].role != ASSISTANT)
        for count in range(1, len(messages) + 1)
    ]
    for count, (before, after) in enumerate(pairwise(shown), start=1):
        if (difference := rewritten(before, after)) is not None:
            return f"{difference}, when message {count + 1} ({messages[count].role}) follows"
    return None


@lru_cache(maxsize=8)
def end_of_answers(tokenizer: Tokenizer) -> str:
    """Return what the template writes after an answer that nothing follows."""
    return _behind_answer(tokenizer, (), add_generation_prompt=False).text


def _behind_answer(
    tokenizer: Tokenizer, observation: Sequence[Message], *, add_generation_prompt: bool
) -> Rendered:
    """Return what the template writes after an answer, whatever that is."""
    messages = [_ASKED, Message(ASSISTANT, _ANSWER), *observation]
    shown = rendered(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    before, answer, _ = shown.text.partition(_ANSWER)
    return shown.part(len(before) + len(answer))


def _ids_behind(tokenizer: Tokenizer, answer_ids: Sequence[int], behind: Rendered, end: str) -> list[int]:
    """Return the ids of what stands after an answer, from the end of its turn on, as far as it was not sampled."""
    whole = tokenizer.encode(behind.text, behind.literal)
    if not end and [*answer_ids[-1:]] == whole[:1] and whole[0] in tokenizer.ends:
        return whole[1:]  # the template ends a turn only once another one follows
    # A token that joins the end of the turn to what follows is of neither.
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(tokenizer.encode(end), whole, strict=False))
    return whole[_sampled(answer_ids, [token for token, _ in equal], tokenizer.ends) :]


def _knows(tokenizer: Tokenizer, role: str) -> bool:
    """Return whether the template shows messages of a role; those of other ones it may refuse, or leave out."""
    try:
        shown = _behind_answer(tokenizer, [Message(role, _CONTENT)], add_generation_prompt=True)
    except ValueError:
        return False
    return _CONTENT in shown.text


def _sampled(answer_ids: Sequence[int], end: Sequence[int], ends: Collection[int]) -> int:
    """Return how many of the ids that end a turn the answer has sampled itself. ends: see `Tokenizer.ends`."""
    if answer_ids and answer_ids[-1] in ends and answer_ids[-1] in end:
        return end.index(answer_ids[-1]) + 1
    longest = min(len(answer_ids), len(end))
    counts = (count for count in range(longest, 0, -1) if [*answer_ids[-count:]] == [*end[:count]])
    return next(counts, 0)
