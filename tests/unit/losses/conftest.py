import pytest
import torch

from nemo_rl_mcore.data import BatchedDataDict


def _make_batch(rows=5, columns=7, seed=0, dtype=torch.float64, noise=0.5):
    """Log-probabilities [B,S-1] that require a gradient, and a batch of uneven rows.

    Row 0 is full; of three rows or more, the last has no valid token and row 1 is dropped by its sample mask.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def near(values):
        return values + noise * normal(rows, columns)

    current = -normal(rows, columns).abs() - 0.1
    token_mask = (torch.rand(rows, columns, generator=generator) < 0.7).long()
    token_mask[0] = 1
    sample_mask = torch.ones(rows, dtype=dtype)
    if rows >= 3:
        token_mask[-1] = 0
        sample_mask[1] = 0
    data = BatchedDataDict(
        token_mask=token_mask,
        sample_mask=sample_mask,
        advantages=normal(rows, columns),
        prev_logprobs=near(current),
        generation_logprobs=near(current),
        reference_policy_logprobs=near(current),
        entropy=normal(rows, columns).abs(),
    )
    return current[:, 1:].clone().requires_grad_(), data


@pytest.fixture(scope="session")
def make_batch():
    return _make_batch
