"""Keys of NeMo RL, what they do there and here: rows of migrations.yaml."""

from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from migrations import FOLDER, told
from refusals import briefs

from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import migrate, recipe_text

ROWS = yaml.safe_load(Path(__file__).with_name("migrations.yaml").read_text())
AS_TEXT = ("data.apply_chat_template=false", "data.special_tokens_in_content=text")
ASYNCHRONOUS = (
    "policy.generation.colocated.enabled=false",
    "loss_fn.use_importance_sampling_correction=true",
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.get("set") or row.get("theirs", ""))[:60])
def test_a_recipe_becomes_what_the_file_says(row, migrated, exemplar):
    if "set" in row:
        recipe = exemplar.with_name(row.get("recipe", exemplar.name))
        result = migrate(recipe, (*AS_TEXT, *row["set"], *ASYNCHRONOUS))
    else:
        base = row.get("base", "grpo_math_1B_megatron")
        result = migrated(yaml.safe_dump(row["theirs"]) if "theirs" in row else "", base)
    draft = result.draft
    ours = {path: value_at(draft.tree, path) for path in row.get("ours", {})}
    for path, value in ours.items():
        ours[path] = value.removeprefix(f"{FOLDER}/") if isinstance(value, str) else value
    assert ours == row.get("ours", {})
    assert {path: attrgetter(path)(result.config) for path in row.get("config", {})} == row.get("config", {})
    text = recipe_text(result, "theirs.yaml")
    for path, kinds in row.get("told", {}).items():
        assert [kind.name.lower() for kind in told(result, path)] == kinds
        assert not {"refused", "open"} & {*kinds} or not result.settled
        assert ("refused" in kinds) == (f"\n# Refused: {path}: " in text) == (path in draft.refused)
    assert {*row.get("dropped", ())} <= {*draft.dropped}
    assert {*row.get("problems", ())} <= {*briefs(result.problems)}
    assert row.get("only", (found := briefs(result.problems))) == found
    assert not row.get("settled") or result.settled
    if "quiet" in row:
        lost = (Kind.REFUSED, Kind.OPEN, Kind.WARNED)
        assert not [one for one in draft.notes if one.kind in lost and one.path.startswith(row["quiet"])]
