"""A worker of its own for benchmarks: the environment of a single rank, and rows to train on."""

from __future__ import annotations

import os
import socket
from typing import Any


def be_the_only_rank() -> None:
    """Set the environment from which a worker learns that it is alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def batch(rows: int, tokens: int, vocab: int, prompt: float = 0.25, shortest: float = 1.0) -> Any:
    """Rows of random tokens, of which the given share is the prompt.

    shortest: lengths go in even steps from all tokens down to this share of them.
    """
    import torch

    from nemo_rl_mcore.data import BatchedDataDict

    noise = torch.Generator().manual_seed(0)
    lengths = torch.linspace(tokens, tokens * shortest, rows).long()
    columns, ends = torch.arange(tokens), lengths.unsqueeze(1)
    logprobs = -torch.rand(rows, tokens, generator=noise) - 3
    return BatchedDataDict(
        input_ids=torch.randint(0, vocab, (rows, tokens), generator=noise) * (columns < ends),
        input_lengths=lengths,
        token_mask=((columns >= ends * prompt) & (columns < ends)).float(),
        sample_mask=torch.ones(rows),
        advantages=torch.randn(rows, tokens, generator=noise),
        prev_logprobs=logprobs,
        generation_logprobs=logprobs,
        reference_policy_logprobs=logprobs,
    )
