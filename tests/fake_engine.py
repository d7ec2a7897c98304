"""A small engine of its own kind: its answers are arithmetic of seed, prompt and the weights it was sent."""

import asyncio

import numpy as np
import torch

from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.engine.engine import GenerationCancelledError, HeldWeights, Response
from nemo_rl_mcore.engine.receivers import MessageRelay, Receiver
from nemo_rl_mcore.rank.refit.digests import digests, require_as_sent
from nemo_rl_mcore.rank.refit.transports import Bucket

VOCABULARY = 29


def next_logprobs(scale, prompt, temperature):
    """Of all tokens after the prompt, by weights whose sum is `scale`; fp32 [V]."""
    logits = np.cos(np.arange(VOCABULARY) * (1 + sum(prompt)) + scale) / temperature
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class FakeEngine:
    """An `Engine` whose calls overlap; a token takes `pause_s`."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.weights, self._pause_s = HeldWeights(), pause_s
        self._relay, self._receiver = MessageRelay(), Receiver(torch.device("cpu"))
        self._tensors, self._received, self._scale = {}, set(), 0.0
        self._may_generate, self._asked, self._awake = asyncio.Event(), set(), True
        self._refits = 0

    async def generate(self, requests, sampling, version=None, ticket=""):
        if version is not None:
            self.weights.require(version)
        self._asked.add(ticket)
        growing = [{"tokens": [], "logprobs": [], "versions": [], "finished": False} for _ in requests]
        open_rows = dict(enumerate(requests))
        for position in range(sampling.max_new_tokens):
            await asyncio.sleep(self._pause_s)
            await self._may_generate.wait()
            if ticket not in self._asked:
                raise GenerationCancelledError(ticket)
            for row, request in [*open_rows.items()]:
                self._draw(growing[row], request, position)
                if growing[row]["tokens"][-1] in sampling.stop_ids:
                    growing[row]["finished"] = True
                    del open_rows[row]
        return [Response(**answer, digest=digest_of_ids(answer["tokens"])) for answer in growing]

    def _draw(self, answer, request, position):
        token = (31 * request.seed + 7 * position + sum(request.prompt)) % VOCABULARY
        before = [*request.prompt, *answer["tokens"]]
        answer["logprobs"].append(float(next_logprobs(self._scale, before, 1.0)[token]))
        answer["tokens"].append(token)
        answer["versions"].append(self.weights.newest)

    async def next_logprobs(self, prompts, temperature):
        self.weights.require(None)
        return [next_logprobs(self._scale, prompt, temperature) for prompt in prompts]

    async def cancel(self, ticket):
        self._asked.discard(ticket)

    async def begin_refit(self, version):
        assert self._awake
        self.weights.begin(version)
        self._refits += 1
        self._may_generate.clear()
        self._received = set()

    async def load_bucket(self, message):
        bucket = Bucket.from_message(self._relay.relay(message))
        for name, tensor in bucket.read(self._receiver.open(bucket.location)):
            self._received.add(name)
            self._write(name, tensor.clone())

    def _write(self, name, tensor):
        self._tensors[name] = tensor

    async def finish_refit(self, version, sent):
        self._relay.close()
        require_as_sent(sent, dict.fromkeys(self._received))
        require_as_sent(sent, digests(self._tensors.items()))
        self._scale = sum(float(tensor.sum()) for tensor in self._tensors.values())
        self._may_generate.set()
        self.weights.newest = self.weights.version = version
        return version

    async def join_broadcast(self, **rendezvous):
        raise NotImplementedError

    async def sleep(self):
        self.weights.version = None
        self._awake = False

    async def wake_up(self, tags):
        self._awake = self._awake or "weights" in tags

    async def health(self): ...

    async def refits_begun(self):
        return self._refits

    async def shutdown(self): ...
