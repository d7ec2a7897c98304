"""Files of rows, and recipes over them: the exemplar with other sections, and maybe of another algorithm."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.recipe.load import load_config

EXEMPLAR = Path(__file__).parents[1] / "examples/configs/grpo_copy_cpu.yaml"


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return str(path)


def prompts(count: int, prompt: str = "{}>") -> list[dict[str, Any]]:
    return [{"input": prompt.format(number), "output": number} for number in range(count)]


def recipe_over(
    folder: Path,
    rows: list[Any] | None = None,
    algorithm: str = "grpo",
    section: dict[str, Any] | None = None,
    *,
    data: dict[str, Any] | None = None,
    **sections: Any,
) -> RunConfig:
    """Load a recipe without validations over a file of these rows; sections add to those of the exemplar."""
    tree = yaml.safe_load(EXEMPLAR.read_text())
    if rows is not None:
        train = {"data_path": write_rows(folder / "rows.jsonl", rows)}
        tree["data"] = {"dataset_name": "files", "train": train}
    elif data and "train" in data:
        tree["data"] = {}
    loop = {"val_period": 0, "val_at_end": False, **(section or {})}
    if algorithm != "grpo":
        del tree["grpo"], tree["loss_fn"]
        loop = {"max_num_steps": 5, **loop}
    for name, given in {"data": data or {}, algorithm: loop, **sections}.items():
        tree[name] = {**tree.get(name, {}), **given}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return load_config(folder / "recipe.yaml")
