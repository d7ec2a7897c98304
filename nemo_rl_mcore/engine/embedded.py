"""A stand-alone generator: a model without optimizer in one process, which decodes between refits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.data.tokenizer import StopConditions
from nemo_rl_mcore.engine.engine import (
    Engine,
    GenerationCancelledError,
    HeldWeights,
    NextLogprobs,
    Request,
    Response,
    Sampling,
)
from nemo_rl_mcore.engine.receivers import MessageRelay, Receiver
from nemo_rl_mcore.ops.sampling import SamplingParams
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.policy_backend import BackendOptions, GenerationRequest, open_backend
from nemo_rl_mcore.rank.refit.digests import Digests, digests, require_as_sent
from nemo_rl_mcore.rank.refit.transports import Bucket, join_broadcast_group

if TYPE_CHECKING:  # Megatron is imported by the backend, once the device is prepared
    from nemo_rl_mcore.rank.megatron.backend import MegatronBackend
    from nemo_rl_mcore.rank.megatron.generation import DecodingSession
    from nemo_rl_mcore.rank.megatron.hf_weights.load import WholeWeightFilling


@dataclass(frozen=True)
class EmbeddedSettings:
    """An engine's arguments.

    reread_after_refit: recompute current responses' caches with the new weights, instead of keeping the old weights'
    caches. open: builds the model.
    """

    policy: PolicyConfig
    reread_after_refit: bool = False
    open: Callable[..., MegatronBackend] = open_backend


@dataclass
class _Growing:  # a response so far
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finished: bool = False
    routes: NDArray[np.integer] | None = None


class EmbeddedEngine(Engine):
    """An engine that samples a token for each group of requests in turn, with refits in between.

    Tokens are those that the training ranks would sample with the same weights, independently of other requests.
    """

    def __init__(self, settings: EmbeddedSettings) -> None:
        self._policy, self._reread = settings.policy, settings.reread_after_refit
        # Trained with no optimizer, and random weights until the first refit.
        options = BackendOptions(0, Role.POLICY, False, SamplingParams(), verify_checksums=True)
        self._backend = settings.open(settings.policy, options, alone=True)
        self._receiver, self._relay = Receiver(self._backend.device), MessageRelay()
        self._filling: WholeWeightFilling | None = None
        self._received: set[str] = set()
        self._may_generate = asyncio.Event()
        # A call needs several rounds of the loop until it runs. With one token per round it waits for a few tokens,
        # with a token of each group it would wait for most responses to end.
        self._turns = asyncio.Lock()
        self._asked: dict[str, DecodingSession] = {}
        self._numbers = itertools.count()
        self.weights = HeldWeights()

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int | None = None, ticket: str = ""
    ) -> list[Response]:
        activity.advance("generate")
        if version is not None:
            self.weights.require(version)
        ticket = ticket or f"group {next(self._numbers)}"
        temperature = 1.0 if sampling.greedy else sampling.temperature
        growing = [_Growing() for _ in requests]
        decoding = self._asked[ticket] = self._backend.decoding()
        try:
            decoding.add(
                GenerationRequest(
                    prompts=[request.prompt for request in requests],
                    keys_B=torch.tensor([request.seed for request in requests], dtype=torch.long),
                    max_new_tokens=sampling.max_new_tokens,
                    stops=[
                        StopConditions.of(self._policy, sampling.stop_ids, request.stop_strings)
                        for request in requests
                    ],
                    sampling=SamplingParams(temperature, sampling.top_k, sampling.top_p, sampling.greedy),
                    batch_size=self._policy.generation_batch_size,
                    longest=sampling.longest,
                )
            )
            while True:
                async with self._turns:  # first come, first served
                    await asyncio.sleep(0)  # a round of the loop for other calls
                    await self._may_generate.wait()
                    if self._asked.get(ticket) is not decoding:
                        raise GenerationCancelledError(f"{ticket} was cancelled")
                    sampled = decoding.step()
                if sampled is None:
                    break
                assert self.weights.newest is not None  # nothing is generated before the first refit
                columns = sampled.rows_N, sampled.tokens_N, sampled.logprobs_N, sampled.stopped_N
                for row, token, logprob, stopped in zip(*(one.tolist() for one in columns), strict=True):
                    response = growing[row]
                    response.tokens.append(token)
                    response.logprobs.append(logprob)
                    response.versions.append(self.weights.newest)
                    response.finished = stopped
                for row, routes in sampled.routes.items():
                    growing[row].routes = routes.numpy()
        finally:
            if self._asked.get(ticket) is decoding:
                del self._asked[ticket]
        return [Response(**vars(response), digest=digest_of_ids(response.tokens)) for response in growing]

    async def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[NextLogprobs]:
        activity.advance("next_logprobs")
        self.weights.require(None)
        return [*self._backend.next_logprobs(prompts, temperature).numpy()]

    async def cancel(self, ticket: str) -> None:
        self._asked.pop(ticket, None)

    async def begin_refit(self, version: int) -> None:
        activity.advance("begin_refit")
        self.weights.begin(version)
        self._may_generate.clear()
        self._receiver.close()
        self._filling, self._received = self._backend.filling(), set()

    async def load_bucket(self, message: Mapping[str, Any]) -> None:
        activity.advance("load_bucket")
        assert self._filling is not None
        bucket = Bucket.from_message(self._relay.relay(message))
        memory = self._receiver.open(bucket.location)
        for name, tensor in bucket.read(memory):
            self._filling.take(name, tensor)
            self._received.add(name)

    async def finish_refit(self, version: int, sent: Digests) -> int:
        activity.advance("finish_refit")
        assert self._filling is not None
        self._receiver.close()
        self._relay.close()
        require_as_sent(sent, dict.fromkeys(self._received), unwritten=self._filling.missing())
        if None not in sent.values():
            require_as_sent(sent, digests(self._backend.full_tensors()))
        self._filling = None
        if self._reread:
            for decoding in self._asked.values():
                decoding.reread()
        self.weights.newest = self.weights.version = version
        self._may_generate.set()
        return version

    async def join_broadcast(
        self, *, address: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> None:
        timeout, kind = timedelta(seconds=timeout_s), self._backend.device.type
        self._receiver.group = join_broadcast_group(address, port, first_rank, world_size, timeout, kind)

    async def sleep(self) -> None:
        """Keep the memory, since this engine does not share its GPU."""
        self.weights.version = None
        self._may_generate.clear()

    async def shutdown(self) -> None:
        self._backend.shutdown()
