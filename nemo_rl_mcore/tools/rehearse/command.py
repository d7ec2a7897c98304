"""The command `rehearse`: shrinks a recipe, runs it, and checks its numbers by computing them in other ways."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.base import ConfigError, Tree, value_at
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.driver.signals import EXIT_FAILED, exit_status
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_with_warnings
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import migrate
from nemo_rl_mcore.tools.rehearse import proofs
from nemo_rl_mcore.tools.rehearse.proofs import Refused
from nemo_rl_mcore.tools.rehearse.runs import Found, Ran, loaded, packed, resume_copy, run_in
from nemo_rl_mcore.tools.rehearse.schedule import Schedule, raise_rates
from nemo_rl_mcore.tools.rehearse.shrink import (
    TEACHER,
    Sharing,
    Shrink,
    layouts_of,
    rollout_steps,
    shrinks,
    shrunk,
)


class Verdict(Enum):
    """The result of a proof."""

    PROVEN = "proven"
    REFUSED = "refused"
    FAILED = "FAILED"
    ON_GPU = "on a GPU"


@dataclass(frozen=True)
class Line:
    """A proof in a layout: its verdict and the reason or finding."""

    name: str
    verdict: Verdict
    why: str
    layout: str = ""
    seconds: float = 0.0


ONLY_ON_GPUS = (
    Line("kernels", Verdict.ON_GPU, "Transformer Engine, flash attention, Triton, bfloat16"),
    Line("NCCL", Verdict.ON_GPU, "collectives between GPUs and machines, and their overlap with computation"),
    Line("memory", Verdict.ON_GPU, "nemo-rl-mcore check estimates it for the full-size recipe"),
    Line("speed", Verdict.ON_GPU, "of steps, engines and refits"),
    Line("vLLM", Verdict.ON_GPU, "the recipe's engine, if it uses vLLM"),
)


@dataclass
class Table:
    """A rehearsal's results.

    open: NeMo RL keys that are left out because they have no counterpart. run: the first layout's run, for another
    machine to repeat; see `packed`.
    """

    recipe: str
    algorithm: str
    layouts: list[str] = field(default_factory=list[str])
    shrinks: list[Shrink] = field(default_factory=list[Shrink])
    open: list[str] = field(default_factory=list[str])
    lines: list[Line] = field(default_factory=list[Line])
    seconds: float = 0.0
    run: Tree | None = None

    @property
    def failed(self) -> bool:
        return any(line.verdict is Verdict.FAILED for line in self.lines)

    def rows(self) -> Iterator[str]:
        lines = [*self.lines, *ONLY_ON_GPUS]
        wide = max(len(line.name) for line in lines)
        for line in lines:
            where = f"[{line.layout}] " if len(self.layouts) > 1 and line.layout else ""
            time = f"{line.seconds:6.1f} s" if line.seconds else " " * 8
            yield f"{line.verdict.value:8} {line.name:{wide}} {time}  {where}{line.why}"
        counts = [f"{sum(one.verdict is kind for one in lines)} {kind.value}" for kind in Verdict]
        yield f"{', '.join(counts)}; {self.seconds:.0f} s"

    def write(self, file: Path) -> None:
        written = {"recipe": self.recipe, "algorithm": self.algorithm, "failed": self.failed}
        written |= {"seconds": round(self.seconds, 1), "layouts": self.layouts, "open": self.open}
        written["shrinks"] = [vars(one) for one in self.shrinks]
        lines = (*self.lines, *ONLY_ON_GPUS)
        written["lines"] = [{**vars(line), "verdict": line.verdict.value} for line in lines]
        if self.run is not None:
            written["run"] = self.run
        file.write_text(json.dumps(written, indent=2, default=str) + "\n", encoding="utf-8")


OF_VLLM = ("policy.generation.vllm_cfg.", "policy.generation.vllm_kwargs.")
"""Settings that only vLLM reads."""
_NOT_VLLM = "not supported with vLLM; the rehearsal samples with the embedded engine"


@dataclass(frozen=True)
class Rehearsed:
    """A recipe to rehearse.

    schedule: its learning rates; a NeMo RL recipe's come from its own keys. theirs: True for a NeMo RL recipe.
    open: its keys without a counterpart. of_vllm: unsupported settings that only vLLM reads.
    """

    config: RunConfig
    schedule: Schedule
    theirs: bool = False
    open: tuple[str, ...] = ()
    of_vllm: tuple[Shrink, ...] = ()


def run_rehearse(recipe: str, ranks: int, json_file: str | None, overrides: Sequence[str]) -> int:
    """Rehearse a recipe; return 0 if no proof failed, else keep the files and return 1.

    Raises ConfigError for a recipe with problems.
    """
    started = time.monotonic()
    read = read_rehearsed(recipe, overrides)
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    layouts = layouts_of(read.config, ranks)
    named = ", ".join(map(str, layouts))
    table = Table(recipe, read.config.algorithm, [*map(str, layouts)], open=[*read.open])
    runs, factor = small_runs(read, layouts, folder, table)
    introduction = [f"rehearsal of {recipe} ({table.algorithm}): {named}"]
    introduction += [f"left out: {one}" for one in table.open]
    introduction += [f"{len(table.shrinks)} changed keys:", *(f"  {one}" for one in table.shrinks)]
    if len(layouts) > 1:
        introduction.append(f"in {len(layouts)} layouts: {named}")
    for line in introduction:
        write_line(sys.stdout, line)
    status = exit_status(lambda: _rehearse(runs, read, factor, table), lambda: f"its files are in {folder}")
    table.seconds = time.monotonic() - started
    for line in table.rows():
        write_line(sys.stdout, line)
    if json_file is not None:
        table.write(Path(json_file))
    if status == 0 and not table.failed:
        shutil.rmtree(folder, ignore_errors=True)
        calls = ("migrate",) if read.theirs else (read.config.algorithm, "--config")
        where = "" if read.theirs or read.config.cluster.on_cpu else ", on the machines of the run"
        write_line(sys.stdout, f"next: `{command(*calls, recipe, *overrides)}`{where}")
        return 0
    write_line(sys.stdout, f"the rehearsal's files are in {folder}")
    return status or EXIT_FAILED


def read_rehearsed(recipe: str, overrides: Sequence[str]) -> Rehearsed:
    """Read our recipe, or migrate a NeMo RL recipe without its unsupported keys; raises ConfigError.

    Unsupported settings that only vLLM reads are left out, since the rehearsal samples with another engine.
    """
    try:
        config = load_with_warnings(recipe, overrides)[0]
        return Rehearsed(config, Schedule.of(config.policy.megatron_cfg.model_dump()))
    except ConfigError as error:
        if not any(problem.code == "foreign-recipe" for problem in error.problems):
            raise
    migrated, of_vllm = migrate(recipe, overrides), tuple[Shrink, ...]()
    paths = {problem.path: None for problem in migrated.problems}
    if migrated.config is None and all(path.startswith(OF_VLLM) for path in paths):
        of_vllm = tuple(Shrink(path, value_at(migrated.read.tree, path), None, _NOT_VLLM) for path in paths)
        migrated = migrate(recipe, [*overrides, *(f"~{path}" for path in paths)])
    if migrated.config is None:
        raise ConfigError(migrated.problems)
    left_out = tuple(str(note) for note in migrated.draft.notes if note.kind in (Kind.REFUSED, Kind.OPEN))
    section, ticks = migrated.config.policy.megatron_cfg.model_dump(), 1
    given = value_at(migrated.read.tree, "policy.megatron_cfg")
    theirs = cast("Tree", given) if isinstance(given, dict) else {}
    if theirs.get("enabled") and all(isinstance(theirs.get(key), dict) for key in ("optimizer", "scheduler")):
        section, ticks = theirs, rollout_steps(migrated.config)
    return Rehearsed(migrated.config, Schedule.of(section, ticks), True, left_out, of_vllm)


def small_runs(
    read: Rehearsed, layouts: list[Sharing], folder: Path, table: Table
) -> tuple[list[Ran], float]:
    """Make one recipe per layout; return them with the factor of the first one's learning rates.

    Raises ConfigError if the rules or this machine do not allow one.
    """
    runs, factor = list[Ran](), 1.0
    for number, layout in enumerate(layouts):
        own = folder / f"layout_{number + 1}"
        own.mkdir()
        small = shrunk(read.config, layouts, number, own)
        if value_at(small.tree, "teacher") is not None:
            proofs.make_teacher(small.tree, own / TEACHER)
        raised = raise_rates(small, loaded(small.tree), read.schedule)
        config = loaded(small.tree)
        preflight(config, elsewhere=False, of_a_run=True)
        if number == 0:
            factor = raised
            table.shrinks = [*read.of_vllm, *shrinks(read.config, config, small.why)]
        runs.append(Ran(small.tree, layout, own))
    return runs, factor


def _rehearse(runs: list[Ran], read: Rehearsed, factor: float, table: Table) -> None:
    first = runs[0]
    largest = max((ran.config.cluster for ran in runs), key=lambda cluster: cluster.world_size)
    with RayCluster(largest) as session:
        for ran in runs:
            _prove(table, ran, "two steps, saves, export", partial(run_in, ran, session))
            if ran is first and not table.failed:
                _prove(table, ran, "a kill, a resume", partial(resume_copy, first, session))
    if table.failed:
        return
    table.run = packed(first)
    for ran in runs:
        twins = proofs.Twins(ran)
        every: dict[str, Callable[[], str]] = {
            "sampled = trained": partial(proofs.sampled, ran),
            "split step = train": twins.split,
            "layout = one rank": twins.layout,
        }
        if "value" in ran.config.models:
            every["critic = one rank"] = partial(proofs.critic_on_one_rank, ran)
        if ran is first:
            every = {
                "resume = continue": partial(proofs.resumed, ran),
                "rates = schedule": partial(proofs.learning_rates, ran, read.schedule, factor),
                **every,
                "engines = weights": twins.refits,
                "masked = ignored": twins.masked,
                "fused = unfused": twins.fused,
                "packed = padded": twins.packed,
                "export = import": twins.exported,
                "export = transformers": twins.transformers,
            }
        for name, proof in every.items():
            _prove(table, ran, name, proof)


def _prove(table: Table, ran: Ran, name: str, proof: Callable[[], str]) -> None:
    started = time.monotonic()
    try:
        verdict, why = Verdict.PROVEN, proof()
    except Refused as reason:
        verdict, why = Verdict.REFUSED, str(reason)
    except Exception as error:  # noqa: BLE001  # a proof that breaks is one failed line among the others
        # The message's first line; tracebacks of other processes follow it.
        first = next(iter(str(error).splitlines()), "")
        known = isinstance(error, Found | RunStoppedError)
        verdict, why = Verdict.FAILED, first if known else f"{type(error).__name__}: {first}"
    table.lines.append(Line(name, verdict, why, str(ran.layout), time.monotonic() - started))
