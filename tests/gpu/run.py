"""Runs the parts of the GPU run one after another, each in a process of its own under a deadline; see run.sh.

A part that fails, hangs or dies does not stop those after it. The exit status is 1 if any check failed; a part that
needs what the machine lacks is skipped, which is no failure.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from needs import missing
from table import is_ok, markdown

ROOT = Path(__file__).resolve().parents[2]
DEADLINES_S = {
    **{"kernels": 90, "worker": 210, "step": 290, "costs": 180, "refit": 90, "te": 180, "context": 240},
    **{"recipe": 290, "vllm": 290, "async": 290, "rehearsal": 290},
}
"""Seconds of each part, start of its processes included; each below five minutes."""
FIRST_S = {"kernels": 70, "worker": 120, "step": 140, "costs": 90, "refit": 50}
"""What a first look at a GPU runs within 480 s, most telling first."""


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
