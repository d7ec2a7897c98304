"""The driver's interface to engines, which answer with weights of a known version and receive new ones in buckets.

B rows, P prompt length, T new tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nemo_rl_mcore.data.batched_data_dict import digest_of_ids
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.ops.sampling import bound_of
from nemo_rl_mcore.rank.refit.digests import Digests

if TYPE_CHECKING:
    from nemo_rl_mcore.config import PolicyConfig

type Eventually[Result] = Result | Awaitable[Result]
type NextLogprobs = NDArray[np.float32]
"""Log-probability of every possible next token, [V], by id."""


class WrongWeightsError(RuntimeError):
    """A request named weights that the engine does not hold, or a refit would return to older ones."""


class EngineFailedError(RunStoppedError):
    """A group of requests was not answered: the engine raised, died, or hung."""


class EngineDiedError(EngineFailedError):
    """The engine died or hung, independently of the group, which another engine can answer."""


class GenerationCancelledError(RuntimeError):
    """The answer was cancelled before it was complete."""


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled, and where they end.

    stop_ids end a response and belong to it; stop_strings need a tokenizer. greedy takes the likeliest token, whose
    log-probability is then that of temperature 1. top_k and top_p keep only the likeliest tokens, None and 1 all.
    longest: maximum tokens of prompt and response together, None for no limit.
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
            longest=policy.longest_of_prompt,
        )

    def bound(self, prompt: Sequence[int]) -> int:
        """Return the maximum response length for a prompt; `data.validation` has refused prompts that leave no room."""
        return bound_of(self.max_new_tokens, self.longest, len(prompt))


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
    """An answer, by token; finished: it ended by itself, not at the length limit.

    versions: the version of the weights that sampled each token; never decreasing. digest: the tokens' digest, taken on
    sampling; see `data.token_digests`.
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    versions: list[int]
    digest: int

    @classmethod
    def of(cls, tokens: list[int], logprobs: list[float], versions: list[int], *, finished: bool) -> Self:
        return cls(tokens, logprobs, finished, versions, digest_of_ids(tokens))


class Engine(Protocol):
    """The class of an engine's actor. Where its methods are coroutines, calls overlap, and weights change in between.

    A refit is `begin_refit`, buckets (see `refit.transports`), `finish_refit`; before the first one, and after one that
    did not come to its end, the engine holds weights of no version. WrongWeightsError is raised for weights that it
    does not hold.
    """

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int | None, ticket: str = ""
    ) -> Eventually[list[Response]]:
        """Answer, in the order of the requests; raises GenerationCancelledError.

        version: of the weights, which the engine must hold now; None is whatever it holds, also if that changes under
        way. ticket: what `cancel` calls this group of requests.
        """
        ...

    def next_logprobs(
        self, prompts: Sequence[Sequence[int]], temperature: float
    ) -> Eventually[Sequence[NextLogprobs]]:
        """Return all next tokens' log-probabilities after each prompt, computed as in `generate`; change no state."""
        ...

    def cancel(self, ticket: str) -> Eventually[None]:
        """Cancel a group of requests if it is being answered."""

    def begin_refit(self, version: int) -> Eventually[None]:
        """Prepare for buckets of a version that is newer than any before, or the last one, which a sleep gave up."""

    def load_bucket(self, message: Mapping[str, Any]) -> Eventually[None]:
        """Load a bucket; when it returns, the sender may reuse the memory."""

    def finish_refit(self, version: int, sent: Digests) -> Eventually[int]:
        """Acknowledge the version once all sent weights are held; caches of older weights are dropped.

        sent: the tensors by name, each with its digest (`refit.digests`) in the number format in which the engine
        holds it, or None where only names are compared. Raises IncompleteRefitError, naming the tensors that differ,
        are missing, or were not sent; the engine then holds weights of no version.
        """
        ...

    def join_broadcast(
        self, *, address: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> Eventually[None]:
        """Join the group in which the trainer's rank 0 broadcasts; this engine's processes start at `first_rank`."""

    def sleep(self) -> Eventually[None]:
        """Free the GPU memory of the key-value cache and the weights, which the next refit sends again."""

    def wake_up(self, tags: Sequence[str]) -> Eventually[None]:
        """Allocate memory again for `weights` or `kv_cache`."""

    def health(self) -> Eventually[None]:
        """Return if all of the engine's processes are alive; otherwise raise the error that ended them."""

    def shutdown(self) -> Eventually[None]:
        """End the engine with its processes."""


@dataclass(frozen=True)
class EngineKind:
    """All that the driver knows of the engines that it places, starts, refits and starts again.

    name: of the kind, for messages. engine: the class of an actor, an `Engine` that is built from `settings`.
    environment: variables of its processes besides those of a rank. engines: how many there are, unless the GPUs that
    they share or are given say so. processes: of each one, with a GPU each where there are some. share: the class of
    the actors on its further machines, built from the same settings, whose `serve` returns, or raises, once a process
    of theirs has ended; None where an engine is on one. sleeps: training gets its memory.
    call_timeout_s: without progress, for an answer.
    precision: number format that the engines hold weights in; None is the one they are sent in.
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
    """The version of an engine's weights; there is none during a refit."""

    newest: int | None = None
    """The version of the last successful refit."""
    whole: bool = False
    """Whether the weights have that version; False during a refit and after a failed one."""

    @property
    def version(self) -> int | None:
        return self.newest if self.whole else None

    def begin(self, version: int) -> None:
        """Begin a refit, during which the weights have no version.

        Raises WrongWeightsError unless the new one is higher, or the one that was given up for sleep or broke off.
        """
        if self.newest is not None and (version < self.newest or (self.whole and version == self.newest)):
            raise WrongWeightsError(
                f"weights of version {version} are not newer than those of {self.newest} that came before"
            )
        self.whole = False

    def finish(self, version: int) -> int:
        """Record that all of this version's weights have arrived, and return it."""
        self.newest, self.whole = version, True
        return version

    def require(self, version: int | None) -> int:
        """Return the version to answer with; raises WrongWeightsError unless it is held (None: any)."""
        if self.version is None or version not in (None, self.version):
            asked = "any" if version is None else f"version {version}"
            none = "of no version: no refit has ended well since"
            held = none if self.version is None else f"of {self.version}"
            raise WrongWeightsError(f"asked for weights of {asked}, and the engine's are {held}")
        return self.version


@dataclass(frozen=True)
class EngineMachines:
    """An engine's machines, from the point of view of one of them.

    first, own: addresses of the first machine (the rendezvous) and of this one. number: this machine's number. count:
    the number of machines. port: the rendezvous port, which the first machine chooses when it starts.
    """

    first: str
    own: str
    number: int
    count: int
    port: int = 0

    def environment(self) -> dict[str, str]:
        """Return a process's variables on this machine; the port is added once it is known."""
        place = {"NODE_RANK": str(self.number), "NNODES": str(self.count)}
        return {"MASTER_ADDR": self.first, "NODE_ADDR": self.own, **place}

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """Read a process's variables; return None for an engine on one machine."""
        if "NNODES" not in environ:
            return None
        number, count = int(environ["NODE_RANK"]), int(environ["NNODES"])
        return cls(environ["MASTER_ADDR"], environ["NODE_ADDR"], number, count, int(environ["MASTER_PORT"]))
