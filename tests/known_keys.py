"""The keys of NeMo RL, as its recipes had them on a day, with values that they have there.

Made of recipes whose first line says of which commit they are, with `defaults:` resolved:

    python tests/known_keys.py RECIPE.yaml ... > nemo_rl_mcore/recipe/nemo_rl_keys.txt

Each key is to have a field of ours, another name here, or a judgement; a test names those that have none. Keys that
have one of the last two, and that these recipes leave out, stand below the others.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_mcore.config.base import Tree, join_path
from nemo_rl_mcore.recipe.of_nemo_rl import twin_in_policy
from nemo_rl_mcore.tools.migrate.judgements import BUFFER, JUDGEMENTS, RENAMED

_ORIGIN = re.compile(r"^# .* at (?P<commit>\w+) \((?P<date>[\d-]+)\)")
_OF_TORCH = ("policy.optimizer", "policy.scheduler", "teacher.optimizer", "teacher.scheduler")
"""Sections that hold the arguments of classes of PyTorch."""
_VALUES, _LENGTH = 3, 40


def known_keys_text(recipes: Iterable[Path]) -> str:
    """Return the list: each key with up to three values, a line each."""
    found: dict[str, list[str]] = {}
    origins = set[tuple[str, str]]()
    for path in sorted(recipes):
        text = path.read_text(encoding="utf-8")
        origin = _ORIGIN.match(text)
        if origin is None:
            raise ValueError(f"{path} does not say in its first line of which commit it is")
        origins.add((origin["commit"], origin["date"]))
        for key, value in _leaves(yaml.safe_load(text), ""):
            values = found.setdefault(key, [])
            if (shown := _shown(value)) not in values and len(values) < _VALUES:
                values.append(shown)
    if len(origins) != 1:
        raise ValueError(f"the recipes are of several commits: {sorted(origins)}")
    ((commit, date),) = origins
    own = {
        key: values
        for key, values in found.items()
        if (twin := twin_in_policy(key)) == key or twin not in found
    }
    above = {section for key in own for section in accumulate(key.split("."), join_path)}
    lines = (f"{key}: {' | '.join(values)}" for key, values in sorted(own.items()))
    known = sorted({*JUDGEMENTS, *RENAMED, BUFFER})
    others = (f"{key}:" for key in known if not above & {key, twin_in_policy(key)})
    head = f"# The keys of NVIDIA-NeMo/RL at {commit} ({date}), and values that they have there."
    return "\n".join([head, *lines, "# Keys of its other recipes.", *others, ""])


def _leaves(section: Tree, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in section.items():
        path = join_path(prefix, str(key))
        sections: list[Any] = value if isinstance(value, list) else [value]
        if value and all(isinstance(one, dict) for one in sections) and not path.endswith(_OF_TORCH):
            for one in sections:
                yield from _leaves(one, path)
        else:
            yield path, value


def _shown(value: object) -> str:
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=float("inf")).strip().removesuffix("...").strip()
    )
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


if __name__ == "__main__":
    sys.stdout.write(known_keys_text(Path(name) for name in sys.argv[1:]))
