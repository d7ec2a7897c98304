"""Rows to train on from texts: prompts with given answers."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_mcore.data.batched_data_dict import BatchedDataDict
from nemo_rl_mcore.data.chat import conversation_row
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.literal_text import Rendered
from nemo_rl_mcore.data.token_rows import TokenRow, plain_row, rows_as_batch
from nemo_rl_mcore.data.tokenizer import Tokenizer


def given_answers(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> BatchedDataDict:
    """Return rows of prompts with the answers that they have, see `rows_as_batch`."""
    rows = [answer_row(prompt, tokenizer) for prompt in prompts]
    return rows_as_batch(rows, [prompt.index for prompt in prompts], tokenizer.pad_token_id)


def answer_row(prompt: Prompt, tokenizer: Tokenizer) -> TokenRow:
    """Return a prompt with its answer, by the chat template where the prompt is a conversation."""
    if not prompt.context:
        return plain_row(Rendered(prompt.text, prompt.literal), prompt.imitated, tokenizer)
    return conversation_row(
        prompt.context,
        prompt.extras.answer or prompt.imitated,
        tokenizer,
        imitate_all=prompt.imitate_all,
        extras=prompt.extras,
    )
