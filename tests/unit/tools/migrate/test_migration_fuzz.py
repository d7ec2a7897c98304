"""Any recipe of NeMo RL, with keys of other types, null, out of range or left out, ends in a file or in a refusal."""

import contextlib
import io
import random
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrations import FOLDER

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.recipe.of_nemo_rl import listed_keys

BASES = sorted(FOLDER.glob("*.yaml"))
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
    base: Path
    changes: dict[str, Any]

    def __str__(self) -> str:
        said = {path: "left out" if value is LEFT_OUT else value for path, value in self.changes.items()}
        return f"{self.base.stem} with {str(said)[:300]}"


def cases(number: int, seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    others = sorted(listed_keys())
    trees = {base: yaml.safe_load(base.read_text()) for base in BASES}
    for _ in range(number):
        base = draw.choice(BASES)
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


def wrong_with(case: Case, folder: Path) -> str:
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


FOUND = {
    "a number for megatron_cfg": {"policy.megatron_cfg": 1e300},
    "text for a section that a key moves to": {"env.pool": "text", "env.math.num_workers": 3},
    "no rate of torch": {"policy.dtensor_cfg.enabled": True, "policy.optimizer.kwargs.lr": None},
    "more samples than can be counted": {
        "grpo.num_prompts_per_step": 10**30,
        "policy.train_global_batch_size": 7,
    },
    "a number for a schedule of torch": {"policy.dtensor_cfg.enabled": True, "policy.scheduler": 1e300},
    "a schedule of texts": {"policy.dtensor_cfg.enabled": True, "policy.scheduler": ["a", {"kwargs": 3}]},
    "no policy.generation": {"policy.generation": LEFT_OUT},
}
"""What ended in a traceback or took minutes once."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "examples").symlink_to(FOLDER / "examples")
    return tmp_path


@pytest.mark.parametrize("changes", FOUND.values(), ids=FOUND)
def test_what_a_search_has_found(folder, changes):
    assert wrong_with(Case(FOLDER / "grpo_math_1B_megatron.yaml", changes), folder) == ""


@pytest.mark.parametrize("case", [*cases(5, 31)])
def test_a_few_recipes(folder, case):
    assert wrong_with(case, folder) == ""


@pytest.mark.exhaustive
def test_more_recipes(folder):
    wrong = {str(case): wrong_with(case, folder) for case in cases(100, 32)}
    assert not {case: what for case, what in wrong.items() if what}
