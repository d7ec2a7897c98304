"""Compare the log-probabilities of kept tokens with those of the weights that they name.

Shapes: B rows, S columns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from nemo_rl_mcore.driver.observability.ending import exit_status
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.parts import Parts, open_parts, stop_ids_of
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, Policy
from nemo_rl_mcore.driver.rollouts.draw import Draw, DrawnGroups
from nemo_rl_mcore.driver.rollouts.events import EVENTS_FILE, Timeline, read_events
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector, concatenate_batches
from nemo_rl_mcore.driver.rollouts.saved import digest_of_group, load_groups, versions_of
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.start import KEPT_GROUPS, draw_of
from nemo_rl_mcore.driver.rollouts.transcript import TURN_OF_TOKEN, WEIGHT_VERSIONS
from nemo_rl_mcore.driver.run import algorithm_of, fetch_weights, start_model
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.errors import RunStoppedError, code_of


class _Quiet(StepObserver):
    """Keeps nothing."""


@dataclass
class Rescored:
    """Counts what became of a step's tokens.

    tokens: rescored. older: of weights that the replay does not pass through. cached: after other weights in their own
    answer, of an engine that keeps its cache: no weights alone give their log-probabilities. largest: difference, nats.
    """

    tokens: int = 0
    older: int = 0
    cached: int = 0
    largest: float = 0.0

    def __str__(self) -> str:
        """Say so in a line."""
        left_out = {"of older weights": self.older, "after a change of weights in their answer": self.cached}
        others = [f"{count} {which}" for which, count in left_out.items() if count]
        shown = f"{self.tokens} tokens rescored, largest difference {self.largest:.2g}"
        return shown + (f" (not compared: {', '.join(others)})" if others else "")


@dataclass
class Rescoring:
    """Rescores kept tokens while a replay passes through the versions.

    allowed: difference of a log-probability, nats. rereads: whether engines read a begun answer again with new weights.
    """

    policy: Policy
    allowed: float
    rereads: bool
    pad_token_id: int
    first_version: int
    _steps: dict[int, Rescored] = field(default_factory=dict[int, Rescored], init=False)

    def rescore(self, version: int, steps: Mapping[int, Mapping[int, BatchedDataDict]]) -> None:
        """Rescore the tokens of a version, which the policy holds.

        steps: those that it may have drawn tokens of, with their groups by position. Raises RunStoppedError for a token
        that has another log-probability, naming it.
        """
        for step, groups in steps.items():
            if step not in self._steps:
                self._steps[step] = self._of_step(groups)
            self._rescore(version, step, groups)

    def take(self, step: int) -> Rescored:
        """Return what became of a step's tokens, once all of its versions were passed."""
        return self._steps.pop(step)

    def _of_step(self, groups: Mapping[int, BatchedDataDict]) -> Rescored:
        found = Rescored()
        for group in groups.values():
            versions, exact = group[WEIGHT_VERSIONS], self._exact(group)
            older = (versions >= 0) & (versions < self.first_version)
            found.older += int(older.sum())
            found.cached += int(((versions >= 0) & ~older & ~exact).sum())
        return found

    def _exact(self, group: BatchedDataDict) -> Tensor:
        """Return bool [B, S]: whether the version of a token is that of all that its answer read and sampled before."""
        return (group[WEIGHT_VERSIONS] >= 0) if self.rereads else unmixed(group)

    def _rescore(self, version: int, step: int, groups: Mapping[int, BatchedDataDict]) -> None:
        parts = [self._asked(version, group) for group in groups.values()]
        places = [(position, row) for position, (rows, _) in zip(groups, parts, strict=True) for row in rows]
        if not places:
            return
        batch = concatenate_batches([part for rows, part in parts if rows], self.pad_token_id)
        now = self.policy.get_logprobs(model_inputs(batch, "token_mask"), trained_only=True)["logprobs"]
        kept, mask = batch["generation_logprobs"], batch["token_mask"].bool()
        difference = (now - kept).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~mask, 0)
        largest = float(difference.max())
        if largest > self.allowed:
            place, token = divmod(int(difference.argmax()), difference.shape[1])
            position, row = places[place]
            raise RunStoppedError(
                f"step {step}: group {position}, row {row}, token {token}: version {version} is said to have drawn it "
                f"with the log-probability {float(kept[place, token]):.6g}, and gives it "
                f"{float(now[place, token]):.6g} now; they may differ by {self.allowed:.3g}",
                code="rescored-differs",
            )
        found = self._steps[step]
        found.tokens += int(mask.sum())
        found.largest = max(found.largest, largest)

    def _asked(self, version: int, group: BatchedDataDict) -> tuple[list[int], BatchedDataDict]:
        """Return the rows with tokens to rescore, and these rows, whose token_mask is 1 at such tokens."""
        mask = (group[WEIGHT_VERSIONS] == version) & self._exact(group)
        rows = mask.any(1).nonzero().flatten()
        columns = {key: group[key][rows] for key in ("input_ids", "input_lengths", "generation_logprobs")}
        numbers: list[int] = rows.tolist()  # pyright: ignore[reportUnknownMemberType]
        return numbers, BatchedDataDict(columns, token_mask=mask[rows].float())


def unmixed(group: BatchedDataDict) -> Tensor:
    """Return bool [B, S]: the tokens drawn by the version that began their answer, in the same turn of their row."""
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
    """Opens the steps of a log.

    Groups are read when they are first asked for, and those of a step held until the step is trained. folder: of the
    kept groups, one of each step in it.
    """

    def __init__(self, timeline: Timeline, steps: range, folder: Path, draw: Draw) -> None:
        self._timeline, self._steps, self._folder, self._draw = timeline, steps, folder, draw
        self._drawn = DrawnGroups(draw)
        self._held: dict[int, dict[int, BatchedDataDict]] = {}

    def groups(self, step: int) -> dict[int, BatchedDataDict]:
        """Return the groups of a step by position; raises RunStoppedError for damage, and other ones than the log's."""
        if step not in self._held:
            found = self._read(step)
            logged = {position: self._timeline.groups[position] for position in self._positions(step)}
            unequal = [
                position
                for position, group in logged.items()
                if position not in found
                or digest_of_group(found[position]) != group.digest
                or versions_of(found[position], min(group.versions)) != [*group.segments]
            ]
            if unequal:
                raise RunStoppedError(
                    f"step {step}: groups {unequal} are not those of the log", code="unequal-groups"
                )
            self._held[step] = {position: found[position] for position in logged}
        return self._held[step]

    def drawn_by(self, version: int) -> dict[int, dict[int, BatchedDataDict]]:
        """Return the steps after a version, each with its groups, that this version may have drawn tokens of."""
        return {
            step: self.groups(step)
            for step in self._steps
            if step > version
            and any(min(self._timeline.groups[one].versions) <= version for one in self._positions(step))
        }

    @contextmanager
    def open_step(self, step: int) -> Generator[Step]:
        """Give a step with its groups, which are forgotten behind the block."""
        groups, chunks = self.groups(step), self._timeline.chunks[step]
        known = [([self._drawn[one] for one in chunk], [groups[one] for one in chunk]) for chunk in chunks]
        yield Step(step, self._draw, known)
        del self._held[step]

    def _positions(self, step: int) -> Sequence[int]:
        return self._timeline.positions(range(step, step + 1))

    def _read(self, step: int) -> dict[int, BatchedDataDict]:
        folder = self._folder / f"step_{step}"
        try:
            return load_groups(folder)
        except ValueError as error:
            raise RunStoppedError(f"{folder}: {error}", code=code_of(error)) from error


def require_steps(timeline: Timeline, steps: range, log: str) -> None:
    """Raise RunStoppedError unless the log has them all, each with groups that were there to be trained."""
    lacking = [step for step in steps if step not in timeline.chunks]
    if lacking or not steps:
        there = f"{min(timeline.chunks)} to {max(timeline.chunks)}" if timeline.chunks else "none"
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps.stop - 1}: {log} has steps {there}; name a range of them, the step "
            "before the first one and the last one",
            code="missing-steps",
        )
    for step in steps:
        for position in timeline.positions(range(step, step + 1)):
            group = timeline.groups.get(position)
            versions = [] if group is None else group.versions
            if not versions or max(versions) >= step:
                drawn = f"drawn by {versions}" if versions else "never drawn"
                raise RunStoppedError(
                    f"{log}: step {step} trains group {position}, which was {drawn} before it",
                    code="untimely-group",
                )


def require_kept(folder: Path, steps: range, key: str) -> None:
    """Raise RunStoppedError unless the groups of all these steps are kept in a folder; key: what has them kept."""
    gone = [step for step in steps if not (folder / f"step_{step}").is_dir()]
    if gone:
        first = next((step for step in steps if step > gone[-1]), None)
        remedy = (
            f"begin after step {gone[-1]}, at a checkpoint" if first else f"{key}.enabled: true keeps them"
        )
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps.stop - 1}: {folder} does not have the groups of "
            f"{len(gone)} of these steps, {gone[0]} to {gone[-1]}: the run did not keep them, or no more than "
            f"{KEPT_BYTES / 1e9:g} GB of them; {remedy}",
            code="groups-gone",
        )


def first_of_replay(starts: Iterable[int], steps: range, folder: Path) -> int:
    """Return the first step to train so as to come to these: behind the last start whose kept groups lead there.

    starts: the steps whose weights are there, 0 for those that the run began with. Raises RunStoppedError without one.
    """

    def reached(start: int) -> int:
        return next(step for step in count(start) if not (folder / f"step_{step + 1}").is_dir())

    ends = {start: reached(start) for start in sorted(starts)}
    fitting = [start for start, end in ends.items() if start < steps.start and end >= steps[-1]]
    if not fitting:
        there = ", ".join(f"{start}:{end}" for start, end in ends.items() if end > start) or "none"
        raise RunStoppedError(
            f"--steps {steps.start - 1}:{steps[-1]}: no weights of step {steps.start - 1} are kept, nor any before it "
            f"from which {folder} leads there; what can be replayed: {there}",
            code="no-start",
        )
    return fitting[-1] + 1


_OF_THE_MACHINE = "performance/"
"""Begins the names of metrics that no two runs have equal: time, memory."""

_DECODING = 1e-4
"""Between what the embedded engine decodes and a pass of training, both in float32, nats."""


def run_replay(config: RunConfig, run: Path, after: int, last: int | None) -> int:
    """Train the steps after `after` up to `last` (None: all) as the log in the folder `run` says; see `exit_status`.

    Where no weights of `after` are kept, the steps that lead there from earlier ones are trained and compared as well.
    Each step is told when its weights, its metrics, and its groups are those of the run, and each kept token has the
    log-probability that the weights give which it names; the first step of which that is not so ends the replay with
    status 1.
    """
    return exit_status(lambda: _replay(config, run, after, last), lambda: "nothing was written")


def _replay(config: RunConfig, run: Path, after: int, last: int | None) -> None:
    if not config.asynchronous:
        raise RunStoppedError(
            f"{run} is of a run that was not asynchronous: it has no log to replay", code="not-asynchronous"
        )
    timeline = _timeline(run)
    steps = range(after + 1, (max(timeline.chunks, default=0) if last is None else last) + 1)
    require_steps(timeline, steps, str(run / EVENTS_FILE))
    require_kept(run / KEPT_GROUPS, steps, config.asynchrony_key)
    starts = _starts_of(config)
    first = first_of_replay(starts, steps, run / KEPT_GROUPS)
    if first != steps.start:
        write_line(
            sys.stdout, f"no weights of step {after} are kept: trained from those of step {first - 1} on"
        )
        steps = range(first, steps.stop)
        require_steps(timeline, steps, str(run / EVENTS_FILE))
    start = starts[first - 1]
    with RayCluster(config.cluster) as cluster, ExitStack() as stack:
        models = _models(config, cluster, stack, start)
        _Replay(open_parts(config), models, timeline, steps, run).train()


def _models(
    config: RunConfig, cluster: RayCluster, stack: ExitStack, start: Path | None
) -> dict[str, Policy]:
    """Start the models of the run, as they were at the checkpoint, or at the start of the run."""
    fetch_weights(config)
    found: dict[str, Policy] = {}
    for plan in config.models.values():
        started = start_model(plan, config, cluster, found.get("policy"))
        found[plan.name] = stack.enter_context(started)
        if start is not None and plan.trained:
            found[plan.name].load_checkpoint(str((start / plan.name).absolute()))
    return found


@dataclass(frozen=True)
class _Replay:
    """The steps of a log over the parts of their run; run: its folder."""

    parts: Parts
    models: Mapping[str, Policy]
    timeline: Timeline
    steps: range
    run: Path

    def train(self) -> None:
        """Train and compare every step; raises RunStoppedError for the first that is not that of the run."""
        collector, logged = self._collector(), _logged_metrics(self.run)
        rollouts = self._rollouts(collector)
        algorithm: Algorithm[Any] = algorithm_of(self.parts, self.models, collector, _Quiet(), None)
        rescoring = self._rescoring()
        for step in self.steps:
            rescoring.rescore(step - 1, rollouts.drawn_by(step - 1))
            with rollouts.open_step(step) as opened:
                metrics = algorithm.update(opened, algorithm.judge(opened)).metrics
            told = self._compared_weights(step)
            compared = _compared_metrics(step, metrics, logged.get(step, {}))
            groups = len(self.timeline.positions(range(step, step + 1)))
            write_line(
                sys.stdout,
                f"step {step}: {told}, {groups} groups equal, {compared} metrics equal, {rescoring.take(step)}",
            )

    def _collector(self) -> RolloutCollector:
        """Return what reads kept groups; nobody is asked for answers or replies."""
        parts, config = self.parts, self.parts.config
        return RolloutCollector(
            EmbeddedGeneration(self.models["policy"], stop_ids_of(config, parts.tokenizer)),
            parts.tokenizer,
            config.max_prompt_length,
            LocalEnvironments(parts.environment),
            form=parts.form,
        )

    def _rollouts(self, collector: RolloutCollector) -> ReplayedSteps:
        config = self.parts.config
        return ReplayedSteps(
            self.timeline,
            self.steps,
            self.run / KEPT_GROUPS,
            draw_of(config, self.parts.prompts, collector),
        )

    def _rescoring(self) -> Rescoring:
        config = self.parts.config
        return Rescoring(
            self.models["policy"],
            _allowed(config),
            rereads=config.policy.generation.engine.traits.always_rereads
            or config.asynchrony.recompute_kv_cache_after_weight_updates,
            pad_token_id=self.parts.tokenizer.pad_token_id,
            first_version=self.steps.start - 1,
        )

    def _compared_weights(self, step: int) -> str:
        """Say that the weights behind a step are those of the log; raises RunStoppedError where they are not."""
        logged = self.timeline.weights.get(step, "")
        digest = self.models["policy"].weights_digest(_held_as(self.parts.config))
        if logged and logged != digest:
            raise RunStoppedError(
                f"step {step}: the weights are {digest} now, and {logged} in the log", code="unequal-weights"
            )
        return f"weights {digest} equal" if logged else "weights not compared (the log has no digest of them)"


def _allowed(config: RunConfig) -> float:
    """Return by how much a log-probability may differ from that of an engine, nats; see docs/numerics.md."""
    allowed = bounds_of(config.policy).difference
    exact = _held_as(config) is None and config.policy.precision == "float32"
    return min(allowed, _DECODING) if exact else allowed


def _compared_metrics(step: int, found: Mapping[str, float], logged: Mapping[str, Any]) -> int:
    """Count the metrics of a step that are those which the run has logged; raises RunStoppedError for others."""
    common = [name for name in found if not name.startswith(_OF_THE_MACHINE) and name in logged]
    for name in common:
        # What is not finite is null there.
        if found[name] != logged[name] and (logged[name] is not None or math.isfinite(found[name])):
            raise RunStoppedError(
                f"step {step}: {name} is {found[name]!r} now, and {logged[name]!r} in {METRICS_FILE}",
                code="unequal-metrics",
            )
    return len(common)


def _logged_metrics(run: Path) -> dict[int, Mapping[str, Any]]:
    """Return the rows of the run's metrics by step; raises RunStoppedError for a file that cannot be read."""
    path = run / METRICS_FILE
    if not path.exists():
        return {}
    try:
        lines = read_regular(path).split(b"\n")[:-1]
        rows = [cast("dict[str, Any]", parse_json(line.decode())) for line in lines]
        return {row["step"]: row for row in rows}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunStoppedError(f"{path} cannot be read: {error}", code="unreadable-file") from error


def _timeline(run: Path) -> Timeline:
    try:
        return Timeline.of(read_events(run / EVENTS_FILE))
    except (OSError, ValueError) as error:
        raise RunStoppedError(f"the log of the run cannot be read: {error}", code=code_of(error)) from error


def _starts_of(config: RunConfig) -> dict[int, Path | None]:
    """Return the checkpoints by step; 0 stands for the weights that the run began with."""
    starts: dict[int, Path | None] = {0: None}
    section = config.checkpointing
    if section.enabled:
        store = CheckpointStore(Path(section.checkpoint_dir))
        starts |= {one.step: one.folder for one in store.newest_first()}
    return starts


def _held_as(config: RunConfig) -> str | None:
    """Return the number format that the run's engines held the weights in, if it was not that of training."""
    return config.policy.generation.engine.number_format(config.policy.precision)
