"""The recipes of the suites, their scripts and the lists: names, pairs, short diffs, and that all of them load."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from test_suites.check_metrics import Metrics, holds

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.master import RUN_CONFIGS, DistillationMasterConfig
from nemo_rl_mcore.driver.run_folder import leaves
from nemo_rl_mcore.models.pretrained import pretrained_model
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.tools.check import preflight

pytestmark = pytest.mark.stage("docs")

REPO = Path(__file__).parents[3]
SUITES = REPO / "tests/test_suites"
RECIPES = sorted((REPO / "examples/configs/recipes/llm").rglob("*.yaml"))
SCRIPTS = sorted((SUITES / "llm").rglob("*.sh"))
SHORT_DIFFS = sorted(
    path
    for folder in ("recipes", "quickstart")
    for path in (REPO / "examples/configs" / folder).rglob("*.yaml")
)
EXAMPLES = sorted((REPO / "examples").rglob("*.yaml"))
LISTS = ("nightly.txt", "nightly_cpu.txt")
NAME = re.compile(
    rf"(?P<algorithm>{'|'.join(RUN_CONFIGS)})-(?P<subject>[a-z0-9.-]+)-(?P<nodes>\d+)n(?P<gpus>\d+)g"
    r"-(?P<strategy>[a-z0-9]+(-[a-z0-9]+)*?)(?P<fused>-fused)?(\.v\d+)?"
)

recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@cache
def config_of(stem: str) -> RunConfig:
    return load_config(REPO / f"examples/configs/recipes/llm/{stem}.yaml")


def listed(suite: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (SUITES / suite).read_text("utf-8").splitlines())
    return [line for line in lines if line]


def name_of(stem: str) -> dict[str, str | None]:
    match = NAME.fullmatch(stem)
    assert match, f"{stem} is not <algorithm>-<model or task>-<nodes>n<gpus>g-<strategy>[-fused][.vN]"
    return match.groupdict()


# Pairs and lists


def test_every_recipe_has_a_script_and_the_other_way_round():
    assert [path.stem for path in SCRIPTS] == [path.stem for path in RECIPES]


def test_every_script_is_in_exactly_one_nightly_list():
    entries = [entry for suite in LISTS for entry in listed(suite)]
    assert sorted(entries) == [str(path.relative_to(REPO)) for path in SCRIPTS]
    assert {path.name for path in SUITES.glob("*.txt")} == {*LISTS}


def test_the_lists_hold_what_the_suites_promise():
    stems = {suite: [Path(entry).stem for entry in listed(suite)] for suite in LISTS}
    assert {name_of(stem)["gpus"] for stem in stems["nightly_cpu.txt"]} == {"0"}
    assert "0" not in {name_of(stem)["gpus"] for stem in stems["nightly.txt"]}
    for suite in stems.values():
        assert {name_of(stem)["algorithm"] for stem in suite} == RUN_CONFIGS.keys()
    copies = [name_of(stem) for stem in stems["nightly_cpu.txt"] if stem.startswith("grpo-copy-")]
    assert sorted(bool(name["fused"]) for name in copies if name["strategy"] == "megatron") == [False, True]
    assert {"megatron-async-1off", "megatron-async-2off"} <= {name["strategy"] for name in copies}
    beside = {stem for stem in stems["nightly_cpu.txt"] if "-async-" in stem}
    assert {name_of(stem)["algorithm"] for stem in beside} == RUN_CONFIGS.keys() - {"sft"}


# Checks


@scripts
def test_each_check_of_a_script_can_be_asked(script):
    _, _, checks = script.read_text("utf-8").partition("check_metrics ")
    texts = re.findall(r"'([^']+)'", checks)
    assert texts
    assert all(holds(text, None) for text in texts)


def test_a_check_is_of_whole_and_finite_series(tmp_path):
    rows = [
        {"step": 0, "validation/accuracy": 0.125, "loss": 100.0},
        {"step": 1, "loss": 4.0, "nan": None, "gap": 1.0},
        {"step": 2, "loss": 2.5, "nan": 1.0},
        {"step": 3, "loss": 1.0, "nan": 1.0, "gap": 1.0, "validation/accuracy": 0.75},
    ]
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/metrics.jsonl").write_text('{"step": 7, "loss": 9.0}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Metrics(tmp_path, 3)
    for check in (
        'mean(data["loss"]) == 2.5', 'max(data["loss"], 0) == 100', 'min(data["loss"], -2, -1) == 2.5',
        'median(data["validation/accuracy"]) == data["validation/accuracy"]["3"] == 0.75',
        'mean(data["loss"], range_end=3) == 3.25', 'data["teacher/loss"]["7"] == 9',
    ):  # fmt: skip
        assert holds(check, data)
        assert not holds(check.replace("==", "!=", 1), data)
    for name in ("nan", "gap"):
        with pytest.raises(ValueError, match=name):
            holds(f'max(data["{name}"]) > 0', data)
    with pytest.raises(KeyError):
        holds('max(data["gone"]) > 0', data)
    with pytest.raises(NameError):
        holds('sum(data["loss"]) > 0', None)


# Recipes


@recipes
def test_a_name_says_what_the_recipe_is(recipe):
    name, config = name_of(recipe.stem), config_of(recipe.stem)
    assert config.algorithm == name["algorithm"]
    engines = config.policy.generation.colocated.resources  # of their own, on the same machine
    assert engines.num_nodes is None
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node + (engines.gpus_per_node or 0)) == (
        int(name["nodes"] or 0),
        int(name["gpus"] or 0),
    )
    assert config.policy.megatron_cfg.use_fused_linear_logprobs is bool(name["fused"])
    assert config.logger.log_dir == f"results/{recipe.stem}"
    if config.cluster.on_cpu:
        task = config.data.dataset_name if config.env.endpoint is None else "agents"
        assert name["subject"] == task.replace("_", "-")
    else:
        assert config.checkpointing.checkpoint_dir == f"results/{recipe.stem}/checkpoints"


def test_a_name_with_a_layout_has_it():
    (stem,) = [path.stem for path in RECIPES if "-tp2ep8" in path.stem]
    megatron = config_of(stem).policy.megatron_cfg
    assert (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size) == (2, 8)
    assert megatron.sequence_parallel


@recipes
def test_a_name_says_how_old_answers_may_be(recipe):
    """async-1off: one training step, and only such a recipe samples asynchronously."""
    config = config_of(recipe.stem)
    age = re.search(r"-async-(\d+)off\b", recipe.stem)
    assert config.asynchronous is bool(age)
    if age:
        assert config.max_age == int(age[1])


@pytest.mark.parametrize("recipe", SHORT_DIFFS, ids=lambda path: path.stem)
def test_a_recipe_holds_only_what_differs_from_its_parent(recipe):
    own = yaml.safe_load(recipe.read_text("utf-8"))
    parents = own.pop("defaults")
    below = OmegaConf.create()
    for parent in [parents] if isinstance(parents, str) else parents:
        below = OmegaConf.merge(below, read_recipe(recipe.parent / parent).tree)
    inherited = OmegaConf.to_container(below)
    values = dict(leaves(inherited))
    repeated = [path for path, value in leaves(own) if path in values and values[path] == value]
    # `section: null` drops a section of the parent.
    dropped = [key for key, value in own.items() if value is None and key not in inherited]
    assert (repeated, dropped) == ([], [])


@pytest.mark.parametrize("recipe", EXAMPLES, ids=lambda path: str(path.relative_to(REPO / "examples")))
def test_every_example_passes_check(monkeypatch, recipe):
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("HF_HOME", "/nonexistent")  # what a cache of the hub holds must not matter
    # Extras are those of the machine that runs the recipe.
    assert preflight(load_config(recipe), elsewhere=True).steps > 0


def test_the_teacher_has_the_architecture_of_its_weights():
    config = config_of("distillation-qwen3-8b-to-0.6b-1n8g-megatron-fused")
    assert isinstance(config, DistillationMasterConfig)
    assert config.teacher.model == pretrained_model("Qwen/Qwen3-8B")
    assert config.policy.model == pretrained_model("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    "path", sorted((REPO / "examples/configs").glob("*async*.yaml")), ids=lambda path: path.stem
)
def test_the_same_command_goes_on_with_an_asynchronous_example(path):
    config = load_config(path, ["logger.log_dir=results/mine"])
    assert config.checkpointing.enabled
    assert config.checkpointing.checkpoint_dir == "results/mine/checkpoints"
    assert config.checkpointing.save_period < config.loop.max_num_steps / 4
