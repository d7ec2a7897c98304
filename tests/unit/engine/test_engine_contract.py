"""The fake engine keeps to what tests/vllm_engines/test_contract.py asks of the real ones."""

import asyncio

import pytest
import torch
from engine_contract import keeps_to_the_contract
from fake_engine import FakeEngine

from nemo_rl_mcore.driver.actors.engine_generation import as_batch
from nemo_rl_mcore.engine.engine import Request, Response


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(f"weight.{i}", torch.randn(30, 30 + i, generator=generator)) for i in range(20)]


REQUESTS = [Request([3, 4], 1), Request([5], 2), Request([3, 4], 9)]


async def contract(engine_class):
    await keeps_to_the_contract(
        engine_class(0.001), tensors(0), tensors(1), REQUESTS, overlaps=True, sleeps=True
    )


def test_the_fake_engine_keeps_to_the_contract():
    asyncio.run(contract(FakeEngine))


def test_responses_become_rows_with_the_version_of_each_token():
    batch = as_batch(
        [Response([5, 6], [-0.5, -1.0], True, [3, 4], 0), Response([], [], False, [], 0)],
        max_new_tokens=3,
    )
    assert batch["tokens"].tolist() == [[5, 6, 0], [0, 0, 0]]
    assert batch["logprobs"].tolist() == [[-0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch["weight_versions"].tolist() == [[3, 4, -1], [-1, -1, -1]]
    assert (batch["lengths"].tolist(), batch["finished"].tolist()) == ([2, 0], [True, False])


def test_a_response_with_fewer_log_probabilities_than_tokens_is_no_row():
    with pytest.raises(ValueError, match="broadcast"):
        as_batch([Response([5, 6, 7], [-0.5, -1.0], True, [3, 3, 3], 0)], max_new_tokens=3)
