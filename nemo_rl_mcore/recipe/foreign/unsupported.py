"""NeMo RL keys that this package knows and does not implement.

An entry of the table says which values are neutral (they change nothing), and what to do about any other one. A
migration drops neutral keys. Others are refused, or, where they cost speed or memory and nothing else, dropped with a
line in the report. So a recipe moves over, and nothing it asks for is lost silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from nemo_rl_mcore.config.base import Problem, Tree, join_path
from nemo_rl_mcore.recipe.foreign.judgement import Judgement, shown
from nemo_rl_mcore.recipe.foreign.of_policy import OF_POLICY
from nemo_rl_mcore.recipe.foreign.of_runs import OF_RUNS

UNSUPPORTED: Mapping[str, Judgement] = {**OF_POLICY, **OF_RUNS}


@dataclass
class Screened:
    """What is left of a recipe for the strict models, and what was said of the rest.

    dropped: the paths of keys at a neutral value.
    """

    kept: Tree = field(default_factory=Tree)
    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[Problem] = field(default_factory=list[Problem])
    dropped: list[str] = field(default_factory=list[str])

    def judge(self, path: str, value: object, section: Tree, recipe: Tree, judged_as: str = "") -> bool:
        """Sort a key out by the table, in which it may stand as another one; False for one that is not in it."""
        known = UNSUPPORTED.get(judged_as or path)
        if known is None:
            return False
        if known.accepts(value, section, recipe):
            self.dropped.append(path)
        elif known.warns:
            self.warnings.append(
                Problem("has-no-effect", path, f"{shown(value)} has no effect here", known.remedy)
            )
        else:
            self.problems.append(
                Problem("not-supported", path, f"{shown(value)} is not supported", known.remedy)
            )
        return True


def screen(tree: Tree) -> Screened:
    """Split a recipe into what is left for the strict models, and what is said of known but unsupported keys."""
    result = Screened()
    result.kept = _screen(tree, "", tree, result)
    return result


def _screen(section: Tree, prefix: str, recipe: Tree, result: Screened, written: str = "") -> Tree:
    """`prefix` leads to the section in the table, and `written` in the recipe: with the places of lists."""
    kept: Tree = {}
    for key, value in section.items():
        path, place = join_path(prefix, str(key)), join_path(written, str(key))
        if result.judge(place, value, section, recipe, path):
            continue
        if isinstance(value, dict):
            kept[key] = _screen(cast("Tree", value), path, recipe, result, place)
        elif isinstance(value, list):
            kept[key] = [
                _screen(cast("Tree", one), path, recipe, result, join_path(place, str(number)))
                if isinstance(one, dict)
                else one
                for number, one in enumerate(cast("list[object]", value))
            ]
        else:
            kept[key] = value
    return kept
