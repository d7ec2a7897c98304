"""Ray actors that hold a vLLM engine: plain classes, which `RayWorkerGroup` wraps by `ray.remote`.

B rows, P prompt length, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.generation.vllm.engine import (
    AsyncEngine,
    EngineSettings,
    Request,
    Response,
    Sampling,
    SyncEngine,
)
from nemo_rl_mcore.workers.ray_engines import RayObjectRelay


class VllmWorker:
    """An engine that answers whole batches."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = SyncEngine(settings)
        self._relay = RayObjectRelay()

    def generate(self, *, data: BatchedDataDict, sampling: Sampling, version: int) -> BatchedDataDict:
        """Answer prompts: see `interfaces.GenerationInterface.generate`; data has seeds int64 [B] besides."""
        return as_batch(self._engine.generate(as_requests(data), sampling, version), sampling.max_new_tokens)

    def begin_refit(self, version: int) -> None:
        """See `SyncEngine.begin_refit`."""
        self._engine.begin_refit(version)

    def load_bucket(self, message: dict[str, Any]) -> None:
        """See `SyncEngine.load_bucket`."""
        self._engine.load_bucket(self._relay.relay(message))

    def finish_refit(self, version: int, tensors: int) -> int:
        """See `SyncEngine.finish_refit`."""
        self._relay.close()
        return self._engine.finish_refit(version, tensors)

    def join_refit_broadcast(self, **meeting: Any) -> None:
        """See `SyncEngine.join_refit_broadcast`."""
        self._engine.join_refit_broadcast(**meeting)

    def sleep(self) -> None:
        """See `SyncEngine.sleep`."""
        self._engine.sleep()

    def wake_up(self, tags: list[str]) -> None:
        """See `SyncEngine.wake_up`."""
        self._engine.wake_up(tags)

    def ping(self) -> None:
        """Return, if the process is alive."""


class AsyncVllmWorker:
    """An engine that answers requests as they come; calls overlap, and weights change in between."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._relay = RayObjectRelay()

    async def start(self) -> None:
        """Build the engine, which lives on the event loop that only runs now."""
        self._engine = AsyncEngine(self._settings)

    async def generate(
        self, *, data: BatchedDataDict, sampling: Sampling, version: int | None = None
    ) -> BatchedDataDict:
        """As `VllmWorker.generate`; without a version, with whatever weights come. See `AsyncEngine.generate`."""
        responses = await self._engine.generate(as_requests(data), sampling, version)
        return as_batch(responses, sampling.max_new_tokens)

    async def begin_refit(self, version: int) -> None:
        """See `AsyncEngine.begin_refit`."""
        await self._engine.begin_refit(version)

    async def load_bucket(self, message: dict[str, Any]) -> None:
        """See `AsyncEngine.load_bucket`."""
        await self._engine.load_bucket(self._relay.relay(message))

    async def finish_refit(self, version: int, tensors: int) -> int:
        """See `AsyncEngine.finish_refit`."""
        self._relay.close()
        return await self._engine.finish_refit(version, tensors)

    async def join_refit_broadcast(self, **meeting: Any) -> None:
        """See `SyncEngine.join_refit_broadcast`."""
        await self._engine.join_refit_broadcast(**meeting)

    async def sleep(self) -> None:
        """See `SyncEngine.sleep`."""
        await self._engine.sleep()

    async def wake_up(self, tags: list[str]) -> None:
        """See `SyncEngine.wake_up`."""
        await self._engine.wake_up(tags)

    async def ping(self) -> None:
        """Return, if the process and the one below it are alive."""
        self._engine.raise_if_dead()


def as_requests(data: BatchedDataDict) -> list[Request]:
    """The rows of input_ids [B, P] and input_lengths [B], without their padding, with seeds [B]."""
    rows = zip(
        data["input_ids"].tolist(), data["input_lengths"].tolist(), data["seeds"].tolist(), strict=True
    )
    return [Request(ids[:length], seed) for ids, length, seed in rows]


def as_batch(responses: list[Response], max_new_tokens: int) -> BatchedDataDict:
    """What `interfaces.GenerationInterface.generate` returns, and min_weight_version, max_weight_version int64 [B]."""
    tokens_BT = torch.zeros(len(responses), max_new_tokens, dtype=torch.long)
    logprobs_BT = torch.zeros(len(responses), max_new_tokens)
    for row, response in enumerate(responses):
        tokens_BT[row, : len(response.tokens)] = torch.tensor(response.tokens, dtype=torch.long)
        logprobs_BT[row, : len(response.tokens)] = torch.tensor(response.logprobs)
    return BatchedDataDict(
        tokens=tokens_BT,
        logprobs=logprobs_BT,
        lengths=_integers(len(response.tokens) for response in responses),
        finished=_integers(response.finished for response in responses).bool(),
        min_weight_version=_integers(response.first_version for response in responses),
        max_weight_version=_integers(response.last_version for response in responses),
    )


def _integers(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*values], dtype=torch.long)
