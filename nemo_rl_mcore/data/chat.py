"""Conversations as the chat template of a tokenizer shows them to the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import (
    NO_EXTRAS,
    Extras,
    Message,
    Rendered,
    Seal,
    Tools,
    contents,
    pattern_of,
    with_strings,
)
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError

USER, ASSISTANT = "user", "assistant"
SHOWN_TEXT = 40


def with_template(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """Return the prompt with the text that the template makes of its context; a plain text is a user's message."""
    context = prompt.context or (Message(USER, prompt.text, prompt.frame),)
    shown = asked(context, tokenizer, prompt.extras)
    return replace(prompt, context=context, text=shown.text, literal=shown.literal)


def asked(context: Sequence[Message], tokenizer: Tokenizer, extras: Extras = NO_EXTRAS) -> Rendered:
    """Return what is shown before an answer, up to its beginning; one that the context ends with goes on there."""
    if not is_begun(context, extras):
        return rendered(context, tokenizer, add_generation_prompt=True, tools=extras.tools)
    *before, begun = context
    if begun.tool_calls or (begun.reasoning and not begun.content.strip()):
        raise RefusedError(
            "a prompt ends with an assistant's message that has tool_calls, or reasoning_content alone, and an answer "
            "can go on with content; end the prompt with what answers it, or with content",
            code="begun-answer",
        )
    if begun.content.strip():
        return rendered(context, tokenizer, add_generation_prompt=False, tools=extras.tools, goes_on=True)
    shown = rendered(before, tokenizer, add_generation_prompt=True, tools=extras.tools)
    return Rendered(shown.text + begun.content, shown.literal)


def is_begun(context: Sequence[Message], extras: Extras) -> bool:
    """Return whether a prompt ends with the beginning of its answer."""
    return bool(context) and context[-1].role == ASSISTANT and not extras.own_turn


def joined(messages: Sequence[Message], prompt: Prompt) -> Sequence[Message]:
    """Return the messages of an episode with an answer that its prompt begins, and what was sampled of it, as one."""
    start = len(prompt.context)
    if not is_begun(prompt.context, prompt.extras):
        return messages
    first = replace(messages[start], content=messages[start - 1].content + messages[start].content)
    return [*messages[: start - 1], first, *messages[start + 1 :]]


def rendered(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    tools: Tools = (),
    goes_on: bool = False,
) -> Rendered:
    """Return a conversation's text by the chat template; special tokens that messages and tools spell stay text.

    goes_on: the last message is not ended. A content that is null is shown as null, which some templates tell from an
    empty one, unless they write the word None for it, or fail.
    """
    tokens, texts = tuple(tokenizer.special_tokens), contents(messages, tools)
    seal = None
    if tokens and any(map(pattern_of(tokens).search, texts)):
        seal = Seal(tokens, [message.content for message in messages] + texts)
        messages = [message.with_texts(seal.close) for message in messages]
        tools = with_strings([*tools], seal.close)

    def shown(said: Sequence[Message]) -> str:
        return tokenizer.render_chat(
            said, add_generation_prompt=add_generation_prompt, tools=tools, goes_on=goes_on
        )

    text = None
    if any(message.null for message in messages):
        with suppress(ValueError):
            text = shown(messages)
        messages = [replace(message, null=False) for message in messages]
    if text is None or "None" in text:
        empty = shown(messages)
        text = empty if text is None or empty.count("None") < text.count("None") else text
    return seal.open(text) if seal else Rendered(text)


def rewritten(before: str, after: str) -> str | None:
    """Return where a rendering differs from that of fewer messages, and both texts there; None if it begins with it."""
    if after.startswith(before):
        return None
    place = first_difference(before, after)
    was, is_now = (text[place : place + SHOWN_TEXT] for text in (before, after))
    return f"after {before[:place][-SHOWN_TEXT:]!r} stood {was!r} and then stands {is_now!r}"


def first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
