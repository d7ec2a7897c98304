"""Prompts with given answers as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import batched

import torch

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.chat import (
    ASSISTANT,
    SHOWN_TEXT,
    asked,
    first_difference,
    is_begun,
    rendered,
    rewritten,
)
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.data.messages import Message, Rendered, Tools, literal_spans
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.errors import RefusedError


@dataclass(frozen=True)
class TokenRow:
    """A row's tokens; trained: true for each token that the loss reads."""

    ids: Sequence[int]
    trained: Sequence[bool]


def rows_as_batch(rows: Sequence[TokenRow], indices: Sequence[int], pad_token_id: int) -> BatchedDataDict:
    """Return input_ids, token_mask [B, S], right-padded; input_lengths, sample_mask, prompt_index, sample_index [B]."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    input_ids = torch.full((len(rows), int(lengths.max())), pad_token_id)
    token_mask = torch.zeros(input_ids.shape)
    for place, row in enumerate(rows):
        input_ids[place, : len(row.ids)] = torch.tensor(row.ids)
        token_mask[place, : len(row.ids)] = torch.tensor(row.trained).float()
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=lengths,
        token_mask=token_mask,
        sample_mask=torch.ones(len(rows)),
        prompt_index=torch.tensor(list(indices)),
        sample_index=torch.zeros(len(rows), dtype=torch.long),
    )


def given_answers(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> BatchedDataDict:
    rows = [answer_row(prompt, tokenizer) for prompt in prompts]
    return rows_as_batch(rows, [prompt.index for prompt in prompts], tokenizer.pad_token_id)


def answer_row(prompt: Prompt, tokenizer: Tokenizer) -> TokenRow:
    """Encode a prompt with its answer: a conversation by the chat template, a text followed by an end of sequence."""
    if prompt.context:
        return conversation_row(
            prompt.context,
            prompt.answer_message or prompt.imitated,
            tokenizer,
            imitate_all=prompt.imitate_all,
            tools=prompt.tools,
            own_turn=prompt.own_turn,
        )
    before = tokenizer.encode(prompt.text, prompt.literal)
    spelt = literal_spans(prompt.imitated, tokenizer.special_tokens)
    after = [*tokenizer.encode(prompt.imitated, spelt), tokenizer.eos_token_id]
    return TokenRow([*before, *after], [False] * len(before) + [True] * len(after))


def pair_rows(prompt: Prompt, tokenizer: Tokenizer) -> tuple[TokenRow, TokenRow]:
    """Return the rows of a prompt's better and worse answers; raises ValueError for a prompt without a worse one."""
    if prompt.rejected is None:
        raise RefusedError(
            f"prompt {prompt.index} has no rejected answer, which DPO needs without dpo.num_generations_per_prompt",
            code="no-rejected-answer",
        )
    better = replace(prompt, imitate_all=False)
    worse = replace(better, answer=prompt.rejected, solution=None, answer_message=prompt.rejected_message)
    return answer_row(better, tokenizer), answer_row(worse, tokenizer)


@dataclass(frozen=True)
class PreferenceSource:
    """A DPO run's pairs: one for each prompt, in 2 rows, chosen then rejected.

    made_up: prompts are of an embedded task, without rejected answers; the right answer is then paired with one whose
    first and last digits are swapped or, if they are equal, whose last digit is changed.
    """

    prompts: PromptSource
    tokenizer: Tokenizer
    made_up: bool = False

    def train_batch(self, step: int, pairs: int) -> BatchedDataDict:
        """Draw different pairs; the same (seed, step) gives the same ones."""
        return self.rows(self.prompts.train_batch(step, pairs))

    def rows(self, prompts: Sequence[Prompt]) -> BatchedDataDict:
        """Return the prompts' pairs as `rows_as_batch` does; raises ValueError for a prompt without a pair."""
        rows, indices = list[TokenRow](), list[int]()
        for prompt in prompts:
            if self.made_up:
                right = prompt.answer
                wrong = right[-1] + right[1:-1] + right[0]
                if len(right) == 1 or wrong == right:
                    wrong = right[:-1] + str((int(right[-1]) + 1) % 10)
                prompt = replace(prompt, rejected=wrong)
            rows += pair_rows(prompt, self.tokenizer)
            indices += [prompt.index] * 2
        return rows_as_batch(rows, indices, self.tokenizer.pad_token_id)


_OTHERS = ("0", "1")
"""Two contents, of which at least one begins with a different character than any given message."""


def conversation_row(
    context: Sequence[Message],
    answer: str | Message,
    tokenizer: Tokenizer,
    *,
    imitate_all: bool,
    tools: Tools = (),
    own_turn: bool = False,
) -> TokenRow:
    """Encode a conversation that ends with the answer, and train on that answer or on all of the assistant's turns.

    A trained turn begins after its generation prompt and ends with the last end-of-answer token, or with the turn if
    the template writes none. `ChatTemplate.imitated` may extend it to the template's text around the answer, and
    `add_eos` adds an end of sequence to the row. Raises ValueError for a template that rewrites earlier turns: the
    model would not answer with such tokens.
    """
    turn = Message(ASSISTANT, answer) if isinstance(answer, str) else answer
    messages = [*context, turn]
    if is_begun(context, own_turn=own_turn):
        messages = [*context[:-1], replace(turn, content=context[-1].content + turn.content, null=False)]
    shown = rendered(messages, tokenizer, add_generation_prompt=False, tools=tools)
    borders = list[int]()
    for place, message in enumerate(messages):
        last = place == len(messages) - 1
        if message.role == ASSISTANT and message.trained and (imitate_all or last):
            before, own = (context, own_turn) if last else (messages[:place], True)
            prompt = asked(before, tokenizer, tools, own_turn=own)
            borders += _borders(shown, messages, place, prompt, tokenizer, tools)
    ids, places = _parted(shown, borders, tokenizer)
    trained = [False] * len(ids)
    for start, end in batched(places, 2):
        if tokenizer.answers.imitated == "answer":
            ends = [place + 1 for place in range(start, end) if ids[place] in tokenizer.ends]
            end = ends[-1] if ends else end
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
    """Return a turn's start and end in the text; prompt: the rendered text that the model would answer there."""
    before = rendered(messages[:place], tokenizer, add_generation_prompt=False, tools=tools)
    opening, start = prompt.text.removeprefix(before.text), prompt

    def turns(count: int) -> Rendered | None:
        """Return the first messages' text, up to the next generation prompt if their end differs; None if rewritten."""
        alone = rendered(messages[:count], tokenizer, add_generation_prompt=False, tools=tools)
        if shown.begins_with(alone):
            return alone
        followed = rendered(messages[:count], tokenizer, add_generation_prompt=True, tools=tools)
        followed = followed.part(0, len(followed.text.removesuffix(opening)))
        return followed if opening and shown.begins_with(followed) else None

    if tokenizer.answers.imitated == "turn":
        start = turns(place) or before
    other, count = start, place
    if shown.begins_with(start):
        if (ended := turns(place + 1)) is not None:
            return len(start.text), len(ended.text)
        if tokenizer.answers.imitated == "answer":
            # A template that writes an empty thought into the last turn never shows an earlier turn alone as it does
            # here. Such a turn ends with the last end of sequence before the next message's content.
            turn, following = messages[place], messages[place + 1]
            content = _OTHERS[following.content.strip()[:1] == _OTHERS[0]]
            changed = [*messages]
            changed[place + 1] = replace(following, content=content, frame=(0, 0))
            others = rendered(changed, tokenizer, add_generation_prompt=False, tools=tools)
            token = tokenizer.text_of([tokenizer.eos_token_id])
            end = shown.text.rfind(token, 0, first_difference(shown.text, others.text))
            if end >= 0 and not any(first <= end < last for first, last in shown.literal):
                end += len(token)
                said = shown.text[len(start.text) : end]
                if said and all(text.strip() in said for text in (turn.content, turn.reasoning)):
                    return len(start.text), end
        count = place + 1
        other = rendered(messages[:count], tokenizer, add_generation_prompt=False, tools=tools)
    difference = rewritten(other.text, shown.text) or "the special tokens that messages spell are others"
    raise RefusedError(
        f"data.apply_chat_template: the chat template does not show the first {count} messages of a conversation as it "
        f"shows them alone, so that the assistant's tokens cannot be told: {difference}; use a template that keeps "
        "earlier turns as they were",
        code="rewritten-turns",
    )


def _parted(shown: Rendered, borders: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return a text's ids, and the number of ids before each boundary; boundaries are in ascending order.

    The text is encoded as a whole unless a token would cross a boundary; then the two sides are encoded separately, as
    a prompt and its answer are.
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
                    f"{shown.text[:border][-SHOWN_TEXT:]!r}, to what the assistant says, "
                    f"{shown.text[border:][:SHOWN_TEXT]!r}, and gives other text for the two apart; use a template "
                    "that ends with no blank before an answer",
                    code="joined-tokens",
                )
            ids, start, rest, before = [*ids, *before], border, behind, []
        places.append(len(ids) + len(before))
    return [*ids, *rest], places
