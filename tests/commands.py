"""The command in a process of its own, of which nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from processes import ProcessWatch


def run(
    *arguments: object,
    folder: Path,
    first: str = "",
    end: Callable[[subprocess.Popen[str]], None] | None = None,
    **environment: str,
) -> tuple[int, str, str]:
    """Status, output and errors. first: code before it; end: called with the process once it runs."""
    watch = ProcessWatch()
    code = f"{first}\nimport sys; from nemo_rl_mcore.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder, env={**os.environ, **environment, **watch.environment}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        watch.follow(process.pid)
        try:
            if end is not None:
                end(process)
            output, errors = process.communicate(timeout=240)
            assert watch.all_gone(within_s=30)
        finally:
            watch.kill_all()
    return process.returncode, output, errors
