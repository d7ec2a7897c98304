"""Rows to train on from texts: prompts with given answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import Tokenizer


def answered_rows(
    prompts: Sequence[str], answers: Sequence[str], indices: Sequence[int], tokenizer: Tokenizer
) -> BatchedDataDict:
    """Rows of prompt, answer and end of sequence, right padded; the answer and the end are to be trained on.

    Returns input_ids [B, S], input_lengths [B], token_mask [B, S], sample_mask [B], prompt_index and sample_index [B].
    """
    rows = [
        (tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    token_mask = torch.zeros(len(rows), longest)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor([*prompt, *answer])
        token_mask[row, len(prompt) : end] = 1
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=torch.tensor([len(prompt) + len(answer) for prompt, answer in rows]),
        token_mask=token_mask,
        sample_mask=torch.ones(len(rows)),
        prompt_index=torch.tensor(list(indices)),
        sample_index=torch.zeros(len(rows), dtype=torch.long),
    )
