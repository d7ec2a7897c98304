"""Run the CPU commands of docs/quickstart.md as they stand there, in an empty folder, and check what was learned.

    python tests/learning/quickstart.py [FOLDER] [KEY=VALUE ...]

The commands are those of the blocks that begin with `# CPU` and those without such a line that copy recipes. The
overrides, such as seed=1, go to every run. Exit status 1 when a command fails or a limit is missed.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/quickstart.md"
_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUNS = ("sft", "grpo", "dpo")
ANY_MACHINE = "nemo-rl-mcore recipes"


def cpu_commands() -> list[str]:
    """The page's commands for machines without a GPU, in their order; those that install are left out."""
    blocks = [match[1].splitlines() for match in _BLOCK.finditer(PAGE.read_text("utf-8"))]
    lines = [
        line for block in blocks if block[0] == "# CPU" or block[0].startswith(ANY_MACHINE) for line in block
    ]
    return [line for line in lines if line.startswith("nemo-rl-mcore ")]


def run_commands(folder: Path, overrides: list[str]) -> None:
    for command in cpu_commands():
        program, name, *arguments = shlex.split(command)
        assert program == "nemo-rl-mcore"
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "nemo_rl_mcore", name, *arguments, *(overrides if name in _RUNS else [])],
            cwd=folder,
            check=True,
        )
        sys.stdout.write(f"== {time.monotonic() - began:.0f} s  {command}\n")
        sys.stdout.flush()


def learned(folder: Path) -> dict[str, float]:
    results = folder / "results/quickstart"
    sft, dpo = (_series(results / f"{name}_cpu/metrics.jsonl") for name in ("sft", "dpo"))
    scores = {
        name: json.loads((results / f"of_{name}/eval/results.json").read_text("utf-8"))["gsm8k"]["metrics"]
        for name in ("sft", "grpo")
    }
    return {
        "before": sft["validation/accuracy"][0],
        "sft": scores["sft"]["pass@1"]["mean"],
        "grpo": scores["grpo"]["pass@1"]["mean"],
        "preference": dpo["validation/preference_accuracy"][-1],
    }


def _series(path: Path) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    for line in path.read_text("utf-8").splitlines():
        for key, value in json.loads(line).items():
            series.setdefault(key, []).append(value)
    return series


# Six seeds: none before; 0.26 to 0.56 after SFT; 0.60 to 0.93 after GRPO, at least 0.26 more than before it. DPO: four
# seeds, 0.77 to 0.94. The limits leave room for other machines' rounding.
LIMITS = {
    "before any training no answer is right": lambda seen: seen["before"] <= 0.02,
    "SFT raises the score": lambda seen: seen["sft"] >= 0.1,
    "GRPO raises it further": lambda seen: seen["grpo"] >= seen["sft"] + 0.1,
    "DPO prefers the better answers": lambda seen: seen["preference"] >= 0.6,
}


def main(arguments: list[str]) -> int:
    overrides = [text for text in arguments if "=" in text]
    folders = [text for text in arguments if "=" not in text]
    folder = Path(folders[0] if folders else tempfile.mkdtemp(prefix="quickstart_"))
    folder.mkdir(parents=True, exist_ok=True)
    run_commands(folder, overrides)
    seen = learned(folder)
    sys.stdout.write(f"{', '.join(f'{name} {value:.3f}' for name, value in seen.items())}\n")
    verdicts = {name: holds(seen) for name, holds in LIMITS.items()}
    sys.stdout.writelines(f"{'pass' if holds else 'FAIL'}  {name}\n" for name, holds in verdicts.items())
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
