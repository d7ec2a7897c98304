"""Conversations in a tokenizer's chat template, and the ids between two sampled answers.

Sampled ids are never encoded again; the chat template supplies the text after an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product, takewhile

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import (
    Message,
    Rendered,
    Seal,
    Tools,
    contents,
    literal_spans,
    pattern_of,
    with_strings,
)
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError

USER, ASSISTANT = "user", "assistant"
SHOWN_TEXT = 40
_ENVIRONMENT = "environment"
_ASKED = Message(USER, "question")
_ANSWER = "some-answer-7319"
"""No template writes this text, or cuts it."""
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"
_CONTENT = "some-content-4821"
_KEY = "data.apply_chat_template"
_ANSWERS = ("the answer", "<think>\nthe thought\n</think>\n\nthe answer")


def with_template(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """Render the prompt's context with the chat template; plain text becomes a user message."""
    context = prompt.context or (Message(USER, prompt.text, prompt.frame),)
    shown = asked(context, tokenizer, prompt.tools, own_turn=prompt.own_turn)
    return replace(prompt, context=context, text=shown.text, literal=shown.literal)


def asked(
    context: Sequence[Message], tokenizer: Tokenizer, tools: Tools = (), *, own_turn: bool = False
) -> Rendered:
    """Render a conversation up to the answer; a final assistant message is left open, to be continued."""
    if not is_begun(context, own_turn=own_turn):
        return rendered(context, tokenizer, add_generation_prompt=True, tools=tools)
    *before, begun = context
    if begun.tool_calls or (begun.reasoning and not begun.content.strip()):
        raise RefusedError(
            "a prompt ends with an assistant's message that has tool_calls, or reasoning_content alone, and an answer "
            "can go on with content; end the prompt with what answers it, or with content",
            code="begun-answer",
        )
    if begun.content.strip():
        return rendered(context, tokenizer, add_generation_prompt=False, tools=tools, goes_on=True)
    shown = rendered(before, tokenizer, add_generation_prompt=True, tools=tools)
    return Rendered(shown.text + begun.content, shown.literal)


def is_begun(context: Sequence[Message], *, own_turn: bool) -> bool:
    return bool(context) and context[-1].role == ASSISTANT and not own_turn


def rendered(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    tools: Tools = (),
    goes_on: bool = False,
) -> Rendered:
    """Render a conversation with the chat template; special tokens spelled out in messages and tools stay text.

    goes_on: leave the last message open. Null content is passed as null, since some templates distinguish it from
    empty content, unless the template then fails or writes None.
    """
    tokens, texts = tuple(tokenizer.special_tokens), contents(messages, tools)
    seal = None
    if tokens and any(map(pattern_of(tokens).search, texts)):
        seal = Seal(tokens, [message.content for message in messages] + texts)
        messages = [message.with_texts(seal.close) for message in messages]
        tools = with_strings([*tools], seal.close)
    how = {"add_generation_prompt": add_generation_prompt, "goes_on": goes_on}
    text, shown = None, partial(tokenizer.render_chat, tools=tools, **how)
    if any(message.null for message in messages):
        with suppress(ValueError):
            text = shown(messages)
        messages = [replace(message, null=False) for message in messages]
    if text is None or "None" in text:
        empty = shown(messages)
        text = empty if text is None or empty.count("None") < text.count("None") else text
    return seal.open(text) if seal else Rendered(text)


def rewritten(before: str, after: str) -> str | None:
    """Describe the first difference between two renderings; None if `after` begins with `before`."""
    if after.startswith(before):
        return None
    place = first_difference(before, after)
    was, is_now = (text[place : place + SHOWN_TEXT] for text in (before, after))
    return f"after {before[:place][-SHOWN_TEXT:]!r} stood {was!r} and then stands {is_now!r}"


def first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Observer:
    """Turns observations into token ids.

    With `chat`, these are the unsampled end of the assistant's turn, the observation in the chat template, and the
    generation prompt; `environment` becomes `user` if the template lacks that role. Otherwise they are plain text,
    as in NeMo RL. rewrites: the template may change earlier turns.
    """

    tokenizer: Tokenizer
    chat: bool
    rewrites: bool = False

    def ids_of(self, answer_ids: Sequence[int], observation: Sequence[Message]) -> list[int]:
        """Return the ids between a sampled answer (end token included) and the next one; raises ValueError."""
        tokenizer = self.tokenizer
        if not self.chat:
            ids = list[int]()
            for message in observation:
                spelt = literal_spans(message.content, tokenizer.special_tokens)
                ids += tokenizer.encode(message.content, spelt)
            return ids
        behind = _behind_answer(tokenizer, self._in_known_roles(observation), add_generation_prompt=True)
        return _ids_behind(tokenizer, answer_ids, behind, end_of_answers(tokenizer))

    def whole_prompt(
        self, prompt: Prompt, messages: Sequence[Message], observation: Sequence[Message]
    ) -> list[int] | None:
        """Encode the whole conversation again if the template rewrites it; None if the ids so far stay valid.

        A template that drops earlier thoughts rewrites it. messages: from the prompt on, ending with the answer.
        Raises ValueError as `ids_of` does.
        """
        tools, start, answer = prompt.tools, len(prompt.context), messages[-1].content
        if not self.chat or not (self.rewrites or tools):
            return None
        shown = None
        if len(messages) - 1 == start:
            shown = asked(prompt.context, self.tokenizer, tools, own_turn=prompt.own_turn)
        if is_begun(
            prompt.context, own_turn=prompt.own_turn
        ):  # the answer continues the prompt's last message
            first = replace(messages[start], content=messages[start - 1].content + messages[start].content)
            messages = [*messages[: start - 1], first, *messages[start + 1 :]]
        if shown is None:
            shown = rendered(messages[:-1], self.tokenizer, add_generation_prompt=True, tools=tools)
        said = [*messages, *self._in_known_roles(observation)]
        whole = rendered(said, self.tokenizer, add_generation_prompt=True, tools=tools)
        if whole.text.startswith(shown.text + answer):
            return None
        return self.tokenizer.encode(whole.text, whole.literal)

    def _in_known_roles(self, observation: Sequence[Message]) -> list[Message]:
        known = list[Message]()
        for message in observation:
            if not _knows(self.tokenizer, message.role):
                if message.role != _ENVIRONMENT:
                    raise RefusedError(
                        f"{_KEY}: the chat template does not show messages of the role {message.role!r}, in which the "
                        f"environment answers; give them the role {USER!r} or {_ENVIRONMENT!r}",
                        code="unknown-role",
                    )
                message = replace(message, role=USER)
            known.append(message)
        return known


def make_observer(tokenizer: Tokenizer, *, chat: bool) -> Observer:
    return Observer(tokenizer, chat, rewrites=chat and _first_rewritten(tokenizer) is not None)


@dataclass(frozen=True)
class Conversation:
    """A conversation that awaits an answer, in which some earlier answers were sampled.

    goes_on: the answer continues the last message; otherwise it is a new message, even after an assistant message.
    """

    tokenizer: Tokenizer
    messages: Sequence[Message]
    tools: Tools = ()
    goes_on: bool = False

    @cached_property
    def shown(self) -> Rendered:
        return asked(self.messages, self.tokenizer, self.tools, own_turn=not self.goes_on)

    def ids_behind(self, place: int, answer_ids: Sequence[int]) -> list[int] | None:
        """Return the ids from the sampled `messages[place]` to the next answer; None if the template rewrites it."""
        before, answered = (
            rendered(self.messages[:count], self.tokenizer, add_generation_prompt=asking, tools=self.tools)
            for count, asking in ((place, True), (place + 1, False))
        )
        if not (self.shown.begins_with(before) and self.shown.begins_with(answered)):
            return None
        said, thought = self.messages[place], self.messages[place].reasoning.strip()
        in_content, ends, _ = said.content.partition(_THOUGHT_ENDS)
        if ends and not thought:
            thought = in_content.strip().removeprefix(_THOUGHT_BEGINS).strip()
        if thought not in answered.text[len(before.text) :]:
            return None
        end = end_of_answers(self.tokenizer)
        if not answered.text.endswith(end):
            # The template ends some answers differently, such as tool calls.
            tokens = [text for one in self.tokenizer.ends if (text := self.tokenizer.text_of([one]))]
            starts = [answered.text.rfind(token, len(before.text)) for token in tokens]
            spelt = [range(*span) for span in answered.literal]
            found = [start for start in starts if start >= 0 and not any(start in span for span in spelt)]
            if not found:
                return None
            end = answered.text[min(found) :]
        behind = self.shown.part(len(answered.text) - len(end))
        return _ids_behind(self.tokenizer, answer_ids, behind, end)


def require_append_only(tokenizer: Tokenizer, name: str) -> None:
    """Raise ValueError for a chat template that rewrites earlier turns; name: the tokenizer's name in the message."""
    if (difference := _first_rewritten(tokenizer)) is not None:
        raise RefusedError(
            f"{_KEY}: the chat template of {name} rewrites earlier turns, so that an episode is several rows, of which "
            f"a critic cannot say what the next one is worth: {difference}; use a template that keeps earlier turns as "
            "they were, or grpo",
            code="rewritten-turns",
        )


def _first_rewritten(tokenizer: Tokenizer) -> str | None:
    """Describe the first earlier turn that the template rewrites in trial conversations; None if it keeps them all."""
    others = [role for role in ("tool", _ENVIRONMENT) if _knows(tokenizer, role)]
    for role, answer in product((USER, *others), _ANSWERS):
        turn = (Message(ASSISTANT, answer), Message(role, "the reply"))
        messages, before = [_ASKED, *turn * 2, turn[0]], ""
        for place, message in enumerate(messages):
            asking = message.role != ASSISTANT
            after = tokenizer.render_chat(messages[: place + 1], add_generation_prompt=asking)
            if (difference := rewritten(before, after)) is not None:
                return f"{difference}, when message {place + 1} ({message.role}) follows"
            before = after
    return None


@lru_cache(maxsize=8)
def end_of_answers(tokenizer: Tokenizer) -> str:
    """Return the template's text after a conversation's last answer."""
    return _behind_answer(tokenizer, (), add_generation_prompt=False).text


def _behind_answer(
    tokenizer: Tokenizer, observation: Sequence[Message], *, add_generation_prompt: bool
) -> Rendered:
    messages = [_ASKED, Message(ASSISTANT, _ANSWER), *observation]
    shown = rendered(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    before, answer, _ = shown.text.partition(_ANSWER)
    return shown.part(len(before) + len(answer))


def _ids_behind(tokenizer: Tokenizer, answer_ids: Sequence[int], behind: Rendered, end: str) -> list[int]:
    """Encode the text after an answer, without the end-of-turn ids that the model already sampled."""
    whole = tokenizer.encode(behind.text, behind.literal)
    if not end and [*answer_ids[-1:]] == whole[:1] and whole[0] in tokenizer.ends:
        return whole[1:]  # the template ends a turn only once another one follows
    # A token that joins the turn's end to the text after it belongs to neither.
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(tokenizer.encode(end), whole, strict=False))
    ending = [token for token, _ in equal]
    if answer_ids and answer_ids[-1] in tokenizer.ends and answer_ids[-1] in ending:
        return whole[ending.index(answer_ids[-1]) + 1 :]
    longest = min(len(answer_ids), len(ending))
    sampled = (count for count in range(longest, 0, -1) if [*answer_ids[-count:]] == ending[:count])
    return whole[next(sampled, 0) :]


def _knows(tokenizer: Tokenizer, role: str) -> bool:
    """Return true if the template renders messages with this role instead of rejecting or omitting them."""
    try:
        shown = _behind_answer(tokenizer, [Message(role, _CONTENT)], add_generation_prompt=True)
    except ValueError:
        return False
    return _CONTENT in shown.text
