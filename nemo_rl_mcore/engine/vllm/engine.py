"""vLLM engines that answer prompts with weights of a known version: one for whole batches, one for single requests.

Both run in the process that builds them (the asynchronous one with a process of vLLM's own below it). vLLM is imported
when an engine is built, so that a driver can name the classes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nemo_rl_mcore.engine.engine import (
    GenerationCancelledError,
    HeldWeights,
    NextLogprobs,
    Request,
    Response,
    Sampling,
)
from nemo_rl_mcore.engine.vllm.settings import WHOLE_VOCABULARY, EngineSettings, on_this_machine
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.refit.digests import Digests, HeldBlock, joined, require_as_sent
from nemo_rl_mcore.rank.refit.transports import MessageRelay

_LARGEST_SEED = (1 << 63) - 1
"""vLLM seeds torch's generators, and takes -1 for no seed: keys lose their sign."""


class VllmEngine:
    """Answers a batch at a time; an `Engine`."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        machines = on_this_machine()
        self._llm = LLM(**settings.arguments(machines))
        self._relay = MessageRelay(over_machines=machines is not None)
        self.weights = HeldWeights()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int | None, ticket: str = ""
    ) -> list[Response]:
        """See `Engine.generate`; the weights do not change under way."""
        activity.advance("generate")
        held = self.weights.require(version)
        prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        params = [_sampling_params(request, sampling) for request in requests]
        outputs = [output.outputs[0] for output in self._llm.generate(prompts, params, use_tqdm=False)]
        return [
            Response.of(
                list(output.token_ids),
                _logprobs(output),
                [held] * len(output.token_ids),
                finished=_finished(output),
            )
            for output in outputs
        ]

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[NextLogprobs]:
        activity.advance("next_logprobs")
        self.weights.require(None)
        params = _next_params(temperature)
        outputs = self._llm.generate([_apart(prompt) for prompt in prompts], params, use_tqdm=False)
        return [_next_logprobs(output.outputs[0]) for output in outputs]

    def cancel(self, ticket: str) -> None:
        """Nothing to do: one call at a time is heard, so that what was asked for has been answered."""

    def begin_refit(self, version: int) -> None:
        """See `Engine.begin_refit`; until `finish_refit` nothing is generated."""
        activity.advance("begin_refit")
        self.weights.begin(version)
        self._llm.collective_rpc("begin_refit")

    def load_bucket(self, message: Mapping[str, Any]) -> None:
        activity.advance("load_bucket")
        self._llm.collective_rpc("load_refit_bucket", args=(self._relay.relay(message),))

    def finish_refit(self, version: int, sent: Digests) -> int:
        activity.advance("finish_refit")
        self._relay.close()
        require_refit(sent, self._llm.collective_rpc("finish_refit", args=(reads_back(sent),)))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after a refit")
        return self.weights.finish(version)

    def join_broadcast(self, **rendezvous: Any) -> None:
        self._llm.collective_rpc("join_refit_broadcast", kwargs=rendezvous)

    def sleep(self) -> None:
        self.weights.drop()
        self._llm.sleep(level=2)

    def wake_up(self, tags: Sequence[str]) -> None:
        activity.advance("wake_up")
        self._llm.wake_up([*tags])

    def health(self) -> None:
        """See `Engine.health`: the engine lives and dies with this process."""

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class AsyncVllmEngine:
    """Answers requests as they come; weights can change under way; an `Engine`.

    A refit pauses generation. Requests in flight stay, and go on with the new weights: their key-value caches are
    recomputed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        machines = on_this_machine()
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings.arguments(machines)))
        self._relay = MessageRelay(over_machines=machines is not None)
        self._numbers = itertools.count()
        self._asked: dict[str, asyncio.Future[list[Response]]] = {}
        self._may_generate = asyncio.Event()
        self.weights = HeldWeights()

    async def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int | None = None,
        ticket: str = "",
    ) -> list[Response]:
        """See `Engine.generate`; without a version, requests wait for a refit under way to end."""
        activity.advance("generate")
        if version is not None:
            self.weights.require(version)
        ticket = ticket or f"group {next(self._numbers)}"
        answers = asyncio.gather(*(self._answer(request, sampling) for request in requests))
        self._asked[ticket] = answers
        try:
            return list(await answers)
        except asyncio.CancelledError:
            if ticket in self._asked:  # it is this call that was cancelled
                raise
            raise GenerationCancelledError(f"{ticket} was cancelled") from None
        finally:
            self._asked.pop(ticket, None)

    async def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[NextLogprobs]:
        activity.advance("next_logprobs")
        self.weights.require(None)
        return list(await asyncio.gather(*(self._next(prompt, temperature) for prompt in prompts)))

    async def _next(self, prompt: Sequence[int], temperature: float) -> NextLogprobs:
        params = _next_params(temperature)
        found: list[NextLogprobs] = []
        async for output in self._llm.generate(_apart(prompt), params, request_id=str(next(self._numbers))):
            found.append(_next_logprobs(output.outputs[0]))
        [whole] = found
        return whole

    async def cancel(self, ticket: str) -> None:
        if (answers := self._asked.pop(ticket, None)) is not None:
            answers.cancel()

    async def begin_refit(self, version: int) -> None:
        """See `Engine.begin_refit`; requests in flight pause."""
        activity.advance("begin_refit")
        self.weights.begin(version)
        self._may_generate.clear()
        # Clears the prefix cache, and the caches of the requests in flight with it.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.collective_rpc("begin_refit")

    async def load_bucket(self, message: Mapping[str, Any]) -> None:
        activity.advance("load_bucket")
        await self._llm.collective_rpc("load_refit_bucket", args=(self._relay.relay(message),))

    async def finish_refit(self, version: int, sent: Digests) -> int:
        """See `Engine.finish_refit`; generation goes on."""
        activity.advance("finish_refit")
        self._relay.close()
        require_refit(sent, await self._llm.collective_rpc("finish_refit", args=(reads_back(sent),)))
        self.weights.finish(version)
        await self._llm.resume_generation()
        self._may_generate.set()
        return version

    async def join_broadcast(self, **rendezvous: Any) -> None:
        await self._llm.collective_rpc("join_refit_broadcast", kwargs=rendezvous)

    async def sleep(self) -> None:
        """See `Engine.sleep`; requests in flight are ended."""
        self.weights.drop()
        self._may_generate.clear()
        await self._llm.sleep(level=2)

    async def wake_up(self, tags: Sequence[str]) -> None:
        activity.advance("wake_up")
        await self._llm.wake_up([*tags])

    async def health(self) -> None:
        if self._llm.errored:
            raise self._llm.dead_error

    async def shutdown(self) -> None:
        self._llm.shutdown()

    async def _answer(self, request: Request, sampling: Sampling) -> Response:
        from vllm.sampling_params import RequestOutputKind

        await self._may_generate.wait()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finished = False
        params = _sampling_params(request, sampling)
        params.output_kind = RequestOutputKind.DELTA  # token by token, for the version that sampled each
        prompt: Any = {"prompt_token_ids": list(request.prompt)}
        async for output in self._llm.generate(prompt, params, request_id=str(next(self._numbers))):
            activity.advance("a token of a response")
            [drawn] = output.outputs
            assert self.weights.newest is not None  # before the first refit nothing is generated
            tokens += drawn.token_ids
            logprobs += _logprobs(drawn)
            versions += [self.weights.newest] * len(drawn.token_ids)
            finished = _finished(drawn)
        return Response.of(tokens, logprobs, versions, finished=finished)


def _sampling_params(request: Request, sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop_strings = [*sampling.stop_strings, *request.stop_strings]
    return SamplingParams(
        max_tokens=sampling.bound(request.prompt),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        seed=request.seed & _LARGEST_SEED,
        logprobs=0,  # of the drawn token alone
        # The end-of-sequence that counts is among the stop ids, whatever config.json says.
        ignore_eos=True,
        stop_token_ids=list(sampling.stop_ids),
        stop=stop_strings or None,
        include_stop_str_in_output=True,
        detokenize=bool(stop_strings),
        # A stop string may be the text of a special token.
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _next_params(temperature: float) -> Any:
    """Return one token, of which nothing is used but what it was drawn from."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,  # else it would be drawn with the noise of the whole process
        logprobs=WHOLE_VOCABULARY,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _apart(prompt: Sequence[int]) -> Any:
    """Return a prompt that shares no cached prefix with those of `generate`."""
    return {"prompt_token_ids": list(prompt), "cache_salt": "next_logprobs"}


def _next_logprobs(output: Any) -> NextLogprobs:
    """By token, from the one position of a flat list, which begins with the drawn token and then has every one."""
    ids = np.asarray(output.logprobs.token_ids)
    row = np.full(ids.max() + 1, np.nan, dtype=np.float32)
    row[ids] = output.logprobs.logprobs
    return row


def _logprobs(output: Any) -> list[float]:
    """Of the tokens that were drawn."""
    return [row[token].logprob for row, token in zip(output.logprobs or (), output.token_ids, strict=True)]


def _finished(output: Any) -> bool:
    return output.finish_reason == "stop"


class VllmShare:
    """Runs the processes that a `VllmEngine` has on one of its further machines; an `EngineShare`.

    They take their work from the engine itself, over vLLM's own queues.
    """

    usage: ClassVar[str] = "LLM_CLASS"
    """What vLLM calls the use of the engine, which decides the sizes that its processes have to agree on."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = EngineArgs(**settings.arguments(on_this_machine()))
        config = arguments.create_engine_config(UsageContext[self.usage], headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def serve(self) -> None:
        self._executor.start_worker_monitor(inline=True)


class AsyncVllmShare(VllmShare):
    """Runs the processes that an `AsyncVllmEngine` has on one of its further machines; an `EngineShare`."""

    usage = "ENGINE_CONTEXT"


def reads_back(sent: Digests) -> bool:
    """Return whether there is something to compare."""
    return any(digest is not None for digest in sent.values())


def require_refit(sent: Digests, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise IncompleteRefitError, naming tensors, unless every process has what was sent.

    reports: what `RefitExtension.finish_refit` has told, of all processes.
    """
    for report in reports:
        require_as_sent(sent, dict.fromkeys(report["received"]), unwritten=report["unwritten"])
    if reads_back(sent):
        unreadable = dict.fromkeys(name for report in reports for name in report["unreadable"])
        blocks = ([HeldBlock.from_message(block) for block in report["blocks"]] for report in reports)
        require_as_sent(sent, joined(blocks), unreadable=unreadable)
