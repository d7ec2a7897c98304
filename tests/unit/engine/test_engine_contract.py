"""The fake engine keeps to what tests/vllm_engines/test_contract.py asks of the real ones."""

import asyncio

import pytest
import torch
from engine_contract import keeps_to_the_contract
from fake_engine import FakeEngine, next_logprobs

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


class AnswersWithWhateverItHolds(FakeEngine):
    async def generate(self, requests, sampling, version=None, ticket=""):
        return await super().generate(requests, sampling, None, ticket)


class AsksNoNames(FakeEngine):
    async def finish_refit(self, version, sent):
        return await super().finish_refit(version, {name: sent.get(name) for name in self._received})


class ComparesNames(FakeEngine):
    async def finish_refit(self, version, sent):
        return await super().finish_refit(version, dict.fromkeys(sent))


class KeepsItsWeightsAsleep(FakeEngine):
    async def sleep(self):
        self._awake = False


class HearsNoCancel(FakeEngine):
    async def cancel(self, ticket): ...


class TellsWithoutWeights(FakeEngine):
    async def next_logprobs(self, prompts, temperature):
        return [next_logprobs(self._scale, prompt, temperature) for prompt in prompts]


class TellsOfTemperatureOne(FakeEngine):
    async def next_logprobs(self, prompts, temperature):
        return await super().next_logprobs(prompts, 1.0)


class TellsOfWhatFollowsTheFirstToken(FakeEngine):
    async def next_logprobs(self, prompts, temperature):
        return await super().next_logprobs([prompt[:1] for prompt in prompts], temperature)


@pytest.mark.parametrize(
    "engine_class",
    [
        AnswersWithWhateverItHolds,
        AsksNoNames,
        ComparesNames,
        KeepsItsWeightsAsleep,
        HearsNoCancel,
        TellsWithoutWeights,
        TellsOfTemperatureOne,
        TellsOfWhatFollowsTheFirstToken,
    ],
)
@pytest.mark.exhaustive
def test_an_engine_that_breaks_the_contract_is_found_out(engine_class):
    # One of them waits for weights that nobody sends.
    with pytest.raises((AssertionError, pytest.fail.Exception, TimeoutError)):
        asyncio.run(asyncio.wait_for(contract(engine_class), 5))


def test_responses_become_rows_with_the_version_of_each_token():
    batch = as_batch(
        [Response.of([5, 6], [-0.5, -1.0], [3, 4], finished=True), Response.of([], [], [], finished=False)],
        max_new_tokens=3,
    )
    assert batch["tokens"].tolist() == [[5, 6, 0], [0, 0, 0]]
    assert batch["logprobs"].tolist() == [[-0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch["weight_versions"].tolist() == [[3, 4, -1], [-1, -1, -1]]
    assert (batch["lengths"].tolist(), batch["finished"].tolist()) == ([2, 0], [True, False])


def test_a_response_with_fewer_log_probabilities_than_tokens_is_no_row():
    with pytest.raises(ValueError, match="broadcast"):
        as_batch([Response.of([5, 6, 7], [-0.5, -1.0], [3, 3, 3], finished=True)], max_new_tokens=3)
