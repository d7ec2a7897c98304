"""vLLM as the generation engine: an engine for whole batches, and one for single requests.

Both run in the process that constructs them (the asynchronous one with a child process of vLLM's own). vLLM is imported
by the constructors, so that a driver can import the classes without it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.engine.engine import (
    Engine,
    GenerationCancelledError,
    HeldWeights,
    NextLogprobs,
    Request,
    Response,
    Sampling,
)
from nemo_rl_mcore.engine.receivers import MessageRelay
from nemo_rl_mcore.ops.sampling import bound_of
from nemo_rl_mcore.rank import activity
from nemo_rl_mcore.rank.refit.digests import Digests, HeldBlock, joined, require_as_sent
from nemo_rl_mcore.rank.rendezvous import LISTENING_SOCKET

WHOLE_VOCABULARY = -1


@dataclass(frozen=True)
class EngineMachines:
    """An engine's machines, as seen by a process on one of them.

    first, own: addresses of the first machine (the rendezvous) and of this one. number: this machine's number. count:
    the number of machines. port: the rendezvous port, which the first machine chooses when it starts.
    """

    first: str
    own: str
    number: int
    count: int
    port: int


@dataclass(frozen=True)
class EngineSettings:
    """Arguments of an engine.

    model_dir: folder with config.json; weights are random until the first refit. precision: `float32` or `bfloat16`.
    kv_cache_memory_bytes: None means a share of GPU memory. tokenizer: the tokenizer's folder, needed by stop strings.
    routes: to return experts for router replay, the layers that have some and the number format; else None.
    quantization: vLLM's name for the format of the weights, except in layers that match a pattern in `unquantized`.
    further: the recipe's own arguments.
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
    routes: tuple[tuple[int, ...], str] | None = None
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def arguments(self, machines: EngineMachines | None = None) -> dict[str, Any]:
        """Return keyword arguments of vLLM's engines; machines: for an engine on several machines."""
        processes = self.tensor_parallel_size * self.pipeline_parallel_size
        translated = ("model_dir", "precision", "unquantized", "routes", "further")
        same = {name: value for name, value in vars(self).items() if name not in translated}
        arguments: dict[str, Any] = {
            **self.further,
            **same,
            "model": self.model_dir,
            "load_format": "dummy",
            "skip_tokenizer_init": self.tokenizer is None,
            "dtype": self.precision,
            # By default vLLM would have Ray start them, on the ranks' resources.
            "distributed_executor_backend": "mp" if processes > 1 else None,
            # After the temperature, as in training.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": WHOLE_VOCABULARY,
            "worker_extension_cls": "nemo_rl_mcore.engine.vllm.worker_extension.RefitExtension",
            "disable_log_stats": True,
        }
        if self.routes is not None:
            arguments["enable_return_routed_experts"] = True
        if self.unquantized:
            arguments["quantization_config"] = {"ignore": [*self.unquantized]}
        if machines is not None:
            arguments |= {"nnodes": machines.count, "node_rank": machines.number}
            arguments |= {"master_addr": machines.first, "master_port": machines.port}
        return arguments

    def routes_of(self, output: Any) -> Any:
        """Return the routes [N, L, K] of vLLM's output, which has a place for every layer; None if not asked for."""
        if self.routes is None:
            return None
        layers, number_format = self.routes
        return output.routed_experts[:, list(layers)].astype(number_format)


def on_this_machine() -> EngineMachines | None:
    """Read the engine's machines from the environment, and free the first one's port for vLLM; None if there is one."""
    if "NNODES" not in os.environ:
        return None
    number, count = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
    first, own, port = (os.environ[name] for name in ("MASTER_ADDR", "NODE_ADDR", "MASTER_PORT"))
    os.environ["VLLM_HOST_IP"] = own
    if (listening := os.environ.pop(LISTENING_SOCKET, None)) is not None:
        os.close(int(listening))
    return EngineMachines(first, own, number, count, int(port))


class VllmEngine(Engine):
    """Answers one batch per call; calls run one at a time, so nothing can be cancelled."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        machines = on_this_machine()
        self._settings, arguments = settings, settings.arguments(machines)
        self._llm = LLM(**arguments)
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
            drawn: Any = output.outputs[0]
            tokens, finished = list(drawn.token_ids), drawn.finish_reason == "stop"
            rows: Any = zip(drawn.logprobs or (), tokens, strict=True)
            logprobs, versions = [row[token].logprob for row, token in rows], [held] * len(tokens)
            digest, routes = digest_of_ids(tokens), self._settings.routes_of(drawn)
            responses.append(Response(tokens, logprobs, finished, versions, digest, routes))
        return responses

    def next_logprobs(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[NextLogprobs]:
        activity.advance("next_logprobs")
        self.weights.require(None)
        asked = [_for_next_logprobs(prompt, temperature) for prompt in prompts]
        apart = [prompt for prompt, _ in asked]
        params = [params for _, params in asked]
        outputs = self._llm.generate(apart, params, use_tqdm=False)
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
        self.weights.newest = self.weights.version = version
        return version

    def join_broadcast(self, **rendezvous: Any) -> None:
        self._llm.collective_rpc("join_refit_broadcast", kwargs=rendezvous)

    def sleep(self) -> None:
        self.weights.version = None
        self._llm.sleep(level=2)

    def wake_up(self, tags: Sequence[str]) -> None:
        activity.advance("wake_up")
        self._llm.wake_up([*tags])

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class AsyncVllmEngine(Engine):
    """Answers requests as they arrive; weights can change during a response.

    A refit pauses generation. Requests in flight then continue with the new weights, and their key-value caches are
    recomputed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        machines = on_this_machine()
        self._settings, arguments = settings, AsyncEngineArgs(**settings.arguments(machines))
        self._llm = AsyncLLM.from_engine_args(arguments)
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
            apart, params = _for_next_logprobs(prompt, temperature)
            outputs = self._llm.generate(apart, params, request_id=str(next(self._numbers)))
            [logprobs] = [_next_logprobs(output.outputs[0]) async for output in outputs]
            return logprobs

        return list(await asyncio.gather(*(after(prompt) for prompt in prompts)))

    async def cancel(self, ticket: str) -> None:
        if (answers := self._asked.pop(ticket, None)) is not None:
            answers.cancel()

    async def begin_refit(self, version: int) -> None:
        activity.advance("begin_refit")
        self.weights.begin(version)
        self._may_generate.clear()
        # This clears the prefix cache, and the caches of the requests in flight with it.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.collective_rpc("begin_refit")

    async def load_bucket(self, message: Mapping[str, Any]) -> None:
        activity.advance("load_bucket")
        await self._llm.collective_rpc("load_refit_bucket", args=(self._relay.relay(message),))

    async def finish_refit(self, version: int, sent: Digests) -> int:
        activity.advance("finish_refit")
        self._relay.close()
        require_refit(sent, await self._llm.collective_rpc("finish_refit", args=(reads_back(sent),)))
        self.weights.newest = self.weights.version = version
        await self._llm.resume_generation()
        self._may_generate.set()
        return version

    async def join_broadcast(self, **rendezvous: Any) -> None:
        await self._llm.collective_rpc("join_refit_broadcast", kwargs=rendezvous)

    async def sleep(self) -> None:
        self.weights.version = None
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
        finished, routes = False, None
        params = _sampling_params(request, sampling)
        # Token by token, to record the version that sampled each.
        params.output_kind = RequestOutputKind.DELTA
        prompt: Any = {"prompt_token_ids": list(request.prompt)}
        async for output in self._llm.generate(prompt, params, request_id=str(next(self._numbers))):
            activity.advance("a token of a response")
            drawn: Any = output.outputs[0]
            assert self.weights.newest is not None  # nothing is generated before the first refit
            tokens += drawn.token_ids
            rows = zip(drawn.logprobs or (), drawn.token_ids, strict=True)
            logprobs += [row[token].logprob for row, token in rows]
            versions += [self.weights.newest] * len(drawn.token_ids)
            finished = drawn.finish_reason == "stop"
            if output.finished:
                routes = self._settings.routes_of(drawn)
        return Response(tokens, logprobs, finished, versions, digest_of_ids(tokens), routes)


def _sampling_params(request: Request, sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop_strings = [*sampling.stop_strings, *request.stop_strings]
    return SamplingParams(
        max_tokens=bound_of(sampling.max_new_tokens, sampling.longest, len(request.prompt)),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        # vLLM seeds torch's generators, and -1 means no seed: keys lose their sign.
        seed=request.seed & (1 << 63) - 1,
        logprobs=0,  # only the drawn token's
        # The right end-of-sequence is among the stop ids, whatever config.json has.
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


def _for_next_logprobs(prompt: Sequence[int], temperature: float) -> tuple[Any, Any]:
    """Return vLLM's prompt and parameters for one token, with the distribution that it is drawn from."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,  # otherwise the process-wide generator would be used
        logprobs=WHOLE_VOCABULARY,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # The salt keeps it from sharing a cached prefix with the prompts of `generate`.
    return {"prompt_token_ids": list(prompt), "cache_salt": "next_logprobs"}, params


def _next_logprobs(output: Any) -> NextLogprobs:
    """Read a flat list's only position: the drawn token, then every token."""
    ids = np.asarray(output.logprobs.token_ids)
    row = np.full(ids.max() + 1, np.nan, dtype=np.float32)
    row[ids] = output.logprobs.logprobs
    return row


class VllmShare:
    """Runs a `VllmEngine`'s processes on one of its further machines.

    They get their work from the engine through vLLM's own queues.
    """

    usage: ClassVar[str] = "LLM_CLASS"
    """The engine's `UsageContext`, from which vLLM derives sizes that must agree between its processes."""

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
    """Return True if the engine reads its weights back to compare them with those sent."""
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
