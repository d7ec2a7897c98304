"""Decide which prompt groups are answered now, which ones the next step trains on, and how long each is kept.

One scheduler serves every algorithm that samples. Groups wait here, from the draw of their prompt to the optimizer.
Subclasses ask for them: `SynchronousScheduler` in the thread that trains, all groups of a step in one call before it
trains; `AsynchronousScheduler` in a second thread, group by group, while earlier steps train.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import Any

from torch import Tensor

from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.config.algorithm import RewardScalingConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver.rollouts.events import LogMark, Token
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, SavedLedger, StepState
from nemo_rl_mcore.driver.rollouts.player import GenerationInterface, Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.saved import GroupArchive, SavedRollouts, digest_of_group, versions_of
from nemo_rl_mcore.driver.rollouts.transcript import EpisodeRows, Pace, concatenate_batches
from nemo_rl_mcore.errors import RefusedError, RunStoppedError
from nemo_rl_mcore.rank import activity

EQUAL_REWARDS, SURPLUS = "equal rewards", "the step is full"
"""Why an answered group is not trained on, and why it is answered again by the next step."""


def shape_rewards(section: RolloutConfig, batch: BatchedDataDict) -> None:
    """Scale and penalize `rewards` [B] of scored rows as the section says, row by row.

    What the environment gave is kept as environment_rewards [B]; overlong_filtering clears the sample_mask of responses
    that did not end.
    """
    episodes, shaping = EpisodeRows.of(batch), section.reward_shaping
    batch["environment_rewards"] = batch["rewards"].clone()
    batch["rewards"] = scale_rewards(section.reward_scaling, batch["rewards"])
    if shaping.enabled and shaping.max_response_length is not None:
        batch["rewards"] = penalize_overlong(
            batch["rewards"],
            episodes.on_rows(episodes.total(batch["token_mask"].sum(1))),
            overlong_buffer_length=shaping.overlong_buffer_length,
            overlong_buffer_penalty=shaping.overlong_buffer_penalty,
            max_response_length=shaping.max_response_length,
        )
    if section.overlong_filtering:
        batch["sample_mask"] = batch["sample_mask"] * batch["finished"]


def has_signal(section: RolloutConfig, group: BatchedDataDict) -> bool:
    """Return whether the rewards of a group differ, so that dynamic sampling trains on it.

    They are judged before the penalty of long responses, as NeMo RL does: answers that are all right or all wrong teach
    nothing but their length. Dropped episodes stay in the group, but their rewards do not count.
    """
    rewards = scale_rewards(section.reward_scaling, group["rewards"])[EpisodeRows.of(group).first]
    return bool((rewards != rewards[:1]).any())


def scale_rewards(scaling: RewardScalingConfig, rewards: Tensor) -> Tensor:
    """Return [B] rewards clamped to the source interval and mapped linearly onto the target interval, where enabled."""
    if not scaling.enabled:
        return rewards
    low, high = scaling.source_min, scaling.source_max
    share = (rewards.clamp(low, high) - low) / (high - low)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def penalize_overlong(
    rewards: Tensor,
    response_lengths: Tensor,
    *,
    overlong_buffer_length: int,
    overlong_buffer_penalty: float,
    max_response_length: int,
) -> Tensor:
    """Return [B] rewards less DAPO's soft length penalty (https://arxiv.org/abs/2503.14476).

    The penalty grows linearly from 0, overlong_buffer_length tokens before max_response_length, through
    overlong_buffer_penalty at max_response_length, and keeps growing beyond it.
    """
    if overlong_buffer_length < 1:
        raise RefusedError(
            f"overlong_buffer_length must be at least 1, got {overlong_buffer_length}", code="overlong-buffer"
        )
    excess = (response_lengths - (max_response_length - overlong_buffer_length)).clamp(min=0)
    return rewards - excess / overlong_buffer_length * overlong_buffer_penalty


@dataclass(frozen=True)
class DrawnGroup:
    """A prompt of a step, and what an engine is asked for its group.

    step: that drew the prompt; with the row it keys the noise, whenever the group is answered and trained.
    """

    prompt: Prompt
    asked: BatchedDataDict
    step: int


@dataclass(frozen=True)
class Draw:
    """Draws the prompts of steps, and makes what a step trains on of the answers to them.

    collector: plays episodes. groups_per_step: prompts of a step. samples: responses to each. section: how rewards are
    shaped, and whether groups of equal rewards are replaced (dynamic sampling, https://arxiv.org/abs/2503.14476); None
    does neither.
    """

    prompts: PromptSource
    collector: RolloutCollector
    groups_per_step: int
    samples: int
    section: RolloutConfig | None = None

    def groups_of(self, step: int) -> Sequence[DrawnGroup]:
        drawn = self.prompts.train_batch(step, self.groups_per_step)
        return [DrawnGroup(prompt, self.collector.ask([prompt], self.samples), step) for prompt in drawn]

    def play_now(self, groups: Sequence[DrawnGroup]) -> list[BatchedDataDict]:
        """Return the episodes of groups of one step, answered in one call; called by the thread that trains."""
        pad = self.collector.tokenizer.pad_token_id
        asked = concatenate_batches([group.asked for group in groups], pad)
        batch = self.collector.play_now([group.prompt for group in groups], asked, step=groups[0].step)
        episodes = batch.samples()
        firsts = [episodes[place].start for place in range(0, len(episodes), self.samples)]
        return [batch.slice(first, end) for first, end in zip(firsts, [*firsts[1:], batch.size], strict=True)]

    def unused_for(self, group: BatchedDataDict) -> str | None:
        """Return why an answered group is not to be trained on; None for one that is."""
        if self.section is None or not self.section.use_dynamic_sampling or has_signal(self.section, group):
            return None
        return EQUAL_REWARDS

    def rollout_of(self, groups: Sequence[DrawnGroup], batches: Sequence[BatchedDataDict]) -> Rollout:
        """Return the rows of answered groups, with shaped rewards, as what a step trains on."""
        batch = concatenate_batches(batches, self.collector.tokenizer.pad_token_id)
        if self.section is not None:
            shape_rewards(self.section, batch)
        return self.collector.as_rollout([group.prompt for group in groups], batch)


@dataclass
class DrawnGroups:
    """Holds the groups of the steps that are asked for or trained now, by position."""

    draw: Draw
    steps: dict[int, Sequence[DrawnGroup]] = field(default_factory=dict[int, Sequence[DrawnGroup]])

    def keep(self, steps: range) -> bool:
        """Draw these steps, and forget all others; says whether any was new."""
        new = [step for step in steps if step not in self.steps]
        for step in new:
            self.steps[step] = self.draw.groups_of(step)
        self.steps = {step: groups for step, groups in self.steps.items() if step in steps}
        return bool(new)

    def __getitem__(self, position: int) -> DrawnGroup:
        """Return a group; one that is behind, which is trained again, is drawn again with its step."""
        step, place = divmod(position, self.draw.groups_per_step)
        if step + 1 not in self.steps:
            self.steps[step + 1] = self.draw.groups_of(step + 1)
        return self.steps[step + 1][place]


type Chunk = tuple[Sequence[DrawnGroup], Sequence[BatchedDataDict]]
"""Groups as they were drawn, and their data."""


@dataclass
class Step:
    """A train step as an algorithm sees it: its number and, where it samples, its groups.

    draw: None where the data set gives the rows. scheduler: that has the step open; None for one that is trained
    again, of which nothing is recorded: `known` are its chunks as they were.
    """

    number: int
    draw: Draw | None = None
    known: Sequence[Chunk] = ()
    scheduler: Scheduler[Any] | None = None
    _taken: list[Rollout] = field(default_factory=list[Rollout], init=False)

    def chunks(self, at_least: int) -> Iterator[Rollout]:
        """Yield groups in their order as soon as so many more are answered, until the step is full.

        Raises RunStoppedError where too many episodes of the whole step were dropped.
        """
        draw, scheduler, answered = self.draw, self.scheduler, list[BatchedDataDict]()
        assert draw is not None
        leased = self.known if scheduler is None else map(scheduler.groups_at, scheduler.leases(at_least))
        for groups, batches in leased:
            answered += batches  # as they are: a chunk that is trained on has more columns than the next one
            self._taken.append(draw.rollout_of(groups, batches))
            if scheduler is not None and not scheduler.ledger.room():
                draw.collector.check_drops(self.number, answered)
            yield self._taken[-1]

    def whole(self) -> Rollout:
        assert self.draw is not None
        chunks = [*self.chunks(self.draw.groups_per_step)]
        return Rollout.concatenate(chunks, self.draw.collector.tokenizer.pad_token_id)

    def finishing(self) -> None:
        if self.scheduler is not None:
            self.scheduler.finishing()

    def finish(self) -> dict[str, float]:
        """Take note that the optimizer has stepped; returns what the step reports of how its groups came to be."""
        if self.scheduler is None:
            return {}
        reported = self.scheduler.report(self.scheduler.finish(), self._taken)
        return {**reported, **self.scheduler.draw.collector.environments.take_counts()}


@dataclass(eq=False)
class Scheduler[Engine: GenerationInterface](AbstractContextManager["Scheduler[Any]"]):
    """Keeps the ledger of groups and their data, and opens train steps.

    For the training loop it is the engine (`GenerationInterface`): it publishes the updates of the weights.
    A context manager: what is under way is given up at its end.

    groups: the data of those that are answered, by position, until nobody needs them any more. until_checkpoint:
    whether trained ones are kept until a checkpoint holds what they taught, not only until their step is published.
    archive: what writes trained groups down; None writes none. most_unused: groups with equal rewards after which a
    step of dynamic sampling gives up.
    """

    ledger: Ledger
    groups: dict[int, BatchedDataDict]
    engine: Engine
    draw: Draw
    until_checkpoint: bool = False
    archive: GroupArchive | None = None
    most_unused: int | None = None

    def __post_init__(self) -> None:
        self._drawn = DrawnGroups(self.draw)
        self._changed = threading.Condition()
        self._pace = Pace()
        self._unused: list[tuple[int, BatchedDataDict]] = []

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)
        with self._changed:
            if self.ledger.step is StepState.COMMITTED:
                self.ledger.publish()
                self._put_away(version)

    def generate(self, data: BatchedDataDict, *, step: int, greedy: bool = False) -> BatchedDataDict:
        """Answer prompts that are in no group, as those of a validation."""
        return self.engine.generate(data, step=step, greedy=greedy)

    def offload(self) -> None:
        self.engine.offload()

    # What the training loop asks for its steps

    @contextmanager
    def open_step(self, step: int) -> Generator[Step]:
        """Open the next step; where the block fails it leaves no trace, and its groups can be trained again."""
        with self._changed:
            assert self.ledger.begin() == step
        try:
            yield Step(step, self.draw, scheduler=self)
        except BaseException as error:
            with self._changed:
                if self.ledger.step is StepState.OPEN:
                    self.ledger.abort(type(error).__name__)
                elif self.ledger.step is StepState.FINISHING:
                    self.ledger.lost(type(error).__name__)
            raise

    def known_step(self, step: int) -> Step:
        """Return a finished step, to train it again; raises LedgerError once it is forgotten."""
        with self._changed:
            chunks = [self.groups_at(positions) for positions in self.ledger.chunks_of(step)]
        return Step(step, self.draw, chunks)

    def take_unused(self) -> list[Rollout]:
        """Return groups that were answered since the last call and that no step trains on."""
        with self._changed:
            unused, self._unused = self._unused, []
            return [self.draw.rollout_of([self._drawn[position]], [group]) for position, group in unused]

    def checkpointed(self, step: int) -> None:
        """Take note that the checkpoint of a step is whole: what was trained up to it is not needed any more."""
        with self._changed:
            self.ledger.checkpointed(step)
            if self.archive is not None:
                self.archive.checkpointed(step)
            if self.until_checkpoint:  # else later steps may be forgotten by then
                self._forget(step)

    def saved(self, mark_log: Callable[[], LogMark]) -> SavedRollouts:
        """Return what a checkpoint between two steps is to hold, as it is now; groups may be answered meanwhile."""
        with self._changed:
            ledger = SavedLedger.model_validate(self.ledger.to_json())
            ready = {position: self.groups[position] for position in ledger.ready}
            return SavedRollouts(ledger, mark_log(), ready)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put away a step whose weights no engine was given any more."""
        if self.ledger.step is StepState.COMMITTED:
            self._put_away(self.ledger.version)

    # What an open step asks

    def leases(self, at_least: int) -> Iterator[Sequence[int]]:
        """Yield positions of the open step's groups, as soon as so many more are answered, until it is full."""
        while room := self.ledger.room():
            wanted = min(at_least, room)
            with activity.at(f"taking {wanted} groups at least"):
                self._wait_for_ready(wanted)
                with self._changed:
                    positions = self.ledger.leasable()
                    self.ledger.lease(positions)
            if not self.ledger.room():
                self.offload()
            yield positions

    def groups_at(self, positions: Sequence[int]) -> Chunk:
        with self._changed:
            return [self._drawn[one] for one in positions], [self.groups[one] for one in positions]

    def finishing(self) -> None:
        with self._changed:
            self.ledger.finishing()

    def finish(self) -> Pace:
        with self._changed:
            self.ledger.finish()
            pace, self._pace = self._pace, Pace()
            return pace

    def report(self, pace: Pace, trained: Sequence[Rollout]) -> dict[str, float]:
        """Return what a step reports of how its groups came to be. trained: its chunks."""
        if self.most_unused is None:
            return {}
        n = self.ledger.limits.groups_per_step
        rounds = {"train/dynamic_sampling_rounds": float(pace.rounds)} if pace.rounds else {}
        return {**rounds, "train/dynamic_sampling_kept": n / (n + pace.unused)}

    # What subclasses do

    @abstractmethod
    def _wait_for_ready(self, groups: int) -> None:
        """Return once so many groups are leasable; nothing is locked."""

    def _draw_ahead(self) -> bool:
        """Draw the prompts of all steps that may be asked for now, and forget those behind; says whether any was new.

        A dropped group's place is taken by the next one, at last by one after the last step.
        """
        reach, n = self.ledger.reach, self.ledger.limits.groups_per_step
        return self._drawn.keep(range(reach.start // n + 1, -(-reach.stop // n) + 1))

    def _commit(self, token: Token, batch: BatchedDataDict) -> None:
        """Take an answered group; one that dynamic sampling does not train on is dropped, and the next one moves up."""
        if not self.ledger.commit(token, versions_of(batch, self.ledger.published), digest_of_group(batch)):
            return
        if (reason := self.draw.unused_for(batch)) is None:
            assert token.position not in self.groups
            self.groups[token.position] = batch
            return
        self.ledger.unused(token.position, reason)
        self._pace.unused += 1
        self._unused.append((token.position, batch))
        ahead = self.ledger.limits.max_age + 1  # steps whose groups may be answered between two
        if self.most_unused is not None and self._pace.unused > self.most_unused * ahead:
            step, ready = self.ledger.version + 1, len(self.ledger.leasable())
            raise RunStoppedError(
                f"step {step}: {self._pace.unused} groups have equal rewards, {ready} of the "
                f"{self.ledger.limits.groups_per_step} of a step (num_prompts_per_step) have not, and that is as many "
                "as batch_multiplier allows: raise it or num_generations_per_prompt, or set use_dynamic_sampling: "
                "false",
                code="too-few-groups",
            )

    def _put_away(self, step: int) -> None:
        """Write the groups of a finished step down, and forget them, as far as that is asked for; raises FolderError.

        Not when it is finished: only what is recorded outlives a folder that cannot be written to.
        """
        if self.archive is not None:
            positions = sorted(position for chunk in self.ledger.chunks_of(step) for position in chunk)
            self.archive.keep(step, {position: self.groups[position] for position in positions})
        if not self.until_checkpoint:
            self._forget(step)

    def _forget(self, step: int) -> None:
        self.ledger.forget(step)
        retained = self.ledger.retained(step)
        self.groups = {position: self.groups[position] for position in retained if position in self.groups}


@dataclass(eq=False)
class SynchronousScheduler(Scheduler[GenerationInterface]):
    """Sampling and training take turns: the groups of a step are answered in one call, then the step trains on them.

    The largest staleness is 0, and there is one thread. The engine may be the ranks themselves, or engines that share
    their devices: it is asleep while the ranks compute.

    groups_per_round: asked for at a time. Where dynamic sampling leaves some out, a further round is as large as the
    first: ranks decode many groups in the time of a few. Those that the step then has no place for are answered again
    by the next.
    """

    groups_per_round: int = field(kw_only=True)

    def _wait_for_ready(self, groups: int) -> None:
        while len(self.ledger.leasable()) < groups:
            self._draw_ahead()
            tokens: list[Token] = []
            while len(tokens) < self.groups_per_round and self.ledger.may_dispatch():
                tokens.append(self.ledger.dispatch())
            assert tokens, "nothing is admitted, and the step is not full"
            self._pace.rounds += 1
            try:
                # The noise is of the step that drew a prompt: those of two steps are asked for one after the other.
                for _, same_step in groupby(tokens, lambda token: self._drawn[token.position].step):
                    asked = [*same_step]
                    batches = self.draw.play_now([self._drawn[token.position] for token in asked])
                    for token, batch in zip(asked, batches, strict=True):
                        if len(self.ledger.leasable()) >= groups:
                            self.ledger.requeue(token, SURPLUS)
                            self._unused.append((token.position, batch))
                        else:
                            self._commit(token, batch)
            except BaseException as error:
                for token in tokens:
                    self.ledger.requeue(token, type(error).__name__)
                raise
