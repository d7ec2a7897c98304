"""vLLM engines that answer prompts with weights of a known version: one for whole batches, one for single requests.

Both run in the process that builds them (the asynchronous one with a process of vLLM's own below it). vLLM is imported
when an engine is built, so that `Request` and its like cost a driver nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOGPROBS_MODE = "processed_logprobs"
"""Of the distribution that is sampled from: the temperature divides the logits, as in training."""
_EXTENSION = "nemo_rl_mcore.generation.vllm.worker_extension.RefitExtension"


class WrongWeightsError(RuntimeError):
    """An engine was asked to answer with weights that it does not hold, or to go back to older ones."""


@dataclass(frozen=True)
class EngineSettings:
    """How to build an engine.

    model_dir: folder with config.json; weights are drawn at random until the first refit. precision: `float32` or
    `bfloat16`. kv_cache_memory_bytes: None is a share of the GPU's memory. tokenizer: folder of one, which stop strings
    need.
    """

    model_dir: str
    precision: str
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = True
    enable_sleep_mode: bool = False
    tokenizer: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's engines."""
        return {
            "model": self.model_dir,
            "load_format": "dummy",
            "tokenizer": self.tokenizer,
            "skip_tokenizer_init": self.tokenizer is None,
            "dtype": self.precision,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "enforce_eager": self.enforce_eager,
            "enable_sleep_mode": self.enable_sleep_mode,
            "logprobs_mode": _LOGPROBS_MODE,
            "worker_extension_cls": _EXTENSION,
            "disable_log_stats": True,
        }


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn and where they end.

    stop_ids end a response and belong to it; stop_strings need a tokenizer. greedy takes the likeliest token, whose
    log-probability is then that of temperature 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    greedy: bool = False


@dataclass(frozen=True)
class Request:
    """A prompt and the seed of its noise."""

    prompt: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """What came back; `finished` says that it ended by itself, not at the length limit.

    Its tokens were drawn with weights of the versions `first_version` to `last_version`.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    first_version: int
    last_version: int


@dataclass
class HeldWeights:
    """Which weights an engine holds: of a version, or of none from the beginning of a refit to its end."""

    newest: int | None = None
    """The version of the last refit that ended well."""
    whole: bool = False
    """Whether the weights are of that version; false while a refit is under way, or after one that failed."""

    @property
    def version(self) -> int | None:
        """The version that the engine can answer with, if any."""
        return self.newest if self.whole else None

    def begin(self, version: int) -> None:
        """From here on the weights are of no version; raises WrongWeightsError unless the new one is higher."""
        if self.newest is not None and version <= self.newest:
            raise WrongWeightsError(
                f"weights of version {version} are not newer than those of {self.newest} that came before"
            )
        self.whole = False

    def finish(self, version: int) -> int:
        """All weights of this version are there."""
        self.newest, self.whole = version, True
        return version

    def drop(self) -> None:
        """The weights are gone until the next refit."""
        self.whole = False

    def require(self, version: int) -> None:
        """Raise WrongWeightsError unless the weights are of this version."""
        if self.version != version:
            held = (
                "of no version: no refit has ended well since"
                if self.version is None
                else f"of {self.version}"
            )
            raise WrongWeightsError(f"asked for weights of version {version}, and the engine's are {held}")


class SyncEngine:
    """Answers a batch at a time."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        self._llm = LLM(**settings.arguments())
        self.weights = HeldWeights()

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Response]:
        """The responses, in the order of the requests; raises WrongWeightsError for another version's weights."""
        self.weights.require(version)
        prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        params = [_sampling_params(request, sampling) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [_response(output.outputs[0], version, version) for output in outputs]

    def begin_refit(self, version: int) -> None:
        """Prepare for the buckets of a version; until `finish_refit` nothing is generated."""
        self.weights.begin(version)
        self._llm.collective_rpc("begin_refit")

    def load_bucket(self, message: Mapping[str, Any]) -> None:
        """Load a bucket; when it returns, the sender may reuse the memory."""
        self._llm.collective_rpc("load_refit_bucket", args=(message,))

    def finish_refit(self, version: int, tensors: int) -> int:
        """Acknowledge the version once all its `tensors` are in place; cached prefixes of older weights are dropped."""
        self._llm.collective_rpc("finish_refit", args=(tensors,))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after a refit")
        return self.weights.finish(version)

    def join_refit_broadcast(self, **meeting: Any) -> None:
        """See `RefitExtension.join_refit_broadcast`."""
        self._llm.collective_rpc("join_refit_broadcast", kwargs=meeting)

    def sleep(self) -> None:
        """Give the GPU's memory back: the weights, which the next refit sends again, and the key-value cache."""
        self.weights.drop()
        self._llm.sleep(level=2)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again for `weights` or `kv_cache`."""
        self._llm.wake_up([*tags])

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()


class AsyncEngine:
    """Answers requests as they come; weights can change under way.

    A refit pauses generation. Requests in flight stay, and go on with the new weights: their key-value caches are
    computed anew, and their responses tell both versions.
    """

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings.arguments()))
        self._numbers = itertools.count()
        self._may_generate = asyncio.Event()
        self.weights = HeldWeights()

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int | None = None
    ) -> list[Response]:
        """The responses, in the order of the requests.

        With a version, raises WrongWeightsError unless the engine holds it now; without one, requests wait for a
        refit under way to end.
        """
        if version is not None:
            self.weights.require(version)
        return list(await asyncio.gather(*(self._answer(request, sampling) for request in requests)))

    async def begin_refit(self, version: int) -> None:
        """Pause, keeping the requests in flight, and prepare for the buckets of a version."""
        self.weights.begin(version)
        self._may_generate.clear()
        # Clears the prefix cache, and the caches of the requests in flight with it.
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.collective_rpc("begin_refit")

    async def load_bucket(self, message: Mapping[str, Any]) -> None:
        """See `SyncEngine.load_bucket`."""
        await self._llm.collective_rpc("load_refit_bucket", args=(message,))

    async def finish_refit(self, version: int, tensors: int) -> int:
        """See `SyncEngine.finish_refit`; generation goes on."""
        await self._llm.collective_rpc("finish_refit", args=(tensors,))
        self.weights.finish(version)
        await self._llm.resume_generation()
        self._may_generate.set()
        return version

    async def join_refit_broadcast(self, **meeting: Any) -> None:
        """See `RefitExtension.join_refit_broadcast`."""
        await self._llm.collective_rpc("join_refit_broadcast", kwargs=meeting)

    async def sleep(self) -> None:
        """See `SyncEngine.sleep`; requests in flight are ended."""
        self.weights.drop()
        self._may_generate.clear()
        await self._llm.sleep(level=2)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """See `SyncEngine.wake_up`."""
        await self._llm.wake_up([*tags])

    def raise_if_dead(self) -> None:
        """Raise what vLLM's process below this one died of."""
        if self._llm.errored:
            raise self._llm.dead_error

    async def close(self) -> None:
        """End the engine and its process."""
        self._llm.shutdown()

    async def _answer(self, request: Request, sampling: Sampling) -> Response:
        await self._may_generate.wait()
        first_version = self._newest()
        [output] = [
            output
            async for output in self._llm.generate(
                {"prompt_token_ids": list(request.prompt)},
                _sampling_params(request, sampling),
                request_id=str(next(self._numbers)),
            )
        ]
        return _response(output.outputs[0], first_version, self._newest())

    def _newest(self) -> int:
        assert self.weights.newest is not None  # before the first refit nothing is generated
        return self.weights.newest


def _sampling_params(request: Request, sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        seed=request.seed,
        logprobs=0,  # of the drawn token alone
        # The end-of-sequence that counts is among the stop ids, whatever config.json says.
        ignore_eos=True,
        stop_token_ids=list(sampling.stop_ids),
        stop=list(sampling.stop_strings) or None,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _response(output: Any, first_version: int, last_version: int) -> Response:
    tokens = list(output.token_ids)
    logprobs = [row[token].logprob for row, token in zip(output.logprobs, tokens, strict=True)]
    return Response(tokens, logprobs, output.finish_reason == "stop", first_version, last_version)
