"""Recipes of NeMo RL with keys of other types, null, out of range or left out, through `migrate` and then `check`.

By hand: python tests/migration_fuzz.py CASES [SEED] [FOLDER of more recipes]; prints what fails and the slowest.
"""

import contextlib
import io
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.driver.output import write_line
from nemo_rl_mcore.recipe.of_nemo_rl import listed_keys

FOLDER = Path(__file__).parent / "fixtures/nemo_rl"
LEFT_OUT = object()
VALUES: tuple[Any, ...] = (
    *(None, True, False, LEFT_OUT, LEFT_OUT),
    *(0, 1, -1, 2, 3, 7, 64, 10**9, 10**30, -(10**12)),
    *(0.0, 0.5, -0.5, 1e-30, 1e300, float("inf"), float("nan")),
    *("", "text", "1e-3", "${gone}", "${policy.precision}", "???", "null", "a: b", "\u00e9\n#", "x" * 300),
    *([], [1], [None], [[]], [{}], [{"name": "LinearLR"}], ["a", "b"]),
    *({}, {"a": 1}, {"enabled": True}, {"enabled": False}, {1: 2}, {"a": {"b": [{"c": None}]}}),
)
SLOW_S = 10.0


@dataclass(frozen=True)
class Case:
    """A recipe and its changes, by paths."""

    base: Path
    changes: dict[str, Any]

    def __str__(self) -> str:
        said = {path: "left out" if value is LEFT_OUT else value for path, value in self.changes.items()}
        return f"{self.base.stem} with {str(said)[:300]}"


def cases(number: int, seed: int, bases: list[Path]) -> Iterator[Case]:
    """Yield recipes with one to four keys or sections changed."""
    draw = random.Random(seed)
    others = sorted(listed_keys())
    trees = {base: yaml.safe_load(base.read_text()) for base in bases}
    for _ in range(number):
        base = draw.choice(bases)
        own = sorted(_paths(trees[base]))
        pools = [own if draw.random() < 0.8 else others for _ in range(draw.randint(1, 4))]
        yield Case(base, {draw.choice(pool): draw.choice(VALUES) for pool in pools})


def _paths(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")


def recipe_of(case: Case) -> dict[str, Any]:
    """Return the recipe with its changes; below a key that is no section any more nothing is changed."""
    tree = yaml.safe_load(case.base.read_text())
    for path, value in case.changes.items():
        *above, last = path.split(".")
        section = tree
        for key in above:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue
        if value is LEFT_OUT:
            section.pop(last, None)
        else:
            section[last] = value
    return tree


def wrong_with(case: Case, folder: Path) -> tuple[str, float]:
    """Return what is wrong with how a case went, empty where nothing is, and its seconds of a processor."""
    recipe, ours = folder / "theirs.yaml", folder / "ours.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(case)))
    ours.unlink(missing_ok=True)
    start = time.process_time()  # of a machine that does other things, too
    migrated, told = _call("migrate", str(recipe), "--output", str(ours))
    checked = None
    if ours.exists():
        checked, more = _call("check", "--config", str(ours))
        told += more
    seconds = time.process_time() - start
    return _judge(migrated, checked, told, seconds), seconds


def _judge(migrated: int | None, checked: int | None, told: str, seconds: float) -> str:
    if migrated is None or (checked is None and migrated != 1):
        return f"a traceback:\n{told[-1500:]}"
    if migrated == 1:
        return "" if checked is None else "a status of no file, and a file"
    if migrated == 0 and checked:
        return f"a clean migration that `check` refuses:\n{told[-1500:]}"
    return f"{seconds:.1f} s" if seconds > SLOW_S else ""


def _call(*arguments: str) -> tuple[int | None, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            return main(arguments), out.getvalue()
        except Exception:  # noqa: BLE001
            return None, out.getvalue() + traceback.format_exc()


def run(number: int, seed: int, bases: list[Path]) -> int:
    """Print each case that fails; return how many."""
    failed, slowest, statuses = 0, (0.0, ""), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(FOLDER / "examples")
        for case in cases(number, seed, bases):
            wrong, seconds = wrong_with(case, folder)
            slowest = max(slowest, (seconds, str(case)))
            statuses["failed" if wrong else "as it should"] += 1
            failed += bool(wrong)
            if wrong:
                write_line(sys.stdout, f"{case}: {wrong}\n")
    write_line(sys.stdout, f"{dict(statuses)}; slowest {slowest[0]:.1f} s: {slowest[1]}")
    return failed


if __name__ == "__main__":
    recipes = [path for folder in (FOLDER, *sys.argv[3:]) for path in sorted(Path(folder).rglob("*.yaml"))]
    sys.exit(bool(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, recipes)))
