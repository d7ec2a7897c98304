import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from refusals import briefs

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.models.config_json import hf_config_of
from nemo_rl_mcore.models.pretrained import MODEL, TOKENIZER
from nemo_rl_mcore.recipe.interpolations import value_now
from nemo_rl_mcore.recipe.load import load_config, load_with_warnings

QUICKSTART = Path(__file__).parents[3] / "examples/configs/quickstart/sft_cpu.yaml"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line"), [("policy:\n\tseed: 1\n", 2), ("policy:\n  a: 1\n \tb: 1\n", 3), ("seed: 1\n\t\n", 2)]
)
def test_a_tab_is_called_one(tmp_path, text, line):
    (tmp_path / "tab.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "tab.yaml")
    [problem] = caught.value.problems
    assert problem.code == "not-readable"
    assert f"line {line}," in problem.what
    assert "a tab" in problem.what
    assert "\\t" not in problem.what


def test_defaults_may_be_relative_absolute_and_a_list_whose_last_entry_wins(tmp_path, exemplar):
    (tmp_path / "parents").mkdir()
    write(tmp_path, "parents/one.yaml", f"defaults: {exemplar}\nseed: 1\nmax_consecutive_skips: 1\n")
    write(tmp_path, "parents/two.yaml", "seed: 2\nlogger:\n  log_dir: two\n")
    child = write(
        tmp_path, "child.yaml", "defaults: [parents/one.yaml, parents/two.yaml]\nlogger: {log_dir: child}\n"
    )
    config = load_config(child)
    assert (config.seed, config.max_consecutive_skips, config.logger.log_dir) == (2, 1, "child")
    assert config.logger.tensorboard_enabled is True


def test_one_parent_may_be_reached_twice(tmp_path, exemplar):
    write(tmp_path, "left.yaml", f"defaults: {exemplar}\nseed: 1\n")
    write(tmp_path, "right.yaml", f"defaults: {exemplar}\nmax_consecutive_skips: 9\n")
    child = write(tmp_path, "child.yaml", "defaults:\n  - left.yaml\n  - right.yaml\n")
    assert load_config(child).max_consecutive_skips == 9


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "{0}/a.yaml: not-found"),
        ({"a.yaml": "defaults: b.yaml"}, "{0}/a.yaml -> {0}/b.yaml: not-found"),
        (
            {"a.yaml": "defaults: b.yaml", "b.yaml": "defaults: a.yaml"},
            "{0}/a.yaml -> {0}/b.yaml -> {0}/a.yaml: reference",
        ),
        ({"a.yaml": "defaults: {b: 1}"}, "{0}/a.yaml: not-allowed"),
        ({"a.yaml": "defaults: [1]"}, "{0}/a.yaml: not-allowed"),
        ({"a.yaml": "- 1\n- 2\n"}, "{0}/a.yaml: wrong-kind"),
        ({"a.yaml": "seed: [1\n"}, "{0}/a.yaml: not-readable"),
        ({"a.yaml": "seed: 1\nseed: 2\n"}, "{0}/a.yaml: not-readable"),
        ({"a.yaml": "grpo: ${mul:2\n"}, "{0}/a.yaml: not-readable"),
    ],
)
def test_broken_files_name_the_chain(tmp_path, files, expected):
    for name, text in files.items():
        write(tmp_path, name, text)
    assert briefs(error_of(tmp_path / "a.yaml").problems) == [expected.format(tmp_path)]


def test_resolvers_compute_and_keep_integers(tmp_path, exemplar):
    recipe = write(
        tmp_path,
        "child.yaml",
        f"defaults: {exemplar}\n"
        "max_consecutive_skips: ${max:3,${add:2,4}}\n"
        "policy:\n"
        "  train_global_batch_size: ${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}\n"
        "  train_micro_batch_size: ${div:${policy.train_global_batch_size},4}\n"
        "  megatron_cfg: {optimizer: {lr: '${div:1,1000}'}}\n",
    )
    config = load_config(recipe)
    assert config.max_consecutive_skips == 6
    assert (config.policy.train_global_batch_size, config.policy.train_micro_batch_size) == (256, 64)
    assert config.policy.megatron_cfg.optimizer.lr == 0.001


@pytest.fixture
def own_resolvers():
    """Register a program's own resolvers under the names of ours."""
    names = ("add", "mul", "div", "max", "oc.env")
    for name in names:
        OmegaConf.register_new_resolver(name, lambda *_given: "their own", replace=True)
    yield names
    OmegaConf.clear_resolvers()


def test_a_program_keeps_its_own_resolvers(tmp_path, exemplar, own_resolvers, monkeypatch):
    monkeypatch.setenv("FOLDER", "of_the_environment")
    recipe = write(
        tmp_path,
        "child.yaml",
        f"defaults: {exemplar}\n"
        "max_consecutive_skips: '${max:3,${ add : 2,4}}'\n"
        "grpo: {max_num_steps: '${div:${mul:2,6},3}'}\n"
        "logger: {log_dir: '${oc.env:FOLDER}/\\${add:1,2}'}\n",
    )
    for _ in range(2):
        config = load_config(recipe)
        assert (config.max_consecutive_skips, config.loop.max_num_steps) == (6, 4)
        assert config.logger.log_dir == "of_the_environment/${add:1,2}"
        assert value_now("${oc.env:FOLDER}") == "of_the_environment"
        theirs = [OmegaConf.create({"value": f"${{{name}:1,2}}"})["value"] for name in own_resolvers]
        assert set(theirs) == {"their own"}
        OmegaConf.clear_resolver("add")
        OmegaConf.register_new_resolver("add", lambda *_given: "their own")


def test_messages_have_interpolations_as_they_are_written(tmp_path, exemplar):
    recipe = write(tmp_path, "child.yaml", f"defaults: {exemplar}\nseed: ${{div:1,0}}\n")
    assert "${div:1,0}" in str(error_of(recipe))


def test_a_resolver_whose_name_is_computed_is_refused(tmp_path, exemplar):
    """What it gives could be of the environment, and is not known to be."""
    lines = "logger: {wandb: {name: env}, log_dir: '${oc.${logger.wandb.name}:HOME}'}\n"
    recipe = write(tmp_path, "child.yaml", f"defaults: {exemplar}\n{lines}")
    assert briefs(error_of(recipe).problems) == ["logger.log_dir: reference"]


def test_interpolations_see_overrides(tmp_path, exemplar):
    recipe = write(tmp_path, "child.yaml", f"defaults: {exemplar}\nmax_consecutive_skips: ${{seed}}\n")
    assert load_config(recipe, ["seed=9"]).max_consecutive_skips == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: ${nowhere.at_all}", "seed: reference"),
        ("seed: ${square:2}", "seed: reference"),
        ("seed: ${div:1,0}", "seed: reference"),
        ("grpo:\n  seed: ???\n  max_num_epochs: ???", "grpo.max_num_epochs: missing; grpo.seed: missing"),
        ("seed: ${logger.log_dir}\nlogger:\n  log_dir: ${seed}", "seed: reference"),
    ],
)
def test_values_that_cannot_be_computed(tmp_path, exemplar, line, message):
    recipe = write(tmp_path, "child.yaml", f"defaults: {exemplar}\n{line}\n")
    told = briefs(error_of(recipe).problems)
    assert sorted(told[: message.count(";") + 1]) == message.split("; ")


def test_keys_that_are_not_text_are_unknown_keys(tmp_path, exemplar):
    recipe = write(tmp_path, "child.yaml", f"defaults: {exemplar}\n1: x\ngrpo:\n  true: y\n")
    problems = error_of(recipe).problems
    assert sorted(briefs(problems)) == ["1: unknown-key", "grpo.True: unknown-key"]


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("policy.megatron_cfg.optimizer.lr=1e-4", "policy.megatron_cfg.optimizer.lr", 1e-4),
        ("policy.megatron_cfg.optimizer.lr='2e-4'", "policy.megatron_cfg.optimizer.lr", 2e-4),
        ("data.max_input_seq_length=4", "data.max_input_seq_length", 4),
        ("++grpo.max_num_steps=3", "grpo.max_num_steps", 3),
        ("~loss_fn.entropy_coef", "loss_fn.entropy_coef", 0.0),
        ("~loss_fn.entropy_coef=0.02", "loss_fn.entropy_coef", 0.0),
        ("~loss_fn", "loss_fn.ratio_clip_max", 0.2),
        ("seed=${grpo.num_prompts_per_step}", "seed", 16),
        ("logger.log_dir='a b'", "logger.log_dir", "a b"),
        ("policy.generation.stop_token_ids=[3,4]", "policy.generation.stop_token_ids", (3, 4)),
        ("logger.wandb={project: p, name: null}", "logger.wandb.project", "p"),
    ],
)
def test_overrides(load, override, path, expected):
    value = load(override)
    for key in path.split("."):
        value = getattr(value, key)
    assert value == expected


def test_where_a_value_was_set_is_shown(tmp_path, exemplar):
    child = write(tmp_path, "child.yaml", f"defaults: {exemplar}\n\nseed: x\n")
    problems = {
        problem.path: problem.where for problem in error_of(child, "max_consecutive_skips=y").problems
    }
    assert problems == {"seed": f"{child}:3", "max_consecutive_skips": "command line"}


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("+polcy.x=1", "polcy"),
        ("+policy.draft.enabled=true", "policy.draft.enabled"),
        ("+policy.draft={enabled: true}", "policy.draft.enabled"),
        ("logger.wandb={project: 3}", "logger.wandb.project"),
        ("~policy.model", "policy.model"),
    ],
)
def test_a_problem_above_or_below_an_overridden_key_comes_from_the_command_line(exemplar, override, path):
    problems = error_of(exemplar, override).problems
    assert {problem.path: problem.where for problem in problems}[path] == "command line"


def test_an_override_does_not_claim_its_neighbours(tmp_path, exemplar):
    child = write(tmp_path, "child.yaml", f"defaults: {exemplar}\ngrpo: {{seed: x}}\n")
    (problem,) = error_of(child, "grpo.max_num_steps=3").problems
    assert problem.where == f"{child}:2"


def model_folder(folder: Path, template: str | None = None) -> str:
    """A model of the quick start's architecture, with a tokenizer if it gets a chat template."""
    shutil.copytree(QUICKSTART.parent / "tokenizer", folder)
    if template is None:
        for file in folder.iterdir():
            file.unlink()
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps(hf_config_of(load_config(QUICKSTART).policy.model)))
    return str(folder)


def loaded_with(folder: Path, text: str, *overrides: str) -> tuple[set[str], set[str]]:
    """The paths of problems and of warnings that are about the tokenizer."""
    path = write(folder, "mine.yaml", text)
    try:
        _, warnings = load_with_warnings(path, overrides)
    except ConfigError as error:
        return {problem.path for problem in error.problems}, set()
    return set(), {warning.path for warning in warnings}


def test_a_parents_tokenizer_does_not_stay_with_another_model(tmp_path):
    model = model_folder(tmp_path / "model", "{{ messages }}")
    below = f"defaults: {QUICKSTART}\npolicy:\n  model: null\n  model_name: {model}\n"
    assert loaded_with(tmp_path, below) == ({TOKENIZER}, set())
    assert loaded_with(tmp_path, f"{below}  tokenizer: {{name: {model}}}\n") == (set(), set())


@pytest.mark.parametrize(
    ("tokenizer", "override"), [("  tokenizer: {name: char}\n", ""), ("", f"{TOKENIZER}=char"), ("", MODEL)]
)
def test_a_tokenizer_that_was_chosen_with_the_model_is_a_line_in_check(tmp_path, tokenizer, override):
    model = model_folder(tmp_path / "model", "{{ messages }}")
    named = f"  model_name: {model}\n" if override != MODEL else ""
    text = f"defaults: {QUICKSTART}\npolicy:\n  model: null\n{named}{tokenizer}"
    overrides = [f"{MODEL}={model}" if override == MODEL else override] if override else []
    overrides += ["data.apply_chat_template=false"] if "char" in tokenizer + override else []
    assert loaded_with(tmp_path, text, *overrides) == (set(), {TOKENIZER})


@pytest.mark.parametrize(
    "template", [None, (QUICKSTART.parent / "tokenizer/chat_template.jinja").read_text()]
)
def test_a_model_with_the_same_tokenizer_or_with_none_takes_the_parents(tmp_path, template):
    model = model_folder(tmp_path / "model", template)
    text = f"defaults: {QUICKSTART}\npolicy:\n  model: null\n  model_name: {model}\n"
    assert loaded_with(tmp_path, text) == (set(), set())
