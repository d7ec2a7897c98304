"""A rehearsed run in JSON, so that another machine can run the same and compare its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config.base import Tree, value_at
from nemo_rl_mcore.recipe.shipped import SHIPPED
from nemo_rl_mcore.tools.check.given_weights import ONE_RANK
from nemo_rl_mcore.tools.rehearse.ran import Ran
from nemo_rl_mcore.tools.rehearse.shrink import put

_FOLDER, _SHIPPED = "@folder@", "@package@"


def packed(ran: Ran) -> Tree:
    """Return the shrunk recipe on one rank, the rows that were made for it, and the metrics of its steps."""
    tree = json.loads(json.dumps(ran.tree, default=str))
    for path, value in ONE_RANK.items():
        put(tree, path, value)
    put(tree, "checkpointing", {"enabled": False})
    text = json.dumps(tree).replace(str(ran.folder), _FOLDER).replace(str(SHIPPED), _SHIPPED)
    return {
        "algorithm": ran.config.algorithm,
        "recipe": json.loads(text),
        "files": {file.name: file.read_text(encoding="utf-8") for file in ran.folder.glob("*.jsonl")},
        "steps": [dict(row) for row in ran.rows],
    }


def unpacked(run: Mapping[str, Any], folder: Path) -> Path:
    """Write the recipe of a packed run and its rows into a folder, and return the file of the recipe.

    Raises ValueError for a run with a teacher, whose weights are not in it.
    """
    if value_at(run["recipe"], "teacher") is not None:
        raise ValueError("the weights of its teacher were made for the rehearsal, and are not in its JSON")
    for name, text in run["files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    written = json.dumps(run["recipe"]).replace(_FOLDER, str(folder)).replace(_SHIPPED, str(SHIPPED))
    recipe.write_text(written + "\n", encoding="utf-8")
    return recipe
