"""Tokens of a row with what is to be trained on, and rows as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.literal_text import Rendered, literal_spans
from nemo_rl_mcore.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenRow:
    """Tokens, and whether each is to be trained on."""

    ids: Sequence[int]
    trained: Sequence[bool]


def content_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that data or an environment says."""
    return tokenizer.encode(text, literal_spans(text, tokenizer.special_tokens))


def plain_row(prompt: Rendered, answer: str, tokenizer: Tokenizer) -> TokenRow:
    """Prompt, answer and end of sequence; the answer and the end are to be trained on."""
    before = tokenizer.encode(prompt.text, prompt.literal)
    after = [*content_ids(answer, tokenizer), tokenizer.eos_token_id]
    return TokenRow([*before, *after], [False] * len(before) + [True] * len(after))


def rows_as_batch(rows: Sequence[TokenRow], indices: Sequence[int], pad_token_id: int) -> BatchedDataDict:
    """Return right-padded rows.

    Returns input_ids [B, S], input_lengths [B], token_mask [B, S], sample_mask [B], prompt_index and sample_index [B].
    """
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
