"""vLLM engines that answer prompts with weights of a known version: one for whole batches, one for single requests.

Both run in the process that builds them (the asynchronous one with a process of vLLM's own below it). vLLM is imported
when an engine is built, so that a driver can name the classes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from nemo_rl_mcore.engine.engine import (
    Engine,
    EngineMachines,
    GenerationCancelledError,
    HeldWeights,
    NextLogprobs,
    Request,
    Response,
    Sampling,
)
from nemo_rl_mcore.engine.receivers import MessageRelay
from nemo_rl_mcore.rank import activity, rendezvous
from nemo_rl_mcore.rank.refit.digests import Digests, HeldBlock, joined, require_as_sent

WHOLE_VOCABULARY = -1


@dataclass(frozen=True)
class EngineSettings:
    """Arguments of an engine.

    model_dir: folder with config.json; weights are drawn at random until the first refit. precision: `float32` or
    `bfloat16`. kv_cache_memory_bytes: None is a share of the GPU's memory. tokenizer: folder of one, which stop strings
    need. quantization: of the layers' weights, by vLLM's name for it, but for layers whose names match one of the
    patterns in `unquantized`. further: arguments of the recipe's own.
    """

    model_dir: str
    precision: str
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    quantization: str | None = None
    unquantized: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = True
    enable_sleep_mode: bool = False
    tokenizer: str | None = None
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def arguments(self, machines: EngineMachines | None = None) -> dict[str, Any]:
        """Keyword arguments of vLLM's engines; machines: of an engine that is on several, as this process sees them."""
        processes = self.tensor_parallel_size * self.pipeline_parallel_size
        apart = ("model_dir", "precision", "unquantized", "further")
        same = {name: value for name, value in vars(self).items() if name not in apart}  # as vLLM calls them
        arguments: dict[str, Any] = {
            **self.further,
            **same,
            "model": self.model_dir,
            "load_format": "dummy",
            "skip_tokenizer_init": self.tokenizer is None,
            "dtype": self.precision,
            # Left to itself, vLLM would have Ray start them, in the places that Ray has given to the ranks.
            "distributed_executor_backend": "mp" if processes > 1 else None,
            # Of the distribution that is sampled from: the temperature divides the logits, as in training.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": WHOLE_VOCABULARY,
            "worker_extension_cls": "nemo_rl_mcore.engine.vllm.worker_extension.RefitExtension",
            "disable_log_stats": True,
        }
        if self.unquantized:
            arguments["quantization_config"] = {"ignore": [*self.unquantized]}
        if machines is not None:
            arguments |= {"nnodes": machines.count, "node_rank": machines.number}
            arguments |= {"master_addr": machines.first, "master_port": machines.port}
        return arguments


def on_this_machine() -> EngineMachines | None:
    """Read the engine's machines from the environment; vLLM listens at the first one's address and port."""
    machines = EngineMachines.of(os.environ)
    if machines is not None:
        os.environ["VLLM_HOST_IP"] = machines.own
        rendezvous.give_up_port()  # vLLM listens there
    return machines


class VllmEngine(Engine):
    """Answers one batch per call; it accepts one call at a time, so nothing can be cancelled."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        machines = on_this_machine()
        self._llm = LLM(**settings.arguments(machines))
        self._relay = MessageRelay(over_machines=machines is not None)
        self.weights = HeldWeights()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int | None, ticket: str = ""
    ) -> list[Response]:
        activity.advance("generate")
        held = self.weights.require(version)
        prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        params = [_sampling_params(request, sampling) for request in requests]
        responses: list[Response] = []
        for output in self._llm.generate(prompts, params, use_tqdm=False):
            drawn = output.outputs[0]
            tokens, finished = list(drawn.token_ids), drawn.finish_reason == "stop"
            responses.append(Response.of(tokens, _logprobs(drawn), [held] * len(tokens), finished=finished))
        return responses

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[NextLogprobs]:
        activity.advance("next_logprobs")
        self.weights.require(None)
        params = _next_params(temperature)
        outputs = self._llm.generate([_apart(prompt) for prompt in prompts], params, use_tqdm=False)
        return [_next_logprobs(output.outputs[0]) for output in outputs]

    def begin_refit(self, version: int) -> None:
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
        self.weights.whole = False
        self._llm.sleep(level=2)

    def wake_up(self, tags: Sequence[str]) -> None:
        activity.advance("wake_up")
        self._llm.wake_up([*tags])

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class AsyncVllmEngine(Engine):
    """Answers requests as they arrive; weights can change during an answer.

    A refit pauses generation. Requests in flight then continue with the new weights, and their key-value caches are
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
        self, requests: Sequence[Request], sampling: Sampling, version: int | None = None, ticket: str = ""
    ) -> list[Response]:
        activity.advance("generate")
        if version is not None:
            self.weights.require(version)
        ticket = ticket or f"group {next(self._numbers)}"
        answers = asyncio.gather(*(self._answer(request, sampling) for request in requests))
        self._asked[ticket] = answers
        try:
            return list(await answers)
        except asyncio.CancelledError:
            if ticket in self._asked:  # this call was cancelled
                raise
            raise GenerationCancelledError(f"{ticket} was cancelled") from None
        finally:
            self._asked.pop(ticket, None)

    async def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[NextLogprobs]:
        activity.advance("next_logprobs")
        self.weights.require(None)

        async def after(prompt: Sequence[int]) -> NextLogprobs:
            name, params = str(next(self._numbers)), _next_params(temperature)
            answers = self._llm.generate(_apart(prompt), params, request_id=name)
            [whole] = [_next_logprobs(output.outputs[0]) async for output in answers]
            return whole

        return list(await asyncio.gather(*(after(prompt) for prompt in prompts)))

    async def cancel(self, ticket: str) -> None:
        if (answers := self._asked.pop(ticket, None)) is not None:
            answers.cancel()

    async def begin_refit(self, version: int) -> None:
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
        self.weights.whole = False
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
        params.output_kind = (
            RequestOutputKind.DELTA
        )  # token by token, to record the version that sampled each
        prompt: Any = {"prompt_token_ids": list(request.prompt)}
        async for output in self._llm.generate(prompt, params, request_id=str(next(self._numbers))):
            activity.advance("a token of a response")
            [drawn] = output.outputs
            assert self.weights.newest is not None  # nothing is generated before the first refit
            tokens += drawn.token_ids
            logprobs += _logprobs(drawn)
            versions += [self.weights.newest] * len(drawn.token_ids)
            finished = drawn.finish_reason == "stop"
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
        # vLLM seeds torch's generators, and takes -1 for no seed: keys lose their sign.
        seed=request.seed & (1 << 63) - 1,
        logprobs=0,  # only the drawn token's
        # The end-of-sequence that counts is among the stop ids, whatever config.json has.
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
    """Request one token, to get the distribution that it is drawn from."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,  # otherwise the process-wide generator would be used
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
    return [row[token].logprob for row, token in zip(output.logprobs or (), output.token_ids, strict=True)]


class VllmShare:
    """Runs a `VllmEngine`'s processes on one of its further machines.

    They receive their work from the engine itself through vLLM's own queues.
    """

    usage: ClassVar[str] = "LLM_CLASS"
    """vLLM's name for the use of the engine, which decides the sizes that its processes have to agree on."""

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
    usage = "ENGINE_CONTEXT"


def reads_back(sent: Digests) -> bool:
    """Return whether the engine reads its weights back to compare them with the sent ones."""
    return any(digest is not None for digest in sent.values())


def require_refit(sent: Digests, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise IncompleteRefitError, naming tensors, unless every process holds all sent weights.

    reports: all processes' results of `RefitExtension.finish_refit`.
    """
    for report in reports:
        require_as_sent(sent, dict.fromkeys(report["received"]), unwritten=report["unwritten"])
    if reads_back(sent):
        unreadable = dict.fromkeys(name for report in reports for name in report["unreadable"])
        blocks = ([HeldBlock.from_message(block) for block in report["blocks"]] for report in reports)
        require_as_sent(sent, joined(blocks), unreadable=unreadable)
