"""Every key of a recipe with its value and where it comes from, as `check --resolved` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from nemo_rl_mcore.config.base import join_path
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.output import visible
from nemo_rl_mcore.driver.saved_run import leaves
from nemo_rl_mcore.recipe.environment_values import without_values
from nemo_rl_mcore.recipe.load import compute
from nemo_rl_mcore.recipe.sources import COMMAND_LINE, origins, read_recipe, taken_back


def resolved_lines(config: RunConfig, recipe: str | Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield "key: value  [file:line]" of each key, or [command line] or [default]; references stay references.

    A value that another file's parents took back is named after it.
    """
    read = read_recipe(recipe)
    lost = taken_back(read)
    overridden = set(compute(read, overrides).overridden)
    written = {key: origin.where for key, origin in origins(read.files).items()}
    for path, value in leaves(config.model_dump(mode="json", exclude={"environment_values"})):
        above = set(accumulate(path.split("."), join_path))
        where = COMMAND_LINE if above & overridden else written.get(path, "default")
        text = visible(without_values(_as_yaml(value), config.references, path))
        took = lost.get(path) if where == written.get(path) else None
        yield f"{path}: {text}  [{where}{f', in place of {took.text} of {took.where}' if took else ''}]"


def _as_yaml(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
