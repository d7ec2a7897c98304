"""What a recipe needs of this machine: what `check` says of it, and whether packages, GPUs and memory are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_mcore.config import ConfigError, RunConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.models.memory import estimate_memory
from nemo_rl_mcore.recipe.load import load_with_warnings
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.doctor_accelerators import GPU
from nemo_rl_mcore.tools.check.doctor_findings import Finding, Status, ok
from nemo_rl_mcore.tools.check.engines import plan_engines
from nemo_rl_mcore.tools.check.gpus import KEY, REMEDY, wanted_gpus
from nemo_rl_mcore.tools.check.packages import missing_packages, needed_packages

_GIB = 2**30


@dataclass(frozen=True)
class Recipe:
    """A recipe as `check` sees it; config: None where it does not load."""

    config: RunConfig | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


@dataclass(frozen=True)
class Machines:
    """What a run would have: memory of this machine and its GPUs or, with RAY_ADDRESS, the GPUs of each machine.

    cluster: None without RAY_ADDRESS, and empty where nothing answers there.
    """

    memory: int
    gpus: Sequence[GPU]
    cluster: Sequence[float] | None


def read_recipe(path: str, overrides: Sequence[str]) -> Recipe:
    """Load and check a recipe; what is wrong with it is told, not raised."""
    try:
        config, warnings = load_with_warnings(path, overrides)
    except ConfigError as error:
        return Recipe(None, error.problems, ())
    try:
        plan = preflight(config, warnings=warnings)
    except ConfigError as error:
        return Recipe(config, error.problems, warnings)
    return Recipe(config, (), plan.warnings)


def findings(recipe: Recipe, packages: Mapping[str, Finding], machines: Machines) -> Iterator[Finding]:
    """Yield what the recipe needs; packages: what was found of each, by the name under which it is imported."""
    config = recipe.config
    of_packages = () if config is None else tuple(missing_packages(config))
    problems = [problem for problem in recipe.problems if problem not in of_packages]
    for problem in problems:
        yield Finding(problem.path, Status.WRONG, _told(problem), mend=problem.remedy, needed=True)
    for warning in recipe.warnings:
        yield Finding(warning.path, Status.WRONG, f"warning: {_told(warning)}", mend=warning.remedy)
    if config is None:
        return
    if not problems:
        yield ok(
            "check", f"{config.algorithm} on {config.cluster.world_size} rank(s): the recipe has no problems"
        )
    for one in needed_packages(config):
        found = packages[one.package]
        what = f"{one.package}: {found.found}"
        yield Finding(one.key, found.status, what, mend=found.mend, needed=True)
    yield from _of_machines(config, machines)


def _told(problem: Problem) -> str:
    return f"{problem.what}  [{problem.where}]" if problem.where else problem.what


def _of_machines(config: RunConfig, machines: Machines) -> Iterator[Finding]:
    cluster = config.cluster
    if cluster.num_nodes > 1 and machines.cluster is None:
        what = f"{cluster.num_nodes} machines need a Ray cluster, and RAY_ADDRESS is not set"
        mend = "ray start --head on one, ray start --address=HEAD:6379 on the others; then export RAY_ADDRESS=HEAD:6379"
        yield Finding("cluster.num_nodes", Status.MISSING, what, mend=mend, needed=True)
    elif not cluster.on_cpu:
        yield _gpu_count(config, machines)
    if not cluster.on_cpu and machines.gpus:
        yield _memory(config, min(gpu.memory for gpu in machines.gpus), "a GPU", 1)
    elif cluster.on_cpu:
        yield _memory(config, machines.memory, "this machine", cluster.cpu_workers_per_node)


def _gpu_count(config: RunConfig, machines: Machines) -> Finding:
    cluster = config.cluster
    if machines.cluster is None:
        wanted, there = wanted_gpus(config), len(machines.gpus)
        found = f"{wanted} GPUs are asked for, and this machine has {there}"
        fits = there >= wanted
    else:
        fitting = sum(there >= cluster.gpus_per_node for there in machines.cluster)
        found = f"{cluster.num_nodes} machine(s) with {cluster.gpus_per_node} GPUs are asked for, and Ray has {fitting}"
        fits = fitting >= cluster.num_nodes
    if fits:
        return ok(KEY, found)
    return Finding(KEY, Status.MISSING, found, mend=REMEDY, needed=True)


def _memory(config: RunConfig, there: int, where: str, ranks: int) -> Finding:
    """Compare the estimate of `check` with the memory of what the ranks share."""
    engine = plan_engines(config).memory
    needed = ranks * estimate_memory(config).total
    needed += config.policy.generation.embedded_cfg.engines * engine.total if engine is not None else 0
    found = f"about {needed / _GIB:.3g} GiB of the {there / _GIB:.4g} of {where}, before activations and caches of keys"
    if needed <= there:
        return ok("memory", found)
    mend = "more ranks, tensor or pipeline parallelism, a smaller microbatch: docs/performance.md"
    return Finding("memory", Status.WRONG, found, mend=mend, needed=True)
