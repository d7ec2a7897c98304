"""Run a combination of the meeting matrix: the launcher's own parts over ranks of the pool, on recorded rows.

What is recorded stands in for the two parts whose rows no two runs would share: the engine and the environment.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import meeting_ranks
import torch
from rank_pool import RankPool

from nemo_rl_mcore import launch
from nemo_rl_mcore.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.config import ClusterConfig, RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.observability import Sample
from nemo_rl_mcore.workers.policy import Policy

TOKENIZER = load_tokenizer("char")
REWARDS = (0.1, 1.0, 0.3, 0.7)
"""Of the answers to a prompt; the next prompt's begin one place later, so that every group has signal."""


class PoolGroup:
    """The ranks of a model, a `WorkerGroup` in a pool."""

    placement = None
    identities: Mapping[int, Any] = {}

    def __init__(self, pool: RankPool, name: str, config: Any, options: Mapping[str, Any]) -> None:
        self._pool, self.name = pool, name
        self.run(meeting_ranks.build, meeting_ranks.packed((config, options)))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """A function of `meeting_ranks` about this model, on every rank."""
        return self._pool.run(function, self.name, *args, stay=True)

    def share(self, value: Any) -> Any:
        return value

    def run_all(
        self,
        method: str,
        *,
        per_rank_kwargs: Sequence[Mapping[str, Any]] = (),
        answering: Collection[int] | None = None,
        context: str = "",
        **kwargs: Any,
    ) -> list[Any]:
        if per_rank_kwargs:
            sent = [meeting_ranks.packed(kwargs | own) for own in per_rank_kwargs]
            said = self.run(meeting_ranks.call_own, method, sent)
        else:
            said = self.run(meeting_ranks.call, method, meeting_ranks.packed(kwargs))
        return [
            pickle.loads(answer) if answering is None or rank in answering else None
            for rank, answer in enumerate(said)
        ]

    def shutdown(self) -> None:
        if self._pool.alive:
            self.run(meeting_ranks.drop)


@dataclass(frozen=True)
class NoCluster:
    """The machines, as far as a second model asks for them."""

    config: ClusterConfig

    def place_colocated(self, *_args: Any) -> None: ...


class Observer:
    """Keeps what is logged of each step, but for what is the machine's, such as the memory that it uses."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def phase(self, _name: str) -> nullcontext[None]:
        return nullcontext()

    def attempt(self) -> nullcontext[None]:
        return nullcontext()

    def redoing(self) -> nullcontext[None]:
        return nullcontext()

    def startup(self, _part: str, _told_as: str = "") -> nullcontext[dict[str, float]]:
        return nullcontext({})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = {name: value for name, value in metrics.items() if not name.startswith("performance/")}
        self.metrics[step] = kept

    def add_samples(self, _samples: Iterable[Sample]) -> None: ...


@dataclass(frozen=True)
class RecordedAnswers:
    """Answers that depend on (step, prompt, sample) alone, of uneven lengths; a `GenerationInterface`."""

    max_new_tokens: int

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        rows = [
            self._answer(step, prompt, sample)
            for prompt, sample in zip(
                data["prompt_index"].tolist(), data["sample_index"].tolist(), strict=True
            )
        ]
        tokens, logprobs, lengths, finished = zip(*rows, strict=True)
        return BatchedDataDict(
            tokens=torch.stack(tokens),
            logprobs=torch.stack(logprobs),
            lengths=torch.tensor(lengths),
            finished=torch.tensor(finished),
        )

    def _answer(self, step: int, prompt: int, sample: int) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        generator = torch.Generator().manual_seed((step * 1009 + prompt) * 1009 + sample)
        longest = self.max_new_tokens
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        finished = length < longest
        tokens = torch.randint(0, 10, (longest,), generator=generator)
        if finished:
            tokens[length - 1] = TOKENIZER.eos_token_id
        # Near those of a uniform choice of 32 tokens.
        logprobs = -3.5 + 0.1 * torch.rand(longest, generator=generator)
        real = torch.arange(longest) < length
        return tokens * real, logprobs * real, length, finished

    def update_weights(self, version: int) -> None: ...

    def offload(self) -> None: ...


class RecordedRewards:
    """Rewards in tenths from a table; an `ScoresAnswers`."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        return [REWARDS[(row + prompt.index) % len(REWARDS)] for row, prompt in enumerate(prompts)]


@dataclass
class Outcome:
    """What a run leaves: metrics of each step, and what was asked of the ranks of each model at its end."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    of_models: list[Any] = field(default_factory=list)


@dataclass
class _Groups:
    """Makes the ranks of one model after the other, as a run starts them."""

    pool: RankPool
    made: list[PoolGroup] = field(default_factory=list)

    def __call__(
        self, _class: type, _cluster: Any, args: tuple[Any, ...], options: Mapping[str, Any], **_: Any
    ) -> PoolGroup:
        self.made.append(PoolGroup(self.pool, f"model {len(self.made)}", *args, options))
        return self.made[-1]


def run(config: RunConfig, pool: RankPool, ask: Callable[[int, PoolGroup], Any]) -> Outcome:
    """Run a recipe to its end as the launcher does; `ask` is called with each model's number and ranks at the end.

    Raises RunStoppedError, RankFailedError and whatever else stops a run.
    """
    checkpoints = open_checkpoints(config, notify=lambda _line: None)
    parts = replace(launch.open_parts(config), environment=RecordedRewards())
    groups, observer = _Groups(pool), Observer()
    with ExitStack() as stack:
        stack.enter_context(patch.object(launch, "Policy", partial(Policy, group=groups)))
        stack.enter_context(patch.object(launch, "open_generation", _recorded))
        launch._train(parts, NoCluster(config.cluster), checkpoints, observer, stack)  # type: ignore[arg-type]
        asked = [ask(number, group) for number, group in enumerate(groups.made)]
    return Outcome(observer.metrics, asked)


@contextmanager
def _recorded(config: RunConfig, *_others: Any) -> Iterator[RecordedAnswers]:
    yield RecordedAnswers(config.policy.generation.max_new_tokens)
