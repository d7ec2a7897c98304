"""Run a combination of the meeting matrix: the launcher's own parts over ranks of the pool, on recorded rows.

What is recorded stands in for the two parts whose rows no two runs would share: the engine and the environment.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import meeting_ranks
import torch
from rank_pool import RankPool

from nemo_rl_mcore.agents import endpoint
from nemo_rl_mcore.agents.agents import AgentEnd
from nemo_rl_mcore.agents.session import NoRoomError, Session
from nemo_rl_mcore.config import ClusterConfig, RunConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver import run as launch
from nemo_rl_mcore.driver.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.driver.observability import Sample
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts import start
from nemo_rl_mcore.driver.rollouts.events import EVENTS_FILE, Timeline, read_events
from nemo_rl_mcore.driver.rollouts.scheduler import Draw, DrawnGroup

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
    """Keeps what is logged of each step, but for what is the machine's, such as the memory and the time it takes."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.last_row: dict[str, float] = {}

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def phase(self, _name: str) -> nullcontext[None]:
        return nullcontext()

    def attempt(self) -> nullcontext[None]:
        return nullcontext()

    def redoing(self) -> nullcontext[None]:
        return nullcontext()

    def checkpointed(self, _step: int) -> None: ...

    def startup(self, _part: str, _told_as: str = "") -> nullcontext[dict[str, float]]:
        return nullcontext({})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        of_machine = ("performance/", "async/")
        self.metrics[step] = {
            name: value for name, value in metrics.items() if not name.startswith(of_machine)
        }

    def add_samples(self, _samples: Iterable[Sample]) -> None: ...


@dataclass
class RecordedAnswers:
    """Answers that depend on (step, prompt, sample, turn) alone, of uneven lengths; a `GenerationInterface`."""

    max_new_tokens: int

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        prompts, samples = data["prompt_index"].tolist(), data["sample_index"].tolist()
        turns = data["turn_index"].tolist() if "turn_index" in data else [0] * data.size
        rows = [self._answer(step, *key) for key in zip(prompts, samples, turns, strict=True)]
        tokens, logprobs, lengths, finished = zip(*rows, strict=True)
        return BatchedDataDict(
            tokens=torch.stack(tokens),
            logprobs=torch.stack(logprobs),
            lengths=torch.tensor(lengths),
            finished=torch.tensor(finished),
        )

    def _answer(
        self, step: int, prompt: int, sample: int, turn: int
    ) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        seed = ((step * 1009 + prompt) * 1009 + sample) ^ turn
        generator = torch.Generator().manual_seed(seed)
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


_COMMITTED_WITHIN_S, _ANSWERED_WITHIN_S = 0.1, 10.0


@dataclass
class RecordedEngines(RecordedAnswers):
    """The same answers, group by group, of the versions that it has while it answers; an `EngineGeneration`.

    late: versions for which the first group that is asked of a version waits, at most until `last` is there; what
    is asked besides overtakes it. The run goes on with that later version when it is answered, so that what a
    checkpoint holds, and with it the order, depends on no clock.
    """

    late: int
    last: int
    weights_digest = ""
    answering, joining, fleet = True, False, SimpleNamespace(restarts=0)
    _version: int = -1
    _asked_first: bool = False
    _awaited_at: int | None = None

    def update_weights(self, version: int) -> None:
        self._version, self._asked_first = version, True
        deadline = time.monotonic() + _ANSWERED_WITHIN_S
        while self._awaited_at is not None and version >= self._awaited_at and time.monotonic() < deadline:
            time.sleep(1e-3)

    async def respond(self, data: BatchedDataDict, *, step: int, ticket: str) -> BatchedDataDict:
        began, first, self._asked_first = self._version, self._asked_first, False
        await asyncio.sleep(0)
        due = min(began + self.late, self.last)
        if first and began < due:
            self._awaited_at = due
            while self._version < due:
                await asyncio.sleep(1e-3)
            # By then it is committed, which takes no other call.
            asyncio.get_running_loop().call_later(_COMMITTED_WITHIN_S, self._answered)
        answers = self.generate(data, step=step)
        versions = torch.full_like(answers["tokens"], self._version)
        versions[:, 0] = began
        behind = torch.arange(versions.shape[1]) >= answers["lengths"][:, None]
        return BatchedDataDict(answers, weight_versions=versions.masked_fill(behind, -1))

    def _answered(self) -> None:
        self._awaited_at = None

    def whereabouts(self, ticket: str) -> str:
        return ticket

    def rejoin(self) -> None:
        raise NotImplementedError

    def listen(self, changed: Callable[[], None]) -> None: ...


class RecordedRewards:
    """Rewards in tenths from a table; an `ScoresAnswers`. The answers to every fifth prompt earn alike."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        return [_reward(prompt.index, row) for row, prompt in enumerate(prompts)]


def _reward(prompt: int, answer: int) -> float:
    return REWARDS[(prompt + answer * bool(prompt % 5)) % len(REWARDS)]


class RecordedAgents:
    """Agents without a process: they call the model once, twice or three times; an `endpoint.agents.Agents`.

    A second call forgets the first token of the prompt, and so begins a row. A third one, which goes on from the second
    answer, has no room where that is long.
    """

    def __init__(self, *_args: Any) -> None: ...

    async def run(self, session: Session, _url: str, _task: Mapping[str, Any]) -> AgentEnd:
        shown = TOKENIZER.encode(session.prompt.text)
        call = await session.ask(shown)
        if session.sample % 3:
            call = await session.ask(shown[1:])
        if session.sample % 3 == 2:
            with suppress(NoRoomError):
                await session.ask([*call.ids, TOKENIZER.eos_token_id], max_tokens=1)
        session.close(_reward(session.prompt.index, session.sample))
        return AgentEnd()


type Metrics = dict[str, float]
type Trained = dict[int, list[int]]
"""The groups of each step, by position in the order of their draw, as they were trained."""


@dataclass(frozen=True)
class DrawnLike(Draw):
    """Draws for each step the groups that another run has trained there."""

    trained: Trained = field(default_factory=dict, kw_only=True)

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        places = [divmod(position, self.groups_per_step) for position in self.trained.get(step, ())]
        return [super(DrawnLike, self).groups_of(drawn_by + 1)[place] for drawn_by, place in places]

    def play_now(self, groups: Sequence[DrawnGroup]) -> list[BatchedDataDict]:
        # One by one: those of a step may have been drawn by several, and with that their noise.
        return [batch for group in groups for batch in super(DrawnLike, self).play_now([group])]


@dataclass
class Outcome:
    """What a run leaves: metrics of each step, what was asked of the ranks of each model at its end, and its log.

    log: of the groups, where the recipe samples.
    """

    metrics: dict[int, Metrics] = field(default_factory=dict)
    of_models: list[Any] = field(default_factory=list)
    log: Timeline = field(default_factory=Timeline)

    @property
    def trained(self) -> Trained:
        return {step: [one for chunk in chunks for one in chunk] for step, chunks in self.log.chunks.items()}


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


def run(
    config: RunConfig, pool: RankPool, ask: Callable[[int, PoolGroup], Any], like: Trained | None = None
) -> Outcome:
    """Run a recipe to its end as the launcher does; `ask` is called with each model's number and ranks at the end.

    like: the groups that each step is to train on, in place of those that it would draw.

    Raises RunStoppedError, RankFailedError and whatever else stops a run.
    """
    # As the command does, for the log of groups.
    folder = Path(config.logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = open_checkpoints(config, notify=lambda _line: None)
    parts = replace(launch.open_parts(config), environments={"": RecordedRewards()})
    groups, observer = _Groups(pool), Observer()
    with ExitStack() as stack:
        stack.enter_context(patch.object(launch, "Policy", partial(Policy, group=groups)))
        stack.enter_context(patch.object(launch, "open_generation", _recorded))
        stack.enter_context(patch.object(endpoint, "Agents", RecordedAgents))
        if like is not None:
            stack.enter_context(patch.object(start, "Draw", partial(DrawnLike, trained=like)))
        saved = start.read_saved(config, checkpoints.start)
        for _ in launch._train(
            parts, NoCluster(config.cluster), checkpoints, observer, stack, saved, launch.Watch()
        ):  # type: ignore[arg-type]
            pass
        asked = [ask(number, group) for number, group in enumerate(groups.made)]
    path = folder / EVENTS_FILE
    return Outcome(observer.metrics, asked, Timeline.of(read_events(path) if path.exists() else []))


@contextmanager
def _recorded(config: RunConfig, *_others: Any) -> Iterator[RecordedAnswers]:
    longest = config.policy.generation.max_new_tokens
    if not config.asynchronous:
        yield RecordedAnswers(longest)
        return
    late = config.max_age if config.asynchrony.order == "as_completed" else 0
    yield RecordedEngines(longest, late, config.loop.max_num_steps - 1)
