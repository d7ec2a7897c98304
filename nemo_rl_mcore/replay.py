"""Training an asynchronous run once more from its log: the same groups, by the same weights, to the same bits."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nemo_rl_mcore.algorithms.algorithm import QuietObserver
from nemo_rl_mcore.algorithms.rollout import RolloutCollector
from nemo_rl_mcore.algorithms.run_checkpoints import require_whole
from nemo_rl_mcore.config import GRPOMasterConfig, RunConfig
from nemo_rl_mcore.controllers.async_grpo import AsyncGRPO
from nemo_rl_mcore.controllers.draw import GroupDraw
from nemo_rl_mcore.controllers.event_log import EVENTS_FILE, read_events
from nemo_rl_mcore.controllers.group_store import GroupStore
from nemo_rl_mcore.controllers.replayed_rollouts import (
    ReplayedRollouts,
    missing_groups,
    require_replies,
    require_steps,
    ticket_of,
)
from nemo_rl_mcore.controllers.saved_groups import load_groups
from nemo_rl_mcore.controllers.saved_rollouts import READY_FOLDER
from nemo_rl_mcore.controllers.start import KEPT_GROUPS
from nemo_rl_mcore.controllers.timeline import Timeline
from nemo_rl_mcore.environments.replies import LocalEnvironments
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.generation.embedded.policy import EmbeddedGeneration
from nemo_rl_mcore.generation.embedded.scheduled import ScheduledEngine, ScheduledSettings
from nemo_rl_mcore.interfaces import GenerationInterface
from nemo_rl_mcore.launch import engine_kind, start_model
from nemo_rl_mcore.observability.ending import exit_status
from nemo_rl_mcore.output import say_aside, write_line
from nemo_rl_mcore.parts import Parts, open_parts, stop_ids_of
from nemo_rl_mcore.training.checkpoints import POLICY_FOLDER, ROLLOUTS_FOLDER
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.engine_generation import EngineGeneration
from nemo_rl_mcore.workers.policy import Policy


def run_replay(config: RunConfig, run: Path, after: int, last: int | None) -> int:
    """Train the steps after `after` up to `last` (None: all) as the log in the folder `run` says; see `exit_status`.

    Each step is told when its weights, and the tokens of its groups, are those of the log; the first one that differs
    ends the replay with status 1.
    """
    return exit_status(lambda: _replay(config, run, after, last), lambda: "nothing was written")


def _replay(config: RunConfig, run: Path, after: int, last: int | None) -> None:
    if not (isinstance(config, GRPOMasterConfig) and config.asynchronous):
        raise RunStoppedError(f"{run} is of a run that was not asynchronous: it has no log to replay")
    timeline = _timeline(run)
    steps = range(after + 1, (max(timeline.chunks, default=0) if last is None else last) + 1)
    kept = _kept_groups(run, config, steps)
    require_steps(timeline, steps, kept, str(run / EVENTS_FILE))
    lacking = missing_groups(timeline, steps, kept)
    embedded = config.policy.generation.backend == "embedded"
    if lacking or (not embedded and any(p not in kept for p in timeline.positions(steps))):
        raise RunStoppedError(_what_is_missing(after, lacking, embedded=embedded))
    require_replies(timeline, timeline.positions(steps), kept)
    at_once, samples = config.policy.generation_batch_size, config.grpo.num_generations_per_prompt
    if at_once is not None and at_once < samples and any(p not in kept for p in timeline.positions(steps)):
        raise RunStoppedError(
            f"policy.generation_batch_size: {at_once} had the {samples} answers to a prompt drawn one after the other, "
            "and the log does not tell their versions apart; such a run can be replayed if it keeps its groups "
            "(grpo.async_grpo.keep_groups: true)"
        )
    start = _start_of(config, after)
    with RayCluster(config.cluster) as cluster, ExitStack() as stack:
        policy = stack.enter_context(start_model(config.models["policy"], config, cluster))
        if start is not None:
            policy.load_checkpoint(str((start / POLICY_FOLDER).absolute()))
        _train(open_parts(config), config, policy, cluster, timeline, steps, kept, stack)


def _train(
    parts: Parts,
    config: GRPOMasterConfig,
    policy: Policy,
    cluster: RayCluster,
    timeline: Timeline,
    steps: range,
    kept: GroupStore,
    stack: ExitStack,
) -> None:
    engines = None
    if any(position not in kept for position in timeline.positions(steps)):
        engines = stack.enter_context(_engine(config, parts, policy, cluster, timeline))
    # Where all groups are read, nobody is asked.
    generation: GenerationInterface = engines or EmbeddedGeneration(
        policy, stop_ids_of(config, parts.tokenizer)
    )
    collector = RolloutCollector(
        generation,
        parts.tokenizer,
        config.max_prompt_length,
        LocalEnvironments(parts.environment),
        form=parts.form,
        max_drop_rate=1.0,  # the run has borne what it dropped
    )
    groups, samples = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    draw = GroupDraw(parts.prompts, collector, groups, samples)
    rollouts = stack.enter_context(ReplayedRollouts(timeline, steps, draw, groups, engines, kept))
    algorithm = AsyncGRPO(config, policy, collector, parts.prompts, QuietObserver(), rollouts)
    rollouts.update_weights(steps.start - 1)
    for step in steps:
        algorithm.step(step, lambda: None)
        _compare(step, timeline, rollouts, policy.weights_digest(_held_as(config)))
        rollouts.update_weights(step)


def _compare(step: int, timeline: Timeline, rollouts: ReplayedRollouts, digest: str) -> None:
    """Tell how a step went; raises RunStoppedError where it is not that of the log."""
    logged, groups = timeline.weights.get(step, ""), len(timeline.positions(range(step, step + 1)))
    if rollouts.unequal:
        raise RunStoppedError(f"step {step}: groups {rollouts.unequal} are not those of the log")
    if logged and logged != digest:
        raise RunStoppedError(f"step {step}: the weights are {digest} now, and {logged} in the log")
    weights = f"weights {digest} equal" if logged else "weights not compared (the log has no digest of them)"
    write_line(sys.stdout, f"step {step}: {weights}, {groups} groups equal")


def _timeline(run: Path) -> Timeline:
    try:
        return Timeline.of(read_events(run / EVENTS_FILE))
    except (OSError, ValueError) as error:
        raise RunStoppedError(f"the log of the run cannot be read: {error}") from error


def _kept_groups(run: Path, config: RunConfig, steps: range) -> GroupStore:
    """What the run has kept of these steps, and what was ready when the checkpoint before them was written."""
    kept = GroupStore()
    checkpoint = Path(config.checkpointing.checkpoint_dir) / f"step_{steps.start - 1}"
    folders = [run / KEPT_GROUPS / f"step_{step}" for step in steps]
    for folder in (*folders, checkpoint / ROLLOUTS_FOLDER / READY_FOLDER):
        if not folder.is_dir():
            continue
        try:
            found = load_groups(folder)
        except ValueError as error:
            raise RunStoppedError(f"{folder}: {error}") from error
        for position in found.keys() - {*kept.positions}:
            kept.put(position, found[position])
    return kept


def _what_is_missing(after: int, lacking: list[int], *, embedded: bool) -> str:
    key = "grpo.async_grpo.keep_groups"
    if not embedded:
        return f"vLLM's responses cannot be drawn again, and the run did not keep them ({key}: true does)"
    return (
        f"groups {lacking} were begun by weights from before step {after}, and the run did not keep them ({key}: true "
        "does); begin at 0, or at an earlier checkpoint"
    )


def _start_of(config: GRPOMasterConfig, after: int) -> Path | None:
    """The checkpoint to begin with; None for the start of the run."""
    if after:
        folder = Path(config.checkpointing.checkpoint_dir) / f"step_{after}"
        return require_whole(str(folder), "--steps", config.checkpointing, say_aside).folder
    if config.warm_start is not None:
        raise RunStoppedError(
            "--steps: the run began with warm_start; begin with one of its checkpoints, as A:"
        )
    return None


def _held_as(config: RunConfig) -> str | None:
    """The number format that the run's engines held the weights in, if it was not that of training."""
    generation = config.policy.generation
    if generation.backend != "vllm":
        return None
    return generation.vllm_cfg.precision or config.policy.precision


def _engine(
    config: RunConfig, parts: Parts, policy: Policy, cluster: RayCluster, timeline: Timeline
) -> EngineGeneration:
    kind = engine_kind(config)
    schedules = {
        ticket_of(position, turn): [(segment.first, segment.version) for segment in logged.segments]
        for position, group in timeline.groups.items()
        for turn, logged in enumerate(group.turns)
    }
    settings = ScheduledSettings(config.policy, kind.settings.reread_after_refit, schedules=schedules)
    return EngineGeneration(
        replace(kind, engine=ScheduledEngine, settings=settings, engines=1),
        config.policy,
        cluster,
        policy,
        stop_ids=stop_ids_of(config, parts.tokenizer),
        seed=config.seed,
    )
