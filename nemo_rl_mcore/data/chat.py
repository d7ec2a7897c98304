"""Conversations as the chat template of a tokenizer shows them to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.literal_text import Rendered, Seal, contents, pattern_of
from nemo_rl_mcore.data.messages import Message, with_strings
from nemo_rl_mcore.data.token_rows import TokenRow
from nemo_rl_mcore.data.tokenizer import Tokenizer, Tools
from nemo_rl_mcore.errors import RefusedError

USER, ASSISTANT = "user", "assistant"
_SHOWN_TEXT = 40


def with_template(prompt: Prompt, tokenizer: Tokenizer, frame: tuple[int, int] = (0, 0)) -> Prompt:
    """Return the prompt with the text that the template makes of its context; a plain text is a user's message.

    frame: of a plain text, see `Message.frame`.
    """
    context = prompt.context or (Message(USER, prompt.text, frame),)
    shown = rendered(context, tokenizer, add_generation_prompt=True)
    return replace(prompt, context=context, text=shown.text, literal=shown.literal)


def rendered(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools = ()
) -> Rendered:
    """Return a conversation's text by the chat template; special tokens that messages and tools spell stay text."""
    tokens, texts = tuple(tokenizer.special_tokens), [*contents(messages)]
    with_strings([*tools], lambda text: texts.append(text) or text)
    if tokens and any(map(pattern_of(tokens).search, texts)):
        seal = Seal(tokens, [message.content for message in messages] + texts)
        messages = [message.with_texts(seal.close) for message in messages]
        tools = with_strings([*tools], seal.close)
    else:
        seal = None
    text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
    return seal.open(text) if seal else Rendered(text)


def _ids(messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool) -> list[int]:
    shown = rendered(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(shown.text, shown.literal)


def conversation_row(
    context: Sequence[Message], answer: str, tokenizer: Tokenizer, *, imitate_all: bool
) -> TokenRow:
    """Tokens of a conversation that ends with the answer; trained on are the assistant's, the answer's alone or all.

    A turn is trained on from after the generation prompt to its end of sequence, or to its end where the template
    writes none; `GivenAnswers.imitated` may take in what the template writes around that, and `add_eos` an end of
    sequence at the end of the row. Raises ValueError when the template shows a turn in another way once others follow
    it: its tokens are then not those that the model answers with.
    """
    messages = [*context, Message(ASSISTANT, answer)]
    shown = rendered(messages, tokenizer, add_generation_prompt=False)
    ids, imitated = tokenizer.encode(shown.text, shown.literal), tokenizer.answers.imitated
    trained = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message.role != ASSISTANT or not (imitate_all or turn == len(messages) - 1):
            continue
        asked = imitated != "turn"
        start = _length_of_beginning(ids, messages[:turn], tokenizer, add_generation_prompt=asked)
        end = _length_of_beginning(ids, messages[: turn + 1], tokenizer, add_generation_prompt=False)
        if imitated == "answer":
            end = _behind_last(ids, tokenizer.eos_token_id, start, end)
        trained[start:end] = [True] * (end - start)
    ended = shown.text.rstrip("\n").endswith(tokenizer.text_of([tokenizer.eos_token_id]))
    if tokenizer.answers.add_eos and not ended:
        ids, trained = [*ids, tokenizer.eos_token_id], [*trained, True]
    return TokenRow(ids, trained)


def rewritten(before: str, after: str) -> str | None:
    """Return where a rendering differs from that of fewer messages, and both texts there; None if it begins with it."""
    if after.startswith(before):
        return None
    place = next(
        (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after)
    )
    was, is_now = (text[place : place + _SHOWN_TEXT] for text in (before, after))
    return f"after {before[:place][-_SHOWN_TEXT:]!r} stood {was!r} and then stands {is_now!r}"


def _length_of_beginning(
    ids: Sequence[int], messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool
) -> int:
    beginning = _ids(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    if list(ids[: len(beginning)]) != beginning:
        raise RefusedError(
            f"data.apply_chat_template: the chat template does not show the first {len(messages)} messages of a "
            "conversation as it shows them alone, so that the assistant's tokens cannot be told; use a template "
            "that keeps earlier turns as they were",
            code="rewritten-turns",
        )
    return len(beginning)


def _behind_last(ids: Sequence[int], wanted: int, start: int, end: int) -> int:
    places = [place for place in range(start, end) if ids[place] == wanted]
    return places[-1] + 1 if places else end
