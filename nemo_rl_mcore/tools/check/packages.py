"""The packages that a run needs, found out without importing them."""

import ast
import difflib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.custom_code import handed_objects, see_working_directory
from nemo_rl_mcore.config.endpoint import OWN_TOOL_PARSERS
from nemo_rl_mcore.config.run_config import RunConfig

_LAYERS, _CONTEXT = "policy.megatron_cfg.transformer_impl", "policy.megatron_cfg.context_parallel_size"


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
            yield Problem(
                "not-found",
                key,
                f"{path}: there is no module {package} in {os.getcwd()}, on PYTHONPATH or installed",
                "start the command where it lies, or put its folder on PYTHONPATH",
            )
        elif (names := _names_in(module)) is not None and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {near[0]}?" if near else "name a class that it has"
            yield Problem("not-found", key, f"{path}: the module {module} has no {name}", remedy)


def _names_in(module: str) -> set[str] | None:
    """Return the names that a module's source may bind; None where only running it tells."""
    # The spec of a module inside a package would import the package: only its file is looked for.
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = (
        Path(spec.origin).parent.joinpath(*inside[:-1], f"{inside[-1]}.py") if inside else Path(spec.origin)
    )
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names = {name for node in nodes for name in _bound(node)}
    return None if names & _BIND_ANYTHING else names


_BIND_ANYTHING = {"*", "__getattr__", "globals", "exec", "setattr"}


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement may bind, also inside `if` and `try`; and those that it uses."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name):
        yield node.id


@dataclass(frozen=True)
class NeededPackage:
    """A package that the recipe asks for, by the key that does. source: what to install."""

    key: str
    package: str
    source: str


def needed_packages(config: RunConfig) -> Iterator[NeededPackage]:
    """Yield the packages that the recipe asks for besides those of every run."""
    packages = (
        ("logger.wandb_enabled", config.logger.wandb_enabled, "wandb", "the extra wandb"),
        ("logger.mlflow_enabled", config.logger.mlflow_enabled, "mlflow", "the extra mlflow"),
        ("logger.tensorboard_enabled", config.logger.tensorboard_enabled, "tensorboard", "the package"),
        (
            _CONTEXT if _shared_on_gpus(config) else _LAYERS,
            transformer_impl(config, elsewhere=False) == "transformer_engine",
            "transformer_engine",
            "the extra te",
        ),
        (
            "policy.generation.backend",
            (engine := config.policy.generation.engine.package) is not None,
            engine or "",
            f"the extra {engine}-cpu" if config.cluster.on_cpu else f"the extra {engine}",
        ),
        ("env.math", config.env.math is not None, "math_verify", "the extra math"),
        (
            "env.endpoint.tool_parser",
            config.env.endpoint is not None and config.env.endpoint.tool_parser not in OWN_TOOL_PARSERS,
            "renderers",
            "the extra tool-parsers",
        ),
    )
    return (NeededPackage(key, package, source) for key, wanted, package, source in packages if wanted)


def missing_packages(config: RunConfig) -> Iterator[Problem]:
    """Yield packages that the recipe asks for and that are not installed."""
    for one in needed_packages(config):
        if not installed(one.package):
            what = f"needs the Python package {one.package}"
            yield Problem("not-installed", one.key, what, f"install {one.source}, or turn it off")


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
    """Return whether ranks on GPUs share sequences, for which only Transformer Engine has an attention."""
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


def installed(package: str) -> bool:
    """Return whether a package can be imported, found out without importing it."""
    return importlib.util.find_spec(package) is not None
