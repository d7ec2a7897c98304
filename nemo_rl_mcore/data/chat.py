"""Conversations as the chat template of a tokenizer shows them to the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import batched

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.literal_text import Rendered, Seal, contents, pattern_of
from nemo_rl_mcore.data.messages import NO_EXTRAS, Extras, Message, Tools, with_strings
from nemo_rl_mcore.data.token_rows import TokenRow
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError

USER, ASSISTANT = "user", "assistant"
_SHOWN_TEXT = 40
_OTHERS = ("0", "1")
"""Contents, one of which begins in another way than any content."""


def with_template(prompt: Prompt, tokenizer: Tokenizer, frame: tuple[int, int] = (0, 0)) -> Prompt:
    """Return the prompt with the text that the template makes of its context; a plain text is a user's message.

    frame: of a plain text, see `Message.frame`.
    """
    context = prompt.context or (Message(USER, prompt.text, frame),)
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
    tokens, texts = tuple(tokenizer.special_tokens), [*contents(messages)]
    with_strings([*tools], lambda text: texts.append(text) or text)
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


def conversation_row(
    context: Sequence[Message],
    answer: str | Message,
    tokenizer: Tokenizer,
    *,
    imitate_all: bool,
    extras: Extras = NO_EXTRAS,
) -> TokenRow:
    """Tokens of a conversation that ends with the answer; trained on are the assistant's, the answer's alone or all.

    A turn is trained on from after the generation prompt to the last end of an answer, or to its end where the template
    writes none; `GivenAnswers.imitated` may take in what the template writes around that, and `add_eos` an end of
    sequence at the end of the row. Where a turn begins and ends is found in the text: a template that shows a turn in
    another way once others follow it, so that its tokens are not those that the model answers with, is refused by a
    ValueError.
    """
    turn = Message(ASSISTANT, answer) if isinstance(answer, str) else answer
    messages = [*context, turn]
    if is_begun(context, extras):
        messages = [*context[:-1], replace(turn, content=context[-1].content + turn.content, null=False)]
    shown = rendered(messages, tokenizer, add_generation_prompt=False, tools=extras.tools)
    own_turn, borders = replace(extras, own_turn=True), list[int]()
    for place, message in enumerate(messages):
        last = place == len(messages) - 1
        if message.role == ASSISTANT and message.trained and (imitate_all or last):
            prompt = (
                asked(context, tokenizer, extras) if last else asked(messages[:place], tokenizer, own_turn)
            )
            borders += _borders(shown, messages, place, prompt, tokenizer, extras.tools)
    ids, places = _parted(shown, borders, tokenizer)
    trained = [False] * len(ids)
    for start, end in batched(places, 2):
        if tokenizer.answers.imitated == "answer":
            end = _behind_last(ids, tokenizer.ends, start, end)
        trained[start:end] = [True] * (end - start)
    ended = shown.text.rstrip("\n").endswith(tokenizer.text_of([tokenizer.eos_token_id]))
    if tokenizer.answers.add_eos and not ended:
        ids, trained = [*ids, tokenizer.eos_token_id], [*trained, turn.trained]
    return TokenRow(ids, trained)


def _borders(
    shown: Rendered,
    messages: Sequence[Message],
    place: int,
    prompt: Rendered,
    tokenizer: Tokenizer,
    tools: Tools,
) -> tuple[int, int]:
    """Return where in the text a turn begins and ends; prompt: what is shown before it is answered."""
    before = rendered(messages[:place], tokenizer, add_generation_prompt=False, tools=tools)
    opening, start = prompt.text.removeprefix(before.text), prompt
    if tokenizer.answers.imitated == "turn":
        start = _turns(shown, messages[:place], tokenizer, tools, opening) or before
    if not shown.begins_with(start):
        raise _rewrites(start, shown, place)
    if (ended := _turns(shown, messages[: place + 1], tokenizer, tools, opening)) is not None:
        return len(start.text), len(ended.text)
    if tokenizer.answers.imitated == "answer":
        end, turn = _end_before_next(shown, messages, place, tokenizer, tools), messages[place]
        said = shown.text[len(start.text) : end]
        if said and all(text.strip() in said for text in (turn.content, turn.reasoning)):
            return len(start.text), end
    alone = rendered(messages[: place + 1], tokenizer, add_generation_prompt=False, tools=tools)
    raise _rewrites(alone, shown, place + 1)


def _turns(
    shown: Rendered, messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools, opening: str
) -> Rendered | None:
    """Return the beginning of a conversation that is these messages; None where they are shown in another way alone.

    opening: the generation prompt. Some templates end the last turn of all in another way than those before it; how a
    turn ends that others follow is then seen from what stands before the next generation prompt.
    """
    alone = rendered(messages, tokenizer, add_generation_prompt=False, tools=tools)
    if shown.begins_with(alone):
        return alone
    followed = rendered(messages, tokenizer, add_generation_prompt=True, tools=tools)
    followed = followed.part(0, len(followed.text.removesuffix(opening)))
    return followed if opening and shown.begins_with(followed) else None


def _end_before_next(
    shown: Rendered, messages: Sequence[Message], place: int, tokenizer: Tokenizer, tools: Tools
) -> int:
    """Return where the last end of sequence before the content of the next message ends; 0 where there is none.

    Templates that write a thought of no words into the last turn of all show no other turn alone as they show it here.
    """
    said = messages[place + 1].content
    other = replace(messages[place + 1], content=_OTHERS[said.strip()[:1] == _OTHERS[0]], frame=(0, 0))
    changed = [*messages[: place + 1], other, *messages[place + 2 :]]
    others = rendered(changed, tokenizer, add_generation_prompt=False, tools=tools)
    token = tokenizer.text_of([tokenizer.eos_token_id])
    start = shown.text.rfind(token, 0, _first_difference(shown.text, others.text))
    return (
        0 if start < 0 or any(first <= start < last for first, last in shown.literal) else start + len(token)
    )


def _rewrites(before: Rendered, shown: Rendered, count: int) -> RefusedError:
    difference = rewritten(before.text, shown.text) or "the special tokens that messages spell are others"
    return RefusedError(
        f"data.apply_chat_template: the chat template does not show the first {count} messages of a conversation as it "
        f"shows them alone, so that the assistant's tokens cannot be told: {difference}; use a template that keeps "
        "earlier turns as they were",
        code="rewritten-turns",
    )


def _parted(shown: Rendered, borders: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a text, and how many stand before each border of it, which are in order.

    The text is encoded as one, but for a border that a token would join: what stands before it is encoded as a prompt
    is, and what stands behind it as an answer.
    """

    def encoded(start: int, end: int | None = None) -> list[int]:
        part = shown.part(start, end)
        return tokenizer.encode(part.text, part.literal)

    ids, places, start, rest = list[int](), list[int](), 0, encoded(0)
    for border in borders:
        before = encoded(start, border)
        if rest[: len(before)] != before:
            behind = encoded(border)
            if tokenizer.text_of([*before, *behind]) not in (shown.text[start:], tokenizer.text_of(rest)):
                raise RefusedError(
                    f"data.apply_chat_template: the tokenizer joins what the chat template writes, "
                    f"{shown.text[:border][-_SHOWN_TEXT:]!r}, to what the assistant says, "
                    f"{shown.text[border:][:_SHOWN_TEXT]!r}, and gives other text for the two apart; use a template "
                    "that ends with no blank before an answer",
                    code="joined-tokens",
                )
            ids, start, rest, before = [*ids, *before], border, behind, []
        places.append(len(ids) + len(before))
    return [*ids, *rest], places


def rewritten(before: str, after: str) -> str | None:
    """Return where a rendering differs from that of fewer messages, and both texts there; None if it begins with it."""
    if after.startswith(before):
        return None
    place = _first_difference(before, after)
    was, is_now = (text[place : place + _SHOWN_TEXT] for text in (before, after))
    return f"after {before[:place][-_SHOWN_TEXT:]!r} stood {was!r} and then stands {is_now!r}"


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _behind_last(ids: Sequence[int], wanted: Sequence[int], start: int, end: int) -> int:
    places = [place for place in range(start, end) if ids[place] in wanted]
    return places[-1] + 1 if places else end
