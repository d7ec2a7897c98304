"""Groups take turns at the embedded engine, and a call to it, such as a refit, does not wait for all of them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_contract import keeps_to_the_contract
from fake_engine import FakeEngine

from nemo_rl_mcore.driver.actors.engine_generation import as_batch
from nemo_rl_mcore.engine.embedded import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.engine import Request, Response, Sampling
from nemo_rl_mcore.rank.policy_backend import GenerationRequest, SampledTokens
from nemo_rl_mcore.recipe.load import load_config

RECIPE = Path(__file__).parents[3] / "examples/configs/grpo_copy_cpu.yaml"
GROUPS, TOKENS = 20, 12


class CountedDecoding:
    """One response of TOKENS tokens."""

    def __init__(self, turns: list[int], number: int) -> None:
        self._turns, self._number, self._drawn = turns, number, 0

    def add(self, request: GenerationRequest) -> range:
        return range(len(request.prompts))

    def step(self) -> SampledTokens | None:
        if self._drawn == TOKENS:
            return None
        self._drawn += 1
        self._turns.append(self._number)
        last = torch.tensor([self._drawn == TOKENS])
        return SampledTokens(torch.tensor([0]), torch.tensor([5]), torch.tensor([-1.0]), last)

    def reread(self) -> None: ...


class OneWeight:
    def take(self, name: str, tensor: torch.Tensor) -> None: ...

    def missing(self) -> list[str]:
        return []


class CountedBackend:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.turns: list[int] = []
        """The group whose turn it was, for every token."""
        self._decodings = 0

    def decoding(self) -> CountedDecoding:
        self._decodings += 1
        return CountedDecoding(self.turns, self._decodings - 1)

    def filling(self) -> OneWeight:
        return OneWeight()

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def shutdown(self) -> None: ...


@pytest.fixture
def backend() -> CountedBackend:
    return CountedBackend()


async def answered_beside(engine: EmbeddedEngine, call=None):
    """The answers of all groups; the call comes when each has drawn a token."""
    await engine.begin_refit(0)
    await engine.finish_refit(0, {})
    sampling = Sampling(TOKENS)
    asked = [asyncio.create_task(engine.generate([Request([3], n)], sampling)) for n in range(GROUPS)]
    if call is not None:
        await call()
    return [answer for group in await asyncio.gather(*asked) for answer in group]


def engine_over(backend: CountedBackend) -> EmbeddedEngine:
    policy = load_config(RECIPE).policy
    return EmbeddedEngine(EmbeddedSettings(policy, open=lambda *_, **__: backend))


def test_every_group_has_a_turn_before_any_has_its_next(backend) -> None:
    asyncio.run(answered_beside(engine_over(backend)))
    assert backend.turns == [*range(GROUPS)] * TOKENS


@pytest.mark.parametrize("rounds", [1, 4, 8])
def test_a_refit_that_needs_rounds_of_the_loop_to_get_in_waits_for_as_many_tokens(backend, rounds) -> None:
    engine, seen = engine_over(backend), []

    async def refit() -> None:
        while len(backend.turns) < GROUPS:
            await asyncio.sleep(0)
        before = len(backend.turns)
        for _ in range(rounds):
            await asyncio.sleep(0)
        await engine.begin_refit(1)
        seen.append(len(backend.turns) - before)
        await engine.finish_refit(1, {})

    answers = asyncio.run(answered_beside(engine, refit))
    assert seen[0] <= rounds + 1 < GROUPS
    assert all(answer.versions == sorted(answer.versions) for answer in answers)
    assert all({*answer.versions} == {0, 1} for answer in answers), "each goes on with the new weights"


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
        [Response([5, 6], [-0.5, -1.0], True, [3, 4], 0), Response([], [], False, [], 0)], max_new_tokens=3
    )
    assert batch["tokens"].tolist() == [[5, 6, 0], [0, 0, 0]]
    assert batch["logprobs"].tolist() == [[-0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch["weight_versions"].tolist() == [[3, 4, -1], [-1, -1, -1]]
    assert (batch["lengths"].tolist(), batch["finished"].tolist()) == ([2, 0], [True, False])


def test_a_response_with_fewer_log_probabilities_than_tokens_is_no_row():
    with pytest.raises(ValueError, match="broadcast"):
        as_batch([Response([5, 6, 7], [-0.5, -1.0], True, [3, 3, 3], 0)], max_new_tokens=3)
