"""The log-probabilities that transformers computes of an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_rl_mcore.data import BatchedDataDict


def transformers_logprobs(folder: Path, rows: BatchedDataDict, temperature: float) -> torch.Tensor:
    """Return log p of each token, fp32 [B, S], in the form of `MegatronPolicyWorker.get_logprobs`.

    rows: input_ids [B, S], input_lengths [B]; column 0 and right padding are 0. temperature: divides the logits.
    """
    from transformers import AutoModelForCausalLM  # it takes seconds to import

    load: Any = AutoModelForCausalLM.from_pretrained  # pyright: ignore[reportUnknownMemberType]
    model: Any = load(str(folder), dtype=torch.float32, attn_implementation="eager")
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    with torch.no_grad():
        every: torch.Tensor = (model(ids).logits / temperature).log_softmax(-1)
    found = every[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    found = torch.nn.functional.pad(found, (1, 0))
    return found.masked_fill(torch.arange(ids.shape[1]) >= lengths.unsqueeze(1), 0.0)
