"""The file that a migration writes: its head, what it leaves out, comments of theirs, and files of prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.config.base import value_at
from nemo_rl_mcore.recipe.foreign.recognised import leaf_paths
from nemo_rl_mcore.recipe.load import compute, load_config
from nemo_rl_mcore.recipe.schema import fields
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.recipe.validate import validate
from nemo_rl_mcore.tools.migrate.draft import Kind
from nemo_rl_mcore.tools.migrate.migrate import Migrated, migrate
from nemo_rl_mcore.tools.migrate.writer import recipe_text

FOLDER = Path(__file__).parents[3] / "fixtures/nemo_rl"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def theirs(tmp_path: Path, changes: str, base: str = "grpo_math_1B_megatron") -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{changes}\n")
    return path


def head_of(text: str) -> list[str]:
    lines = text.splitlines()
    return lines[: lines.index("")]


def test_the_head_has_what_is_open_refused_and_changed(tmp_path):
    changes = "policy: {model_name: some/thing, megatron_cfg: {peft: {enabled: true}}}"
    migrated = migrate(theirs(tmp_path, changes))
    head = head_of(recipe_text(migrated, "theirs.yaml"))
    groups = [line.partition(":")[0].removeprefix("# ") for line in head if line.startswith("# ")]
    kinds = [Kind.OPEN, Kind.REFUSED, Kind.CHANGED]
    places = [groups.index(kind.value[:1].upper() + kind.value[1:]) for kind in kinds]
    assert places == sorted(places)
    told = " ".join(line.removeprefix("#").strip() for line in head)
    for note in migrated.draft.notes:
        assert note.kind not in kinds or note.path in told
    assert f"{len(migrated.draft.dropped)} keys at values that change nothing here" in told
    assert not any("grpo.val_start_at" in line for line in head), "neutral keys are counted"


def test_a_list_with_something_refused_in_it_is_written(tmp_path):
    changes = "data: {validation: [{dataset_name: DAPOMathAIME2024, nonsense: 16}, {dataset_name: DAPOMathAIME2024}]}"
    text = recipe_text(migrate(theirs(tmp_path, changes)), "theirs.yaml")
    assert value_at(yaml.safe_load(text), "data.validation") == [{"dataset_name": "DAPOMathAIME2024"}] * 2
    assert "    # nonsense: 16\n" in text


SOURCE = """
# Of the policy.
policy:
  # How many samples a step has:
  # a power of two.
  train_global_batch_size: 256  # not 128
  tokenizer: {}  # theirs
  megatron_cfg:  # of Megatron
    scheduler:
      lr_warmup_iters: 13  # of rollouts
    # Trained through adapters.
    peft: {enabled: true}
# No key of ours is here.
grpo:
  val_start_at: -1  # from the start
logger:

  # Far from its key.

  log_dir: "logs/#1"  # a number sign
"""


def test_comments_of_the_source_stay_where_their_key_does(tmp_path):
    text = recipe_text(migrate(theirs(tmp_path, SOURCE)), "theirs.yaml")
    lines = text.splitlines()
    place = lines.index("  train_global_batch_size: 256  # not 128")
    assert lines[place - 2 : place] == ["  # How many samples a step has:", "  # a power of two."]
    assert lines[lines.index("policy:") - 1] == "# Of the policy."
    assert "  megatron_cfg:  # of Megatron" in lines
    assert "      lr_warmup_iters: 26  # of rollouts" in lines
    assert lines[lines.index("    # Trained through adapters.") + 1].startswith(
        "    # Refused, policy.megatron"
    )
    assert "  log_dir: logs/#1  # a number sign" in lines
    assert "from the start" not in text
    assert "Far from" not in text
    assert yaml.safe_load(text)["logger"]["log_dir"] == "logs/#1"


def test_what_another_key_says_is_left_out_and_stays_where_it_says_something_else():
    def written(changes):
        return value_at(yaml.safe_load(recipe_text(migrated_with(changes), "theirs.yaml")), "policy")

    same = written([])
    assert same["megatron_cfg"].keys().isdisjoint({"pipeline_dtype"})
    assert same["megatron_cfg"]["optimizer"].keys().isdisjoint({"bf16", "clip_grad"})
    assert "vllm_cfg" not in same["generation"]
    other = written(
        ["policy.generation.vllm_cfg.precision=float32", "policy.generation.vllm_cfg.max_model_len=700"]
    )
    assert other["generation"]["vllm_cfg"] == {"precision": "float32", "max_model_len": 700}


def migrated_with(overrides):
    return migrate(FOLDER / "grpo_math_1B_megatron.yaml", overrides)


def test_the_strongest_file_has_the_comment(tmp_path):
    (tmp_path / "base.yaml").write_text(f"defaults: {FOLDER}/grpo_math_1B_megatron.yaml\n# Old.\nseed: 3\n")
    path = tmp_path / "theirs.yaml"
    path.write_text("defaults: base.yaml\nseed: 4  # new\n")
    text = recipe_text(migrate(path), "theirs.yaml")
    assert "\n# Old.\n" not in text
    assert "\nseed: 4  # new\n" in text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_out_is_our_default(name, tmp_path):
    migrated = migrate(FOLDER / f"{name}.yaml")
    whole, short = validate(migrated.draft.tree), validate(resolved(recipe_text(migrated, name), tmp_path))
    assert short.problems == whole.problems
    assert short.config == whole.config
    if short.config is not None:
        assert not [*silent_differences(migrated, short.config.plain())]
    if name == "grpo_math_1B_megatron":
        written = [*leaf_paths(yaml.safe_load(recipe_text(migrated, name)))]
        assert len(written) < len([*leaf_paths(migrated.draft.tree)]) / 2


def silent_differences(migrated: Migrated, ours: dict[str, Any]) -> Iterator[str]:
    """Yield each key of theirs whose value is another one in the run, and of which nothing was said.

    A section that is null or empty has defaults, of which it says nothing.
    """
    draft, theirs = migrated.draft, migrated.read.tree
    said = (*(note.path for note in draft.notes), *draft.refused, *draft.dropped)
    moved = {source: target for target, source in draft.origins.items()}
    for path in leaf_paths(theirs):
        value, own = value_at(theirs, path), value_at(ours, moved.get(path, path))
        is_said = any(path == other or path.startswith(f"{other}.") for other in said)
        of_a_set = path.startswith(("data.train", "data.validation"))  # completed by what is known of it
        if (
            own != value
            and not is_said
            and not of_a_set
            and not (value in ({}, None) and (not own or isinstance(own, dict)))
        ):
            yield f"{path}: {value} there, and {own} here"


def resolved(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "ours.yaml"
    path.write_text(text)
    return compute(read_recipe(path), ()).tree


def test_a_key_stays_for_which_another_would_stand_in(tmp_path):
    """logprob_batch_size has its default, and left out it would be train_micro_batch_size; the others are left out."""
    default = fields()["policy.logprob_batch_size"].default
    budget = "{logprob_mb_tokens: 2048}"  # theirs refers to logprob_batch_size, which then stays for that
    changes = f"""
policy:
  train_micro_batch_size: {2 * default}
  logprob_batch_size: {default}
  offload: none
  sequence_packing: {budget}
  dynamic_batching: {budget}
grpo: {{max_num_epochs: 1}}"""
    migrated = migrate(theirs(tmp_path, changes))
    config = validate(resolved(recipe_text(migrated, "x"), tmp_path)).config
    assert config is not None
    assert config.policy.logprob_batch_size == default
    written = yaml.safe_load(recipe_text(migrated, "x"))
    assert value_at(written, "policy.logprob_batch_size") == default
    assert value_at(written, "grpo.max_num_epochs") is value_at(written, "policy.offload") is None


def test_a_file_of_prompts_is_copied_next_to_the_recipe(tmp_path, monkeypatch):
    """It is found above the recipe, as in NeMo RL's repository, or where the command starts."""
    repository, ours = tmp_path / "theirs", tmp_path / "ours"
    folder = repository / "examples/configs/recipes"
    for path in (folder, repository / "examples/prompts", ours):
        path.mkdir(parents=True)
    recipe = theirs(folder, "data: {default: {prompt_file: examples/prompts/own.txt}}")
    prompt = repository / "examples/prompts/own.txt"
    assert main(["migrate", str(recipe), "--output", str(ours / "none.yaml")]) == 2, "there is no such file"
    prompt.write_text("Mine: {}")
    for name, status in (("a.yaml", 0), ("b.yaml", 0)):
        assert main(["migrate", str(recipe), "--output", str(ours / name)]) == status
    assert (ours / "own.txt").read_text() == "Mine: {}"
    prompt.write_text("Another: {}")
    monkeypatch.chdir(repository)
    assert main(["migrate", str(recipe), "--output", str(ours / "c.yaml")]) == 0
    assert (ours / "own.txt").read_text() == "Mine: {}"
    assert (ours / "c_own.txt").read_text() == "Another: {}"
    named = [
        value_at(yaml.safe_load((ours / f"{x}.yaml").read_text()), "data.default.prompt_file") for x in "abc"
    ]
    assert named == ["own.txt", "own.txt", "c_own.txt"]
    source = load_config(ours / "c.yaml").data.default
    assert source is not None
    assert source.prompt_file == str(ours / "c_own.txt")


def test_what_check_says_of_files_is_left_open(tmp_path, capsys):
    """A prompt file without a place for the prompt is no mistake of a key, and `check` refuses it."""
    (tmp_path / "wrong.txt").write_text("no place")
    recipe = theirs(tmp_path, "data: {default: {prompt_file: wrong.txt}}")
    ours = tmp_path / "out/ours.yaml"
    ours.parent.mkdir()
    assert main(["migrate", str(recipe), "--output", str(ours)]) == 2
    assert any("prompt_file: " in line for line in head_of(ours.read_text()))
    assert main(["check", "--config", str(ours)]) == 2
