"""The meeting matrix: every feature meets every other one, and is refused by name or right.

  python tests/distributed/meetings.py                # every three features, half an hour on two cores
  python tests/distributed/meetings.py --strength 2   # every two, as the test beside this file

A combination that runs must equal its plain sibling, `meeting_recipes.plain_sibling`: the same mathematics, and nothing
else. `meeting_cases.py` says which combinations there are, and which may be refused.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))

import meeting_ranks
import tolerances
from meeting_cases import refusal_of, selection
from meeting_recipes import ALGORITHMS, FACTORS, LAYOUTS, Case, Material, load, name_of, plain_sibling
from meeting_runs import Metrics, Outcome, PoolGroup, Trained, run
from rank_pool import RankPool, Ranks

from nemo_rl_mcore.config import ConfigError, OptimizerConfig, RunConfig, SchedulerConfig
from nemo_rl_mcore.driver.algorithms.run_checkpoints import open_checkpoints
from nemo_rl_mcore.errors import RunStoppedError


@dataclass
class Verdict:
    """How a combination went: refused or run, what is wrong with that, and its largest differences."""

    refused: bool = False
    failures: list[str] = field(default_factory=list)
    metric: float = 0.0
    parameter: float = 0.0


@dataclass
class Matrix:
    """Runs combinations; `ranks(n)` is a pool of n ranks. Weights to start from and plain siblings are made once."""

    ranks: Callable[[int], RankPool]
    folder: Path
    steps: int = 2
    _plain: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    _trained: dict[tuple[str, ...], Trained] = field(default_factory=dict)
    _made: set[Path] = field(default_factory=set)
    _world_size: int = 1
    _runs: int = 0

    def __post_init__(self) -> None:
        self._material = Material(self.folder)
        self._material.write_rows()

    def verdict(self, case: Case) -> Verdict:
        """Load the combination as `check` does; run it, if it may be run, and compare it with its plain sibling."""
        rule = refusal_of(case)
        try:
            config = self._load(case)
        except ConfigError as error:
            if rule is None:
                return Verdict(True, [f"refused: {error}"])
            told = rule.is_told_by(error.problems, ALGORITHMS[case["algorithm"]])
            return Verdict(True, [] if told else [f"not told as {rule.code} of {rule.path}: {error}"])
        if rule is not None:
            return Verdict(False, [f"not refused, though {rule.reason}"])
        if case["state"] == "foreign":
            return self._foreign(config)
        trained = self._trained_as_completed(case) if case["asynchrony"] == "as completed" else None
        plain = self.plain(case, trained)
        try:
            found = self._run(case, lambda model, group: _differences(group, plain.of_models[model]))
        except (AssertionError, ValueError, RunStoppedError) as error:
            return Verdict(False, [f"{type(error).__name__}: {error}"])
        verdict = _compare(found, plain, config)
        verdict.failures += _wrong_groups(found, trained or plain.trained, config)
        return verdict

    def plain(self, case: Case, trained: Trained | None = None) -> Outcome:
        """What the plain sibling of a combination leaves: its metrics, and the parameters of its models.

        trained: the groups of each step, where these are not those that it draws.
        """
        sibling = plain_sibling(case)
        name = name_of(sibling), str(trained)
        if name not in self._plain:
            self._plain[name] = self._run(
                sibling, lambda _model, group: group.run(meeting_ranks.whole_parameters)[0], trained
            )
        return self._plain[name]

    def _trained_as_completed(self, case: Case) -> Trained:
        """The groups of each step, of a run on one rank: they depend on who waits for whom, and not on the layout."""
        name = case["algorithm"], case["state"], case["player"], plain_sibling(case)["model"]
        if name not in self._trained:
            on_one = plain_sibling(case) | {key: case[key] for key in ("asynchrony", "state")}
            self._trained[name] = self._run(on_one, lambda *_: None).trained
        return self._trained[name]

    def leave(self) -> None:
        """End what the ranks still hold."""
        self.ranks(self._world_size).run(meeting_ranks.leave)

    def _load(self, case: Case, folder: Path | None = None, **more: object) -> RunConfig:
        self._make_weights(case)
        folder = folder or self._foreign_folder(case)
        steps = {f"{ALGORITHMS[case['algorithm']].shipped.algorithm}__max_num_steps": self.steps}
        return load(case, self._material, folder, **(steps | more))

    def _run(
        self, case: Case, ask: Callable[[int, PoolGroup], object], like: Trained | None = None
    ) -> Outcome:
        """Run a combination to its end; one that is resumed ends after its first step, and starts over there.

        like: see `meeting_runs.run`.
        """
        self._runs += 1
        folder = self.folder / f"run {self._runs}"
        first: dict[int, dict[str, float]] = {}
        pool = self._pool(LAYOUTS[case["layout"]][0])
        if case["state"] == "resumed":
            name = ALGORITHMS[case["algorithm"]].shipped.algorithm
            # One that samples ahead of its last step samples nothing; a whole run is taken back instead.
            steps = 1 if case["asynchrony"] == "none" else self.steps
            short = {f"{name}__max_num_steps": steps, f"{name}__val_at_end": False}
            first = run(self._load(case, folder, **short), pool, lambda *_: None).metrics
            for step in range(2, steps + 1):
                shutil.rmtree(folder / f"step_{step}")
        found = run(self._load(case, folder), pool, ask, like)
        return replace(found, metrics=first | found.metrics)

    def _foreign(self, config: RunConfig) -> Verdict:
        """A checkpoint of another algorithm, whose model is the same, is refused by the names of both."""
        saved = "grpo" if config.algorithm == "sft" else "sft"
        try:
            open_checkpoints(config, notify=lambda _line: None)
        except RunStoppedError as error:
            said = str(error).replace(str(config.checkpointing.checkpoint_dir), "")
            unnamed = [name for name in (saved, config.algorithm) if name not in said]
            return Verdict(True, [f"the refusal does not name {name}: {error}" for name in unnamed])
        return Verdict(False, [f"{config.algorithm} goes on from a checkpoint of {saved}"])

    def _foreign_folder(self, case: Case) -> Path:
        of_sft = ALGORITHMS[case["algorithm"]].shipped.algorithm == "sft"
        weights = self._material.weights(case)
        return weights.with_name(f"{weights.name} by rewards") if of_sft else weights

    def _make_weights(self, case: Case) -> None:
        """Run SFT for the weights that policy and teacher start from, and GRPO for the checkpoint that SFT refuses."""
        weights = self._material.weights(case)
        if weights in self._made:
            return
        plain = {name: values[0] for name, values in FACTORS.items()}
        plain |= {name: plain_sibling(case)[name] for name in ("layout", "model")} | {"state": "resumed"}
        for name, folder in (("sft", weights), ("grpo", weights.with_name(f"{weights.name} by rewards"))):
            config = load(plain | {"algorithm": name}, self._material, folder, policy__init_checkpoint=None)
            run(config, self._pool(1), lambda *_: None)
        self._made.add(weights)

    def _pool(self, world_size: int) -> RankPool:
        self._world_size = world_size
        return self.ranks(world_size)


def _differences(group: PoolGroup, whole: dict[str, object]) -> tuple[set[str], float]:
    """Which of a model's parameters its ranks hold together, and the largest difference from the whole ones."""
    of_ranks = group.run(meeting_ranks.differences, whole)
    return set().union(*of_ranks), max(value for of_rank in of_ranks for value in of_rank.values())


def _compare(found: Outcome, plain: Outcome, config: RunConfig) -> Verdict:
    verdict = Verdict()
    for model, (names, difference) in enumerate(found.of_models):
        if lacking := plain.of_models[model].keys() - names:
            verdict.failures.append(f"no rank holds {sorted(lacking)} of model {model}")
        if not difference <= tolerances.REORDERED:
            verdict.failures.append(f"a parameter of model {model} is off by {difference:.1e}")
        verdict.parameter = max(verdict.parameter, difference)
    if found.metrics.keys() != plain.metrics.keys():
        verdict.failures.append(f"steps {sorted(found.metrics)}, not {sorted(plain.metrics)}")
        return verdict
    for step in plain.metrics:
        metrics, wanted = (_told_by_both(one.metrics[step], config) for one in (found, plain))
        if not (metrics["train/update_successful"] and metrics["train/grad_norm"] > 0):
            verdict.failures.append(f"step {step} updates nothing")
        if unequal := metrics.keys() ^ wanted.keys():
            verdict.failures.append(f"step {step}: one of the two has no {sorted(unequal)}")
        for name in (metrics.keys() & wanted.keys()) - tolerances.TIES.get((config.algorithm, step), set()):
            difference = _relative(metrics[name], wanted[name])
            verdict.metric = max(verdict.metric, difference)
            if not difference <= tolerances.METRICS["rel"]:
                verdict.failures.append(f"step {step}: {name} is {metrics[name]}, not {wanted[name]}")
    verdict.failures += _wrong_rates(found, config)
    return verdict


def _told_by_both(metrics: Metrics, config: RunConfig) -> Metrics:
    """The metrics of a step without those that depend on when its groups were asked for.

    A synchronous run asks in rounds; and only what the present weights have drawn is compared with their ranks.
    """
    left_out = ("train/dynamic_sampling",) * config.asynchronous + ("mismatch/",) * bool(config.max_age)
    return {name: value for name, value in metrics.items() if not name.startswith(left_out)}


def _wrong_groups(found: Outcome, wanted: Trained, config: RunConfig) -> Iterator[str]:
    """Yield steps that train on other groups than they should, groups that train twice, and those that are too old."""
    if found.trained != wanted:
        yield f"the groups {found.trained} train, not {wanted}"
    every = [position for positions in found.trained.values() for position in positions]
    if len({*every}) < len(every):
        yield f"groups train twice: {sorted(every)}"
    for step, positions in found.trained.items():
        ages = [step - 1 - min(found.log.groups[position].versions) for position in positions]
        if not 0 <= min(ages) <= max(ages) <= config.max_age:
            yield f"step {step}: the groups are {ages} versions old, at most {config.max_age} are allowed"


def _relative(found: float, wanted: float) -> float:
    """The difference in units of the value; near 0 it is that of the table's absolute tolerance."""
    difference = abs(found - wanted) / max(abs(wanted), tolerances.METRICS["abs"] / tolerances.METRICS["rel"])
    return math.inf if math.isnan(difference) else difference


def _wrong_rates(found: Outcome, config: RunConfig) -> Iterator[str]:
    """Yield learning rates that are not those of the recipe's schedule, which counts optimizer steps."""
    megatron, loop = config.policy.megatron_cfg, config.loop
    schedules = {"train/lr": (megatron.optimizer, megatron.scheduler)}
    per_step = config.samples_per_step // config.policy.train_global_batch_size
    if config.algorithm == "ppo":
        schedules["value/lr"] = (config.value.optimizer, config.value.scheduler)  # type: ignore[attr-defined]
        per_step *= loop.ppo_epochs  # type: ignore[attr-defined]
    for step, metrics in found.metrics.items():
        for name, schedule in schedules.items():
            wanted = _rate(*schedule, behind=step * per_step - 1)
            if not math.isclose(metrics[name], wanted, rel_tol=tolerances.LEARNING_RATE):
                yield f"step {step}: {name} is {metrics[name]}, and the schedule says {wanted}"


def _rate(optimizer: OptimizerConfig, scheduler: SchedulerConfig, *, behind: int) -> float:
    """The linear schedule's rate with so many optimizer steps behind."""
    share = behind / (scheduler.lr_decay_iters or 1)
    return optimizer.lr - share * (optimizer.lr - optimizer.min_lr)


def report(verdicts: list[tuple[Case, Verdict]]) -> Iterator[str]:
    """Yield the number of runs and the largest differences by value."""
    yield f"{'':58}{'run':>6}{'metrics':>10}{'parameters':>12}"
    for name, value in ((name, value) for name, values in FACTORS.items() for value in values):
        of_value = [verdict for case, verdict in verdicts if case[name] == value and not verdict.refused]
        metric = max((verdict.metric for verdict in of_value), default=0.0)
        parameter = max((verdict.parameter for verdict in of_value), default=0.0)
        yield f"{f'{name}: {value}':58}{len(of_value):6}{metric:10.1e}{parameter:12.1e}"


def main() -> int:
    """Run the selection of a strength and print its table; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strength", type=int, choices=(2, 3), default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    ranks = Ranks()
    cases, started = selection(options.strength), time.monotonic()
    verdicts: list[tuple[Case, Verdict]] = []
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(ranks, Path(folder), options.steps)
        for number, case in enumerate(cases):
            verdict = matrix.verdict(case)
            verdicts.append((case, verdict))
            for failure in verdict.failures:
                print(f"FAILED {name_of(case)}: {failure}", flush=True)
            if number % 50 == 49:
                print(f"{number + 1} of {len(cases)}: {time.monotonic() - started:.0f} s", flush=True)
    ranks.close()
    print("\n".join(report(verdicts)))
    failed = sum(bool(verdict.failures) for _, verdict in verdicts)
    print(f"{len(cases)} combinations, {failed} failed, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
