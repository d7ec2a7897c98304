"""The first steps of every recipe for a CPU, number by number: what a change that should change no number must keep.

    python benchmarks/first_steps.py record FOLDER [--only WORD] [--steps N]
    python benchmarks/first_steps.py compare FOLDER FOLDER

`record` runs each recipe (the one with vLLM too, where vLLM is installed) and keeps its metrics as they were logged.
`compare` exits with 1 and names recipe, step, metric and both values where two recordings differ in a number other
than a time, or in which recipes and metrics they have.
"""

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from nemo_rl_mcore.recipe.load import load_config

CONFIGS = Path(__file__).parents[1] / "examples/configs"
TIMES = ("timing/", "performance/", "memory/")


def recipes() -> list[Path]:
    patterns = ("*_cpu.yaml", "recipes/variants/*_cpu.yaml", "recipes/llm/*-1n0g-megatron.yaml")
    found = sorted(path for pattern in patterns for path in CONFIGS.glob(pattern))
    return [path for path in found if "vllm" not in path.stem or find_spec("vllm") is not None]


def record(folder: Path, only: str, steps: int) -> int:
    failed = 0
    for recipe in recipes():
        if only not in recipe.stem:
            continue
        log_dir, algorithm = folder / recipe.stem, load_config(recipe).algorithm
        overrides = (
            f"{algorithm}.max_num_steps={steps}",
            f"logger.log_dir={log_dir}",
            "checkpointing.enabled=false",
        )
        command = [sys.executable, "-m", "nemo_rl_mcore", algorithm, "--config", str(recipe), *overrides]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{recipe.stem}: {'recorded' if run.returncode == 0 else run.stderr}", flush=True)
        failed += run.returncode != 0
    return int(failed > 0)


def numbers(log_dir: Path) -> dict[tuple[str, int, str], object]:
    """What the run and those before it, for its weights or its teacher's, logged, by folder, step and metric."""
    return {
        (str(path.parent.relative_to(log_dir)), row["step"], name): value
        for path in log_dir.rglob("metrics.jsonl")
        for row in map(json.loads, path.read_text().splitlines())
        for name, value in row.items()
        if not name.startswith(TIMES)
    }


def compare(one: Path, other: Path) -> int:
    names = [{path.name for path in folder.iterdir()} for folder in (one, other)]
    differences = [f"{name}: recorded once only" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        ours, theirs = numbers(one / name), numbers(other / name)
        found = [
            f"{name}: {key[0]}, step {key[1]}, {key[2]}: {ours.get(key)!r} and {theirs.get(key)!r}"
            for key in sorted(ours.keys() | theirs.keys())
            # By text: NaN is equal to itself, and a missing number is not one.
            if json.dumps(ours.get(key, "missing")) != json.dumps(theirs.get(key, "missing"))
        ]
        print(f"{name}: {len(ours)} numbers, {len(found)} differ")
        differences += found
    print("\n".join(differences[:50]) or "equal")
    return int(bool(differences))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", default="", help="recipes whose name holds this")
    recording.add_argument("--steps", type=int, default=20)
    comparing = commands.add_parser("compare")
    comparing.add_argument("folders", type=Path, nargs=2)
    options = parser.parse_args()
    if options.command == "record":
        return record(options.folder, options.only, options.steps)
    return compare(*options.folders)


if __name__ == "__main__":
    sys.exit(main())
