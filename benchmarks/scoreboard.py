"""What becomes of every recipe in a folder: migrated, and rehearsed on this machine.

usage: python benchmarks/scoreboard.py FOLDER [--on-paper] [--output FILE.jsonl]
Prints the table; docs/scoreboard.json has the last rows. Each row is written as it is found, and a later call goes on
behind it.
Configurations of models are read from $HF_HOME; files that recipes name are found from the current folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config.base import ConfigError, Problem, value_at
from nemo_rl_mcore.recipe.load import compute
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import leave_open, migrate
from nemo_rl_mcore.tools.rehearse.command import OF_VLLM, Table, read_rehearsed, small_runs
from nemo_rl_mcore.tools.rehearse.shrink import RANKS, layouts_of

DEADLINE_S = 1800
"""Of one rehearsal: many times what it takes on two free cores."""
CALL = (sys.executable, "-c", "import sys; from nemo_rl_mcore.cli import main; sys.exit(main())", "rehearse")


NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """A recipe's row.

    migrated: clean, by hand, or refused. model: given in place of a recipe's placeholder, and `with_model` the result.
    by_hand: keys left to the user, with that model; of a refused recipe, its problems.
    rehearsed: yes, failed (a check or the run), refused (nothing can run), traceback, or not run (only shrunk and
    checked). reason: why it was not rehearsed, else why it does not migrate.
    """

    recipe: str
    migrated: str
    by_hand: int
    rehearsed: str = "refused"
    proven: int = 0
    refused: int = 0
    reason: str = ""
    seconds: float = 0.0
    model: str = ""
    with_model: str = ""


MODELS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "dsv3": "deepseek-ai/DeepSeek-V3",
    "nanov3": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "super": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
}
"""The model that a word of a recipe's file name names, for recipes that leave it to the user."""


def named_model(recipe: Path) -> str:
    """Return the model to give to `migrate --model`; "" for a recipe that names one itself."""
    given = str(value_at(compute(read_recipe(recipe), ()).tree, "policy.model_name"))
    if not given.startswith(("/", "Follow")):
        return ""
    return next((model for word, model in MODELS.items() if word in recipe.name), "")


def row_of(recipe: Path, name: str, *, on_paper: bool) -> Row:
    started = time.monotonic()
    try:
        how, by_hand, reason = _migrated(recipe, "")
        model = named_model(recipe)
    except ConfigError as error:
        return Row(name, "refused", 0, reason=_decisive(error.problems))
    with_model = ""
    if model:
        with_model, by_hand, reason = _migrated(recipe, model)
    found = shrunk(recipe) or ({"rehearsed": NOT_RUN} if on_paper else rehearsed(recipe))
    found["reason"] = found.get("reason") or reason
    seconds = round(time.monotonic() - started, 1)
    return Row(name, how, by_hand, **found, seconds=seconds, model=model, with_model=with_model)


def _migrated(recipe: Path, model: str) -> tuple[str, int, str]:
    """Return how a recipe migrates, the number of keys left to the user, and the reason if it has no run."""
    migrated = migrate(recipe, models={"policy": model} if model else None)
    if (config := migrated.config) is None:
        return "refused", len(migrated.problems), _decisive(migrated.problems)
    leave_open(migrated.draft, _problems_of(lambda: preflight(config, elsewhere=True)))
    by_hand = sum(note.kind in (Kind.REFUSED, Kind.OPEN) for note in migrated.draft.notes)
    return "by hand" if by_hand else "clean", by_hand, ""


def _problems_of(examine: Callable[[], object]) -> Sequence[Problem]:
    try:
        examine()
    except ConfigError as error:
        return error.problems
    return ()


def _decisive(problems: Sequence[Problem]) -> str:
    """Return what is missing: an environment, an architecture, else the last problem, of vLLM if there is no other."""
    missing = [one for one in problems if one.code == "not-supported"]
    wanted = [one for one in missing if one.path.startswith("env.")]
    wanted += [one for one in missing if one.path == "policy.model_name"]
    others = [one for one in problems if not one.path.startswith(OF_VLLM)]
    one = [*wanted, *others[::-1], *problems][0]
    return f"{one.path}: {one.code}"


def shrunk(recipe: Path) -> dict[str, Any]:
    try:
        read = read_rehearsed(str(recipe), [])
        with tempfile.TemporaryDirectory() as scratch:
            small_runs(read, layouts_of(read.config, RANKS[0]), Path(scratch), Table(recipe.name, ""))
    except ConfigError as error:
        return {"reason": _decisive(error.problems)}
    except Exception as error:  # noqa: BLE001  # a recipe that breaks it is what the scoreboard is to show
        place = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "rehearsed": "traceback",
            "reason": f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"[:300],
        }
    return {}


def rehearsed(recipe: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        try:
            ended = subprocess.run(
                [*CALL, str(recipe.absolute()), "--json", str(file)],
                capture_output=True, text=True, timeout=DEADLINE_S, check=False,
                env=os.environ | {"TMPDIR": scratch},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"rehearsed": "failed", "reason": f"not done after {DEADLINE_S} s"}
        if file.exists():
            return judged(json.loads(file.read_text(encoding="utf-8")))
    last = (ended.stderr.strip().splitlines() or [""])[-1]
    word = "traceback" if "Traceback" in ended.stderr else "failed"
    return {"rehearsed": word, "reason": f"exit status {ended.returncode}: {last}"[:300]}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    verdicts = Counter(line["verdict"] for line in found["lines"])
    failed = next((line for line in found["lines"] if line["verdict"] == "FAILED"), None)
    reason = f"{failed['name']}: {' '.join(failed['why'].split())}"[:300] if failed else ""
    counts = {"proven": verdicts["proven"], "refused": verdicts["refused"]}
    return {"rehearsed": "failed" if failed else "yes", "reason": reason, **counts}


def read_rows(file: Path) -> dict[str, Row]:
    if not file.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row.recipe: row for row in rows}


def table(rows: Iterable[Row]) -> Iterator[str]:
    rows = sorted(rows, key=lambda row: row.recipe)
    given = [replace(row, migrated=row.with_model or row.migrated) for row in rows]
    for column, counted in (("migrated", rows), ("migrated, models given", given), ("rehearsed", rows)):
        counts = Counter(getattr(row, column.partition(",")[0]) for row in counted)
        yield f"{column}: {', '.join(f'{counts[name]} {name}' for name in sorted(counts))}; of {len(rows)}"
        yield ""
    yield "| recipe | migrated | keys by hand | rehearsed | proven | refused | seconds | reason |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        cells = (row.recipe, row.migrated, row.by_hand, row.rehearsed, row.proven, row.refused)
        reason = row.reason.replace("|", "\\|")
        yield f"| {' | '.join(map(str, cells))} | {row.seconds:.0f} | {reason} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("results/scoreboard.jsonl"))
    parser.add_argument("--on-paper", action="store_true", help="shrink recipes, and run nothing")
    args = parser.parse_args()
    output: Path = args.output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(output)
    done = {name for name, row in rows.items() if args.on_paper or row.rehearsed != NOT_RUN}
    for path in sorted(args.folder.rglob("*.yaml")):
        name = str(path.relative_to(args.folder))
        if name in done:
            continue
        rows[name] = row_of(path, name, on_paper=args.on_paper)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(rows[name])) + "\n")
        sys.stderr.write(f"{name}: {rows[name].rehearsed} {rows[name].reason}\n")
    sys.stdout.write("\n".join(table(rows.values())) + "\n")


if __name__ == "__main__":
    main()
