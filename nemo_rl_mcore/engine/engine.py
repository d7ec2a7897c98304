"""The driver's interface to engines, which generate with weights of a known version and receive new ones in buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_rl_mcore.errors import RunStoppedError

if TYPE_CHECKING:
    from nemo_rl_mcore.config import PolicyConfig

type NextLogprobs = NDArray[np.float32]
"""Log-probability of every possible next token, [V], by id."""


class WrongWeightsError(RuntimeError):
    """The engine's weights have another version than the requested one, or a refit would return to an older one."""


class EngineFailedError(RunStoppedError):
    """A group of requests failed: the engine raised an error, died, or hung."""


class EngineDiedError(EngineFailedError):
    """The engine died or hung; another engine can answer the group of requests."""


class GenerationCancelledError(RuntimeError):
    """The request was cancelled before its response was complete."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and ends of responses.

    stop_ids end a response and belong to it; stop_strings need a tokenizer. greedy takes the most probable token, with
    its log-probability at temperature 1. top_k and top_p keep only the most probable tokens; None and 1 keep all.
    longest: maximum tokens of prompt and response together, None for no limit; see `ops.sampling.bound_of`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    greedy: bool = False
    longest: int | None = None

    @classmethod
    def of(cls, policy: PolicyConfig, stop_ids: Sequence[int], *, greedy: bool) -> Self:
        generation = policy.generation
        return cls(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            stop_ids=tuple(stop_ids),
            stop_strings=generation.stop_strings or (),
            greedy=greedy,
            longest=policy.max_total_sequence_length if generation.fit_to_sequence else None,
        )


@dataclass(frozen=True)
class Request:
    """A prompt and the key of its noise, int64; see `ops.sampling.sample_keys`.

    stop_strings: strings that end this response, besides those of `Sampling`.
    """

    prompt: Sequence[int]
    seed: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Response:
    """A response, by token; finished: it ended by itself, not at the length limit.

    versions: the version of the weights that sampled each token; never decreasing. digest: the tokens', taken on
    sampling, see `data.batched_data_dict.digest_of_ids`. routes: with router replay, the experts [N, L, K] of the
    prompt's and the response's tokens, without the last, which has not passed through the model.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    versions: list[int]
    digest: int
    routes: NDArray[np.integer] | None = None


class Engine:
    """The base of an engine's actor. If its methods are coroutines, calls overlap, and weights change in between.

    `generate(requests, sampling, version, ticket="")` returns responses in the order of the requests. version: the
    weights' required version, otherwise WrongWeightsError; None accepts any, even several in one response. ticket: name
    of this group of requests for `cancel(ticket)`, which makes the call raise GenerationCancelledError.
    `next_logprobs(prompts, temperature)` returns the log-probabilities of all next tokens after each prompt, computed
    as in `generate`; it changes no state.

    A refit is `begin_refit(version)`, with a newer version, or the last one if a sleep has dropped it; then
    `load_bucket(message)` for each bucket (see `refit.transports`), whose memory the sender may reuse afterwards; then
    `finish_refit(version, sent)`, which verifies that all sent weights have arrived, drops caches of older weights, and
    returns the version. sent: the tensors by name, each with its digest (`refit.digests`) in the engine's number
    format, or None to compare only names. IncompleteRefitError lists the tensors that differ, are missing, or were not
    sent. Before the first refit, and after one that did not finish, the weights have no version.

    `join_broadcast(*, address, port, first_rank, world_size, timeout_s)` joins the group in which the trainer's rank 0
    broadcasts; this engine's processes start at `first_rank`. `sleep()` frees the GPU memory of the key-value cache and
    of the weights, until `wake_up` and the next refit. `shutdown()` ends the engine with its processes.
    """

    def cancel(self, ticket: str) -> Any:
        """Cancel a group of requests, if it is still being answered."""

    def wake_up(self, tags: Sequence[str]) -> Any:
        """Allocate memory again for `weights` or `kv_cache`."""

    def health(self) -> Any:
        """Raise the error that has ended the engine's processes, if they are not alive."""


@dataclass(frozen=True)
class EngineKind:
    """The driver's description of the engines that it places, starts, refits and restarts.

    name: the kind's, for messages. engine: the class of an engine's actor, constructed from `settings`. environment:
    variables of its processes besides those of a rank. engines: their number, unless it follows from their GPUs.
    processes: number per engine, with a GPU each on GPUs. share: the class of the actors on an engine's further
    machines, constructed from the same settings, whose `serve` returns, or raises, once one of their processes has
    ended; None if an engine has one machine. sleeps: the engines free their memory during training. call_timeout_s: a
    call's limit without progress. precision: number format of the engines' weights; None is the one they are sent in.
    """

    name: str
    engine: type[Engine]
    settings: Any
    environment: Mapping[str, str]
    engines: int
    processes: int
    sleeps: bool
    bucket_bytes: int
    call_timeout_s: float
    max_restarts: int
    precision: str | None = None
    share: type | None = None

    @property
    def noun(self) -> str:
        return f"{self.name} engine"


@dataclass
class HeldWeights:
    """The version of an engine's weights."""

    newest: int | None = None
    """The version of the last successful refit."""
    version: int | None = None
    """The weights' version; None asleep, during a refit and after a failed one."""

    def begin(self, version: int) -> None:
        """Begin a refit; WrongWeightsError unless its version is higher, or the last one, dropped or incomplete."""
        if self.newest is not None and (version < self.newest or version == self.version):
            raise WrongWeightsError(
                f"weights of version {version} are not newer than those of {self.newest} that came before"
            )
        self.version = None

    def require(self, version: int | None) -> int:
        """Return the weights' version; WrongWeightsError unless it is this one (None: any)."""
        if self.version is None or version not in (None, self.version):
            asked = "any" if version is None else f"version {version}"
            none = "of no version: no refit has ended well since"
            held = none if self.version is None else f"of {self.version}"
            raise WrongWeightsError(f"asked for weights of {asked}, and the engine's are {held}")
        return self.version
