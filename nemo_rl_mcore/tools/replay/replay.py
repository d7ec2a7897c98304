"""Training an asynchronous run once more: from the groups that it kept, in the order and the chunks of its log."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.data.strict_json import parse_json, read_regular
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.algorithms.algorithm import Algorithm, QuietObserver
from nemo_rl_mcore.driver.algorithms.engine_comparison import bounds_of
from nemo_rl_mcore.driver.embedded_generation import EmbeddedGeneration
from nemo_rl_mcore.driver.observability.ending import exit_status
from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.driver.parts import Parts, open_parts, stop_ids_of
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.event_log import log_in, read_events
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.start import KEPT_GROUPS, draw_of
from nemo_rl_mcore.driver.rollouts.timeline import Timeline
from nemo_rl_mcore.driver.run import algorithm_of, start_model, with_weights
from nemo_rl_mcore.environment.replies import LocalEnvironments
from nemo_rl_mcore.errors import RunStoppedError, code_of
from nemo_rl_mcore.rank.checkpoints import CheckpointStore
from nemo_rl_mcore.tools.replay.replayed import ReplayedSteps, first_of_replay, require_kept, require_steps
from nemo_rl_mcore.tools.replay.rescoring import Rescoring

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
    require_steps(timeline, steps, str(log_in(run)))
    require_kept(run / KEPT_GROUPS, steps, config.asynchrony_key)
    starts = _starts_of(config)
    first = first_of_replay(starts, steps, run / KEPT_GROUPS)
    if first != steps.start:
        write_line(
            sys.stdout, f"no weights of step {after} are kept: trained from those of step {first - 1} on"
        )
        steps = range(first, steps.stop)
        require_steps(timeline, steps, str(log_in(run)))
    start = starts[first - 1]
    with RayCluster(config.cluster) as cluster, ExitStack() as stack:
        models = _models(config, cluster, stack, start)
        _Replay(open_parts(config), models, timeline, steps, run).train()


def _models(
    config: RunConfig, cluster: RayCluster, stack: ExitStack, start: Path | None
) -> dict[str, Policy]:
    """Start the models of the run, as they were at the checkpoint, or at the start of the run."""
    found: dict[str, Policy] = {}
    for plan in config.models.values():
        started = start_model(with_weights(plan, config, cluster), config, cluster, found.get("policy"))
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
        algorithm: Algorithm[Any] = algorithm_of(
            self.parts, self.models, collector, QuietObserver(), rollouts
        )
        rescoring = self._rescoring()
        for step in self.steps:
            rescoring.rescore(step - 1, rollouts.drawn_by(step - 1))
            metrics = algorithm.step(step, lambda: None).metrics
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
            config.prompts_per_step,
        )

    def _rescoring(self) -> Rescoring:
        config = self.parts.config
        return Rescoring(
            self.models["policy"],
            _allowed(config),
            rereads=config.policy.generation.engine.always_rereads
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
        return Timeline.of(read_events(log_in(run)))
    except (OSError, ValueError) as error:
        raise RunStoppedError(f"the log of the run cannot be read: {error}", code=code_of(error)) from error


def _starts_of(config: RunConfig) -> dict[int, Path | None]:
    """Return the checkpoints by step; 0 stands for the weights that the run began with, unless of a warm start."""
    starts: dict[int, Path | None] = {} if config.warm_start else {0: None}
    section = config.checkpointing
    if section.enabled:
        store = CheckpointStore(Path(section.checkpoint_dir), verify_checksums=section.verify_checksums)
        starts |= {one.step: one.folder for one in store.newest_first()}
    return starts


def _held_as(config: RunConfig) -> str | None:
    """Return the number format that the run's engines held the weights in, if it was not that of training."""
    return config.policy.generation.engine.number_format(config.policy.precision)
