"""Schedule prompt groups, from drawing their prompts to training on them.

All algorithms that sample use one of two schedulers. `SynchronousScheduler` plays a step's groups together, in the
training thread, before the step trains. `AsynchronousScheduler` plays them one by one, in a second thread, while
earlier steps train.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from types import TracebackType
from typing import Any

from torch import Tensor

from nemo_rl_mcore.config import RolloutConfig
from nemo_rl_mcore.config.algorithm import RewardScalingConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.rollouts.events import LogMark, Token
from nemo_rl_mcore.driver.rollouts.ledger import Ledger, SavedLedger, StepState
from nemo_rl_mcore.driver.rollouts.player import GenerationInterface, Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.saved import GroupArchive, SavedRollouts, digest_of_group, versions_of
from nemo_rl_mcore.driver.rollouts.transcript import EpisodeRows, Pace, concatenate_batches
from nemo_rl_mcore.errors import RunStoppedError

EQUAL_REWARDS, SURPLUS = "equal rewards", "the step is full"
"""Reasons why an answered group is not trained on, or is answered again in the next step."""


def shape_rewards(section: RolloutConfig, batch: BatchedDataDict) -> None:
    """Scale and penalize `rewards` [B] of scored rows; the original rewards are kept as environment_rewards [B].

    overlong_filtering clears the sample_mask of unfinished responses. DAPO's soft length penalty
    (https://arxiv.org/abs/2503.14476) grows linearly from 0, overlong_buffer_length tokens before max_response_length,
    through overlong_buffer_penalty at max_response_length, and keeps growing beyond it.
    """
    episodes, shaping = EpisodeRows.of(batch), section.reward_shaping
    batch["environment_rewards"] = batch["rewards"].clone()
    batch["rewards"] = scale_rewards(section.reward_scaling, batch["rewards"])
    if shaping.enabled and shaping.max_response_length is not None:
        lengths = episodes.on_rows(episodes.total(batch["token_mask"].sum(1)))
        buffer = shaping.overlong_buffer_length
        excess = (lengths - (shaping.max_response_length - buffer)).clamp(min=0)
        batch["rewards"] = batch["rewards"] - excess / buffer * shaping.overlong_buffer_penalty
    if section.overlong_filtering:
        batch["sample_mask"] = batch["sample_mask"] * batch["finished"]


def scale_rewards(scaling: RewardScalingConfig, rewards: Tensor) -> Tensor:
    """Return rewards [B], clamped to the source interval and mapped linearly to the target interval if enabled."""
    if not scaling.enabled:
        return rewards
    low, high = scaling.source_min, scaling.source_max
    share = (rewards.clamp(low, high) - low) / (high - low)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


@dataclass(frozen=True)
class DrawnGroup:
    """A prompt and the engine's input for its group.

    step: the step that drew the prompt; the noise depends on this step, even if a later one trains on the group.
    """

    prompt: Prompt
    asked: BatchedDataDict
    step: int


@dataclass(frozen=True)
class Draw:
    """Draws a step's prompts and turns the answers into rows.

    collector: plays episodes. groups_per_step: prompts per step. samples: responses per prompt. section: settings of
    reward shaping and dynamic sampling (https://arxiv.org/abs/2503.14476); None disables both.
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
        """Play groups that the same step drew, all in one call and in the training thread; return each group's rows."""
        pad = self.collector.tokenizer.pad_token_id
        prompts = [group.prompt for group in groups]
        asked = concatenate_batches([group.asked for group in groups], pad)
        batch = self.collector.play_now(prompts, asked, step=groups[0].step)
        episodes = batch.samples()
        firsts = [episodes[place].start for place in range(0, len(episodes), self.samples)]
        return [batch.slice(first, end) for first, end in pairwise([*firsts, batch.size])]

    def unused_for(self, group: BatchedDataDict) -> str | None:
        """Return the reason why dynamic sampling discards a group, or None if the group is trained on.

        As in NeMo RL, rewards are compared before the length penalty: answers that are all right or all wrong would
        teach only length. A group keeps its dropped episodes, but their rewards do not count.
        """
        section = self.section
        if section is None or not section.use_dynamic_sampling:
            return None
        counted = EpisodeRows.of(group).first
        rewards = scale_rewards(section.reward_scaling, group["rewards"])[counted]
        if bool((rewards != rewards[:1]).any()):
            return None
        return EQUAL_REWARDS

    def rollout_of(self, groups: Sequence[DrawnGroup], batches: Sequence[BatchedDataDict]) -> Rollout:
        """Return the rows of answered groups, with shaped rewards."""
        batch = concatenate_batches(batches, self.collector.tokenizer.pad_token_id)
        if self.section is not None:
            shape_rewards(self.section, batch)
        return self.collector.as_rollout([group.prompt for group in groups], batch)


@dataclass
class DrawnGroups:
    """Holds the drawn groups of the steps that are being played or trained, by position."""

    draw: Draw
    steps: dict[int, Sequence[DrawnGroup]] = field(default_factory=dict[int, Sequence[DrawnGroup]])

    def keep(self, positions: range) -> bool:
        """Draw the steps that contain these positions and forget all others; return True if any step was new."""
        n = self.draw.groups_per_step
        steps = range(positions.start // n + 1, -(-positions.stop // n) + 1)
        new = [step for step in steps if step not in self.steps]
        for step in new:
            self.steps[step] = self.draw.groups_of(step)
        self.steps = {step: groups for step, groups in self.steps.items() if step in steps}
        return bool(new)

    def __getitem__(self, position: int) -> DrawnGroup:
        """Return a group; draw its step again if it was forgotten, as when the group is trained again."""
        step, place = divmod(position, self.draw.groups_per_step)
        if step + 1 not in self.steps:
            self.steps[step + 1] = self.draw.groups_of(step + 1)
        return self.steps[step + 1][place]


type Chunk = tuple[Sequence[DrawnGroup], Sequence[BatchedDataDict]]
"""Drawn groups and each group's rows."""


@dataclass
class Step:
    """A train step as an algorithm sees it: its number and, if the algorithm samples, its groups.

    draw: None if the rows come from the data set. scheduler: the scheduler that opened the step; None for a step that
    is trained again from its `known` chunks and not recorded.
    """

    number: int
    draw: Draw | None = None
    known: Sequence[Chunk] = ()
    scheduler: Scheduler[Any] | None = None
    _taken: list[Rollout] = field(default_factory=list[Rollout], init=False)

    def chunks(self, at_least: int) -> Iterator[Rollout]:
        """Yield a chunk whenever at least this many further groups are answered, until the step is full.

        Raises RunStoppedError if too many of the step's episodes were dropped.
        """
        draw, scheduler = self.draw, self.scheduler
        assert draw is not None
        leased = self.known if scheduler is None else map(scheduler.groups_at, scheduler.leases(at_least))
        for groups, batches in leased:
            self._taken.append(draw.rollout_of(groups, batches))
            if scheduler is not None and not scheduler.ledger.room():
                draw.collector.check_drops(self.number, self._taken)
            yield self._taken[-1]

    def whole(self) -> Rollout:
        assert self.draw is not None
        chunks = [*self.chunks(self.draw.groups_per_step)]
        return Rollout.concatenate(chunks, self.draw.collector.tokenizer.pad_token_id)

    def finishing(self) -> None:
        if self.scheduler is not None:
            self.scheduler.finishing()

    def finish(self) -> dict[str, float]:
        """Record that the optimizer has stepped; return metrics about how the step's groups were played."""
        if self.scheduler is None:
            return {}
        counts = self.scheduler.draw.collector.environments.take_counts
        return {**self.scheduler.finish(self._taken), **counts()}


@dataclass(eq=False)
class Scheduler[Engine: GenerationInterface](AbstractContextManager["Scheduler[Any]"]):
    """Keeps the ledger of groups and their rows, and opens train steps.

    The training loop uses the scheduler as its engine (`GenerationInterface`), so the scheduler can record weight
    updates. Leaving its context gives up all groups under way.

    groups: rows of answered groups that are still needed, by position. until_checkpoint: True to keep trained groups
    until their step has a checkpoint, rather than until it is published. archive: writes trained groups to files; None
    for no files. most_unused: number of groups with equal rewards after which a dynamic sampling step gives up.
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
        """Answer prompts that belong to no group, for example in a validation."""
        return self.engine.generate(data, step=step, greedy=greedy)

    def offload(self) -> None:
        self.engine.offload()

    # For the training loop

    @contextmanager
    def open_step(self, step: int) -> Generator[Step]:
        """Open the next step; if the block fails, the step is aborted, and its groups can be trained again."""
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
        """Return a finished step so that it can be trained again; raise LedgerError if it is forgotten."""
        with self._changed:
            chunks = [self.groups_at(positions) for positions in self.ledger.chunks_of(step)]
        return Step(step, self.draw, chunks)

    def take_unused(self) -> list[Rollout]:
        """Return the groups that were answered but not used for training since the last call."""
        with self._changed:
            unused, self._unused = self._unused, []
            return [self.draw.rollout_of([self._drawn[position]], [group]) for position, group in unused]

    def checkpointed(self, step: int) -> None:
        """Record that a step's checkpoint is complete, so groups trained up to this step are no longer needed."""
        with self._changed:
            self.ledger.checkpointed(step)
            if self.archive is not None:
                self.archive.checkpointed(step)
            if self.until_checkpoint:  # otherwise, later steps may already be forgotten
                self._forget(step)

    def saved(self, mark_log: Callable[[], LogMark]) -> SavedRollouts:
        """Return the rollouts' part of a checkpoint between two steps, even while groups are being answered."""
        with self._changed:
            ledger = SavedLedger.model_validate(self.ledger.to_json())
            ready = {position: self.groups[position] for position in ledger.ready}
            return SavedRollouts(ledger, mark_log(), ready)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put away the last step, whose weights are never published to engines."""
        if self.ledger.step is StepState.COMMITTED:
            self._put_away(self.ledger.version)

    # For an open step

    def leases(self, at_least: int) -> Iterator[Sequence[int]]:
        """Lease groups to the open step and yield their positions, at least `at_least` at a time, until it is full."""
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

    def finish(self, trained: Sequence[Rollout]) -> dict[str, float]:
        """Record that the optimizer has stepped; return metrics about how these chunks were played."""
        with self._changed:
            self.ledger.finish()
            pace, self._pace = self._pace, Pace()
        if self.most_unused is None:
            return {}
        n = self.ledger.limits.groups_per_step
        rounds = {"train/dynamic_sampling_rounds": float(pace.rounds)} if pace.rounds else {}
        return {**rounds, "train/dynamic_sampling_kept": n / (n + pace.unused)}

    # For subclasses

    @abstractmethod
    def _wait_for_ready(self, groups: int) -> None:
        """Return once this many groups are leasable; called without the lock."""

    def _commit(self, token: Token, batch: BatchedDataDict) -> None:
        """Commit an answered group; if dynamic sampling discards it, the next group takes its place."""
        if not self.ledger.commit(token, versions_of(batch, self.ledger.published), digest_of_group(batch)):
            return
        if (reason := self.draw.unused_for(batch)) is None:
            assert token.position not in self.groups
            self.groups[token.position] = batch
            return
        self.ledger.unused(token.position, reason)
        self._pace.unused += 1
        self._unused.append((token.position, batch))
        ahead = self.ledger.limits.max_age + 1  # steps whose groups may be answered between two steps
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
        """Archive a finished step's groups if there is an archive, and forget them unless they are kept for a redo.

        Call this only after the step is recorded, because it raises FolderError if the folder cannot be written to.
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
    """Alternates between sampling and training: answers a step's groups in one call, then the step trains on them.

    Groups are never stale, and there is only one thread. The engine may be the ranks themselves, or share their
    devices: it sleeps while the ranks train.

    groups_per_round: groups played together. If dynamic sampling discards some, a further round is as large as the
    first, because ranks decode many groups as fast as a few. Surplus groups are answered again in the next step.
    """

    groups_per_round: int = field(kw_only=True)

    def _wait_for_ready(self, groups: int) -> None:
        while len(self.ledger.leasable()) < groups:
            self._drawn.keep(self.ledger.reach)
            tokens: list[Token] = []
            while len(tokens) < self.groups_per_round and self.ledger.may_dispatch():
                tokens.append(self.ledger.dispatch())
            assert tokens, "nothing is admitted, and the step is not full"
            self._pace.rounds += 1
            try:
                # A group's noise depends on the step that drew its prompt, so make one call per such step.
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
