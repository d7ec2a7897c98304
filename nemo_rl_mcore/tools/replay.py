"""`nemo-rl-mcore replay`: trains a run's logged steps again, and compares weights, metrics and log-probabilities.

Shapes: B rows, S columns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.run_config import KEPT_BYTES
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.strict_json import parse_json, read_regular
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, StepObserver
from nemo_rl_mcore.driver.algorithms.engine_comparison import bounds_of
from nemo_rl_mcore.driver.algorithms.mismatch import model_inputs
from nemo_rl_mcore.driver.checkpoints import CheckpointStore
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.parts import Parts, open_parts, stop_ids_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, Policy
from nemo_rl_mcore.driver.rollouts.events import EVENTS_FILE, Timeline, read_events
from nemo_rl_mcore.driver.rollouts.player import EnvironmentsByName, RolloutCollector
from nemo_rl_mcore.driver.rollouts.saved import digest_of_group, load_groups, versions_of
from nemo_rl_mcore.driver.rollouts.scheduler import DrawnGroups, Step
from nemo_rl_mcore.driver.rollouts.start import KEPT_GROUPS, draw_of
from nemo_rl_mcore.driver.rollouts.transcript import TURN_OF_TOKEN, WEIGHT_VERSIONS, concatenate_batches
from nemo_rl_mcore.driver.run import algorithm_of, fetch_weights, start_model
from nemo_rl_mcore.driver.signals import exit_status
from nemo_rl_mcore.errors import RunStoppedError, code_of


class _Quiet(StepObserver):
    """Records nothing."""


@dataclass
class Rescored:
    """Counts of a step's tokens.

    tokens: rescored. older: sampled with weights from before the replay. cached: sampled after a weight update during
    their answer, by an engine that keeps its cache, so that no single version gives their log-probabilities. largest:
    the largest difference, in nats.
    """

    tokens: int = 0
    older: int = 0
    cached: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        left_out = {"from older weights": self.older, "after a weight update in their answer": self.cached}
        others = [f"{count} {which}" for which, count in left_out.items() if count]
        shown = f"{self.tokens} tokens rescored, largest difference {self.largest:.2g}"
        return shown + (f" (not compared: {', '.join(others)})" if others else "")


@dataclass
class Rescoring:
    """Recomputes the log-probabilities of kept tokens as the replay reaches each version of the weights.

    allowed: largest difference in nats. rereads: engines recompute the cache of unfinished answers after an update.
    """

    policy: Policy
    allowed: float
    rereads: bool
    pad_token_id: int
    first_version: int
    _steps: dict[int, Rescored] = field(default_factory=dict[int, Rescored], init=False)

    def rescore(self, version: int, steps: Mapping[int, Mapping[int, BatchedDataDict]]) -> None:
        """Rescore the tokens that this version sampled; the policy has its weights.

        steps: those in which it may have sampled tokens, with their groups by position. Raises RunStoppedError with
        the first token whose log-probability differs.
        """
        for step, groups in steps.items():
            is_new = step not in self._steps
            found = self._steps.setdefault(step, Rescored())
            places, parts = list[tuple[int, int]](), list[BatchedDataDict]()
            for position, group in groups.items():
                versions = group[WEIGHT_VERSIONS]
                sampled = versions >= 0
                # Tokens whose whole preceding answer was computed with their own version.
                exact = sampled if self.rereads else unmixed(group)
                if is_new:
                    older = sampled & (versions < self.first_version)
                    found.older += int(older.sum())
                    found.cached += int((sampled & ~older & ~exact).sum())
                mask = (versions == version) & exact
                rows = mask.any(1).nonzero().flatten()
                if rows.numel():
                    columns = ("input_ids", "input_lengths", "generation_logprobs")
                    given = {key: group[key][rows] for key in columns}
                    parts.append(BatchedDataDict(given, token_mask=mask[rows].float()))
                    places += [(position, int(row)) for row in rows]
            if parts:
                self._compare(f"step {step}", version, places, parts, found)

    def _compare(
        self,
        step: str,
        version: int,
        places: Sequence[tuple[int, int]],
        parts: list[BatchedDataDict],
        found: Rescored,
    ) -> None:
        """Compare rows whose token_mask is 1 at the tokens to rescore; places: each row's group and index."""
        batch = concatenate_batches(parts, self.pad_token_id)
        now = self.policy.get_logprobs(model_inputs(batch, "token_mask"), trained_only=True)["logprobs"]
        kept, mask = batch["generation_logprobs"], batch["token_mask"].bool()
        difference = (now - kept).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~mask, 0)
        largest = float(difference.max())
        if largest > self.allowed:
            place, token = divmod(int(difference.argmax()), difference.shape[1])
            position, row = places[place]
            raise RunStoppedError(
                f"{step}: group {position}, row {row}, token {token}: version {version} sampled it with the "
                f"recorded log-probability {float(kept[place, token]):.6g}, and gives "
                f"{float(now[place, token]):.6g} now; the tolerance is {self.allowed:.3g}",
                code="rescored-differs",
            )
        found.tokens += int(mask.sum())
        found.largest = max(found.largest, largest)

    def take(self, step: int) -> Rescored:
        """Return a step's counts; call it after the last version that sampled for the step."""
        return self._steps.pop(step)


def unmixed(group: BatchedDataDict) -> Tensor:
    """Return bool [B, S]: the tokens sampled by the same version as the first token of their turn."""
    versions = group[WEIGHT_VERSIONS]
    sampled = versions >= 0
    turns = group.get(TURN_OF_TOKEN, sampled.long())
    found = torch.zeros_like(sampled)
    for turn in range(1, int(turns.max()) + 1):
        of_turn = sampled & (turns == turn)
        began = versions.gather(1, of_turn.long().argmax(1, keepdim=True))
        found |= of_turn & (versions == began)
    return found


class ReplayedSteps:
    """The kept groups of a log's steps, read on first use and held until `forget`. folder: has one folder per step."""

    def __init__(self, timeline: Timeline, steps: range, folder: Path) -> None:
        self._timeline, self._steps, self._folder = timeline, steps, folder
        self._held: dict[int, dict[int, BatchedDataDict]] = {}

    def groups(self, step: int) -> dict[int, BatchedDataDict]:
        """Return a step's groups by position; raises RunStoppedError if they are damaged or differ from the log's."""
        if step not in self._held:
            folder = self._folder / f"step_{step}"
            try:
                found = load_groups(folder)
            except ValueError as error:
                raise RunStoppedError(f"{folder}: {error}", code=code_of(error)) from error
            positions = self._timeline.positions(range(step, step + 1))
            logged = {one: self._timeline.groups[one] for one in positions}
            unequal = [
                position
                for position, group in logged.items()
                if position not in found
                or digest_of_group(found[position]) != group.digest
                or versions_of(found[position], min(group.versions)) != [*group.segments]
            ]
            if unequal:
                what = f"step {step}: groups {unequal} are not those of the log"
                raise RunStoppedError(what, code="unequal-groups")
            self._held[step] = {position: found[position] for position in logged}
        return self._held[step]

    def drawn_by(self, version: int) -> dict[int, dict[int, BatchedDataDict]]:
        """Return the steps, with their groups, that may have tokens sampled by this version."""
        found: dict[int, dict[int, BatchedDataDict]] = {}
        for step in self._steps:
            positions = self._timeline.positions(range(step, step + 1))
            oldest = min((min(self._timeline.groups[one].versions) for one in positions), default=step)
            if oldest <= version < step:
                found[step] = self.groups(step)
        return found

    def forget(self, step: int) -> None:
        del self._held[step]


def require_steps(timeline: Timeline, steps: range, log: str) -> None:
    """Raise RunStoppedError unless the log has all steps, and their groups were sampled before they were trained."""
    lacking = [step for step in steps if step not in timeline.chunks]
    if lacking or not steps:
        there = f"{min(timeline.chunks)} to {max(timeline.chunks)}" if timeline.chunks else "none"
        remedy = "give the step before the first one to train, and the last one"
        what = f"--steps {steps.start - 1}:{steps.stop - 1}: {log} has steps {there}; {remedy}"
        raise RunStoppedError(what, code="missing-steps")
    for step in steps:
        for position in timeline.positions(range(step, step + 1)):
            group = timeline.groups.get(position)
            versions = [] if group is None else group.versions
            if not versions or max(versions) >= step:
                sampled = f"was sampled by versions {versions}" if versions else "was never sampled"
                what = f"{log}: step {step} trains group {position}, which {sampled}"
                raise RunStoppedError(what, code="untimely-group")


def require_kept(folder: Path, steps: range, key: str) -> None:
    """Raise RunStoppedError unless the folder has all these steps' groups; key: the section that keeps them."""
    gone = [step for step in steps if not (folder / f"step_{step}").is_dir()]
    if gone:
        remedy = f"{key}.enabled: true keeps them"
        if steps[-1] > gone[-1]:
            remedy = f"begin after step {gone[-1]}, at a checkpoint"
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps.stop - 1}: {folder} does not have the groups of "
            f"{len(gone)} of these steps, {gone[0]} to {gone[-1]}: the run kept none, or only the last "
            f"{KEPT_BYTES / 1e9:g} GB; {remedy}",
            code="groups-gone",
        )


def first_of_replay(starts: Iterable[int], steps: range, folder: Path) -> int:
    """Return the first step to train: the one after the last start from which kept groups lead to these steps.

    starts: steps with saved weights, 0 for the initial ones. Raises RunStoppedError if there is no such start.
    """
    ends = {
        start: next(step for step in count(start) if not (folder / f"step_{step + 1}").is_dir())
        for start in sorted(starts)
    }
    fitting = [start for start, end in ends.items() if start < steps.start and end >= steps[-1]]
    if not fitting:
        there = ", ".join(f"{start}:{end}" for start, end in ends.items() if end > start) or "none"
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps[-1]}: there are no weights of step {steps.start - 1}, nor of an earlier "
            f"step from which the groups in {folder} lead there; possible: {there}",
            code="no-start",
        )
    return fitting[-1] + 1


_OF_THE_MACHINE = "performance/"
"""Prefix of metrics that always differ between runs: time, memory."""

_DECODING = 1e-4
"""Largest difference, in nats, between the embedded engine and a training pass in float32; see docs/numerics.md."""


def run_replay(config: RunConfig, run: Path, after: int, last: int | None) -> int:
    """Train the steps after `after` up to `last` (None: all) by the log in the folder `run`; see `exit_status`.

    If no weights of `after` are saved, the steps that lead there from earlier weights are trained and compared, too.
    Prints a line for each step whose weights, metrics and groups equal the run's, and whose kept tokens have their
    versions' log-probabilities; the first step that differs ends the replay with status 1.
    """

    def replay() -> None:
        timeline, steps, start = _planned(config, run, after, last)
        with RayCluster(config.cluster) as cluster, ExitStack() as stack:
            fetch_weights(config)
            models: dict[str, Policy] = {}
            for plan in config.models.values():
                started = start_model(plan, config, cluster, models.get("policy"))
                models[plan.name] = stack.enter_context(started)
                if start is not None and plan.trained:
                    models[plan.name].load_checkpoint(str((start / plan.name).absolute()))
            _train(open_parts(config), models, timeline, steps, run)

    return exit_status(replay, lambda: "nothing was written")


def _planned(
    config: RunConfig, run: Path, after: int, last: int | None
) -> tuple[Timeline, range, Path | None]:
    """Return the log, the steps to train, and the first checkpoint to load: None for the run's initial weights."""
    if not config.asynchronous:
        raise RunStoppedError(
            f"the run in {run} was not asynchronous: it has no log to replay", code="not-asynchronous"
        )
    try:
        timeline = Timeline.of(read_events(run / EVENTS_FILE))
    except (OSError, ValueError) as error:
        raise RunStoppedError(f"the run's log cannot be read: {error}", code=code_of(error)) from error
    steps = range(after + 1, (max(timeline.chunks, default=0) if last is None else last) + 1)
    require_steps(timeline, steps, str(run / EVENTS_FILE))
    require_kept(run / KEPT_GROUPS, steps, config.key("asynchrony"))
    starts: dict[int, Path | None] = {0: None}
    if config.checkpointing.enabled:
        store = CheckpointStore(Path(config.checkpointing.checkpoint_dir))
        starts |= {one.step: one.folder for one in store.newest_first()}
    first = first_of_replay(starts, steps, run / KEPT_GROUPS)
    if first != steps.start:
        write_line(sys.stdout, f"there are no weights of step {after}: starting from step {first - 1}")
        steps = range(first, steps.stop)
        require_steps(timeline, steps, str(run / EVENTS_FILE))
    return timeline, steps, starts[first - 1]


def _train(parts: Parts, models: Mapping[str, Policy], timeline: Timeline, steps: range, run: Path) -> None:
    """Train and compare every step; raises RunStoppedError at the first that differs from the run's."""
    config, policy = parts.config, models["policy"]
    of_vllm, precision = config.policy.generation.backend == "vllm", config.policy.precision
    # None if engines hold the weights in training's number format.
    held_as = config.policy.generation.vllm_cfg.number_format(precision) if of_vllm else None
    allowed = bounds_of(config.policy).difference
    rereads = of_vllm or config.asynchrony.recompute_kv_cache_after_weight_updates
    rescoring = Rescoring(
        policy,
        min(allowed, _DECODING) if held_as is None and precision == "float32" else allowed,
        rereads=rereads,
        pad_token_id=parts.tokenizer.pad_token_id,
        first_version=steps.start - 1,
    )
    # It only reads kept groups: nothing is generated or scored.
    collector = RolloutCollector(
        EmbeddedGeneration(policy, stop_ids_of(config, parts.tokenizer)),
        parts.tokenizer,
        config.max_prompt_length,
        EnvironmentsByName({}),
        form=parts.form,
    )
    path, replayed = run / METRICS_FILE, ReplayedSteps(timeline, steps, run / KEPT_GROUPS)
    logged_rows = dict[int, Mapping[str, Any]]()
    try:
        for line in read_regular(path).split(b"\n")[:-1] if path.exists() else ():
            row = cast("dict[str, Any]", parse_json(line.decode()))
            logged_rows[row["step"]] = row
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunStoppedError(f"{path} cannot be read: {error}", code="unreadable-file") from error
    draw = draw_of(config, parts.prompts, collector)
    drawn = DrawnGroups(draw)
    algorithm: Algorithm[Any] = algorithm_of(parts, models, collector, _Quiet(), None)
    for step in steps:
        rescoring.rescore(step - 1, replayed.drawn_by(step - 1))
        groups, chunks = replayed.groups(step), timeline.chunks[step]
        known = [([drawn[one] for one in chunk], [groups[one] for one in chunk]) for chunk in chunks]
        opened = Step(step, draw, known)
        metrics = algorithm.update(opened, algorithm.judge(opened)).metrics
        replayed.forget(step)
        logged, digest = timeline.weights.get(step, ""), policy.weights_digest(held_as)
        if logged and logged != digest:
            what = f"step {step}: the weights are {digest} now, and {logged} in the log"
            raise RunStoppedError(what, code="unequal-weights")
        weights = f"weights {digest} equal"
        compared = weights if logged else "weights not compared (the log has no digest)"
        row = logged_rows.get(step, {})
        common = [name for name in metrics if not name.startswith(_OF_THE_MACHINE) and name in row]
        for name in common:
            # metrics.jsonl has null for numbers that are not finite.
            if metrics[name] != row[name] and (row[name] is not None or math.isfinite(metrics[name])):
                what = f"step {step}: {name} is {metrics[name]!r} now, and {row[name]!r} in {METRICS_FILE}"
                raise RunStoppedError(what, code="unequal-metrics")
        compared += f", {len(groups)} groups equal, {len(common)} metrics equal, {rescoring.take(step)}"
        write_line(sys.stdout, f"step {step}: {compared}")
