import importlib
import json
import sys
from functools import cache, partial

import pytest
import yaml
from refusals import assert_holds, briefs

from nemo_rl_mcore.config import ConfigError
from nemo_rl_mcore.config.custom_code import handed
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import TeacherConfig
from nemo_rl_mcore.driver.parts import with_inputs
from nemo_rl_mcore.driver.run_folder import (
    cannot_resume,
    changes_of_answers,
    changes_since,
    read_recipe_of,
    recipe_text,
)
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.given_weights import load_recipe_of


def saved(folder, config):
    folder.mkdir()
    (folder / "config.yaml").write_text(recipe_text(config))
    return folder


def test_a_saved_recipe_loads_to_the_weights_beside_it(load, tmp_path):
    config = load("policy.megatron_cfg.optimizer.adam_eps=1e-8", "grpo.adv_estimator.normalize_rewards=true")
    folder = saved(tmp_path / "step_3", config)
    again = load_recipe_of(folder, ["cluster.cpu_workers_per_node=1"])
    assert again.policy.init_checkpoint == str(folder)
    assert again.cluster.world_size == 1
    policy = again.policy.model_copy(update={"init_checkpoint": None})
    assert again.model_copy(update={"policy": policy, "cluster": config.cluster}) == config


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["policy.model.hidden_size=32"], "policy.init_checkpoint: other-model"),
        (["+policy.model.num_moe_experts=4"], "policy.init_checkpoint: other-model"),
    ],
)
def test_a_start_from_another_architecture_is_refused(load, tmp_path, overrides, complaint):
    folder = saved(tmp_path / "step_3", load())
    preflight(load(f"+policy.init_checkpoint={folder}", "policy.model.init_method_std=0.5"))
    with pytest.raises(ConfigError) as refused:
        preflight(load(f"+policy.init_checkpoint={folder}", *overrides))
    assert complaint in briefs(refused.value.problems)


DOUBLED = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + number)}: &{chr(98 + number)} {{k: *{chr(97 + number)}, l: *{chr(97 + number)}}}\n"
    for number in range(24)
)


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"\xff", b"- a list", b"policy: {model: {num_layers: x}}", b"a: [", b"[" * 3_000),
        *(DOUBLED.encode(), b"defaults: elsewhere.yaml", b"a: !!python/object/apply:os.getcwd []"),
    ],
    ids=["none", "bytes", "list", "model", "cut", "deep", "doubled", "parent", "code"],
)
def test_a_start_from_what_is_no_checkpoint_is_refused(load, tmp_path, content):
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        preflight(load(f"+policy.init_checkpoint={tmp_path}"))
    (problem,) = refused.value.problems
    assert problem.path == "policy.init_checkpoint"
    assert problem.code in ("not-readable", "other-model")
    assert_holds(problem.remedy, "step_N")


def test_deadlines_change_nothing_of_a_run(load, tmp_path):
    folder = saved(tmp_path / "step_3", load())
    longer = load("++policy.call_timeout_s=3600")
    assert changes_since(read_recipe_of(folder), longer) == []


HF = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a Hugging Face folder `hf`."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(HF))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_that_ranks_open_are_absolute(load, here):
    """The ranks of a cluster run in another folder than the driver."""
    policy = load("~policy.model", "~policy.tokenizer", "+policy.model_name=hf").policy
    assert (policy.model_name, policy.tokenizer.name) == (f"{here}/hf", f"{here}/hf")
    of_python = PolicyConfig.model_validate({**policy.model_dump(), "model_name": "hf"})
    assert of_python.model_name == f"{here}/hf"
    assert load("+policy.init_checkpoint=results/step_1").policy.init_checkpoint == f"{here}/results/step_1"
    assert TeacherConfig(model_name="hf").model_name == f"{here}/hf"
    assert TeacherConfig(init_checkpoint="../step_1").init_checkpoint == f"{here}/../step_1"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "char"])
def test_a_name_stays_one(tree, here, name):
    (here / "char").mkdir()
    policy = PolicyConfig.model_validate({**tree["policy"], "tokenizer": {"name": name}})
    assert policy.tokenizer.name == name


def test_a_folder_that_was_saved_as_it_was_written_is_no_change(load, here):
    config = load("~policy.model", "~policy.tokenizer", "+policy.model_name=hf")
    folder = saved(here / "step_3", config)
    recipe = yaml.safe_load((folder / "config.yaml").read_text())
    recipe["policy"]["tokenizer"]["name"] = "hf"
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "tokenizer").mkdir()
    assert changes_since(read_recipe_of(folder), config) == []
    assert load_recipe_of(folder).policy.tokenizer.name == str(folder / "tokenizer")


FREEZE = "policy.megatron_cfg.freeze"


def test_keys_that_an_earlier_version_had_not_ran_as_their_defaults(load):
    recipe = yaml.safe_load(recipe_text(load()))
    for key in ("freeze", "freeze_moe_router", "model_class", "bias_activation_fusion"):
        del recipe["policy"]["megatron_cfg"][key]
    assert changes_since(recipe, load()) == []
    assert cannot_resume(recipe, load()) is None
    changed = load("policy.megatron_cfg.bias_activation_fusion=false")
    assert [one.path for one in changes_since(recipe, changed)] == [
        "policy.megatron_cfg.bias_activation_fusion"
    ]


@pytest.mark.parametrize("before", ["[]", "['*.mlp.*']"])
def test_a_run_does_not_resume_with_other_frozen_weights(load, before):
    """Its checkpoint has the optimizer's state of the weights that were trained."""
    recipe = yaml.safe_load(recipe_text(load(f"{FREEZE}={before}")))
    assert cannot_resume(recipe, load(f"{FREEZE}={before}")) is None
    refusal = cannot_resume(recipe, load(f"{FREEZE}=['model.norm.weight']"))
    assert refusal is not None
    assert_holds(refusal, FREEZE)


ROWS = "".join(f'{{"input": "{number}>", "output": "{number}"}}\n' for number in range(20))
OF_FILES = ["data.dataset_name=files", "++data.train={data_path: rows.jsonl}"]


def inputs_changed(before, after):
    """The keys that a run under `after` reports of one that was saved under `before`."""
    return [one.path for one in changes_since(yaml.safe_load(recipe_text(before)), after)]


@pytest.mark.parametrize(
    ("overrides", "changed", "key"),
    [
        (OF_FILES, "rows.jsonl", "data.train.data_path"),
        ([*OF_FILES, "data.train.data_path='rows*.jsonl'"], "rows.jsonl", "data.train.data_path"),
        ([*OF_FILES, "data.train.data_path=folder"], "folder/rows.jsonl", "data.train.data_path"),
        ([*OF_FILES, "+data.train.prompt_file=ask.txt"], "ask.txt", "data.train.prompt_file"),
        (["env.endpoint.command=[python, HERE/agent.py]"], "agent.py", "env.endpoint.command"),
    ],
    ids=["file", "pattern", "folder", "prompt file", "agent"],
)
def test_a_file_that_was_changed_under_the_same_name_is_reported(exemplar, here, overrides, changed, key):
    (here / "folder").mkdir()
    for name, text in {
        "rows.jsonl": ROWS,
        "folder/rows.jsonl": ROWS,
        "ask.txt": "{}",
        "agent.py": "",
    }.items():
        (here / name).write_text(text)
    recipe = exemplar.with_name("grpo_agents_cpu.yaml") if key.startswith("env") else exemplar
    config = load_config(recipe, [one.replace("HERE", str(here)) for one in overrides])
    before = with_inputs(config)
    assert inputs_changed(before, with_inputs(config)) == []
    (here / changed).write_text(f"{(here / changed).read_text().replace('7', '9')} ")
    assert inputs_changed(before, with_inputs(config)) == [key]
    assert inputs_changed(config, with_inputs(config)) == []  # saved by an earlier version


def test_a_change_in_a_large_file_is_seen_at_its_ends_and_in_its_length(load, here):
    file = here / "rows.jsonl"
    config = load(*OF_FILES)

    def digest(first, last, size):
        with file.open("wb") as sparse:
            sparse.write(first)
            sparse.seek(size - len(last))
            sparse.write(last)
        return with_inputs(config).input_digests["data.train.data_path"]

    size = (1 << 29) + 1
    assert len({digest(b"a", b"b", size), digest(b"a", b"b", size)}) == 1
    assert (
        len({digest(*given) for given in ((b"a", b"b", size), (b"c", b"b", size), (b"a", b"b", size + 1))})
        == 3
    )


def test_rows_that_were_moved_are_the_same(load, here):
    (here / "rows.jsonl").write_text(ROWS)
    before = with_inputs(load(*OF_FILES))
    (here / "rows.jsonl").rename(here / "moved.jsonl")
    assert inputs_changed(before, with_inputs(load(*OF_FILES, "data.train.data_path=moved.jsonl"))) == []


MODULE = """
import re
from own_helpers import strip

MOST, NUMBER = 3, re.compile(r"[0-9]+")


def short(text):
    return len(text) < MOST


def right(responses, answers):
    def one(response):
        return bool(NUMBER.search(strip(response)))

    return [float(short(one) and one(text)) for text in responses]


class Judge:
    most = 4

    def score(self, responses):
        return right(responses, [])


def unused():
    return 1
"""
HELPERS = "def strip(text):\n    return text.strip()\n"


@pytest.fixture
def code(load, here, monkeypatch):
    """Writes a module of rewards with one text in place of another, and gives the recipe of it."""
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(old="", new="", env="rewards={right: 'own_rewards:right'}"):
        for name, text in (("own_rewards", MODULE), ("own_helpers", HELPERS)):
            (here / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return with_inputs(load(f"++env.{env}"))

    return write


REWARD, JUDGE = "rewards={right: 'own_rewards:right'}", "custom={type: 'own_rewards:Judge'}"


@pytest.mark.parametrize(
    ("env", "old", "new", "seen"),
    [
        (REWARD, "", "", False),
        (REWARD, "float(short", "1 - float(short", True),
        (REWARD, "len(text) < MOST", "len(text) <= MOST", True),
        (REWARD, "MOST, NUMBER = 3", "MOST, NUMBER = 5", True),
        (REWARD, "[0-9]+", "[0-9]*", True),
        (REWARD, "text.strip()", "text.lower()", True),
        (REWARD, "return 1\n", "return 2\n", False),
        (REWARD, "import re\n", "import re\n\n\n", False),
        (JUDGE, "most = 4", "most = 5", True),
        (JUDGE, "answers):", "x):", True),
        (JUDGE, "< MOST", "> MOST", True),
    ],
)
def test_a_reward_is_its_source_and_all_that_it_calls(code, env, old, new, seen):
    key = "env.rewards.right" if env == REWARD else "env.custom.type"
    assert inputs_changed(code(env=env), code(old, new, env)) == ([key] if seen else [])


def of_scale(scale):
    def scaled(responses):
        return [scale] * len(responses)

    return scaled


def scored(responses, by):
    return [by] * len(responses)


class Scorer:
    def __init__(self, by):
        self.by = by

    def __call__(self, responses):
        return [self.by] * len(responses)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (of_scale(1.0), of_scale(2.0)),
        (partial(scored, by=1), partial(scored, by=2)),
        (Scorer(1), Scorer(2)),
        (Scorer(1).__call__, Scorer(2).__call__),
        (lambda responses: [1.0 for _ in responses], lambda responses: [2.0 for _ in responses]),
        (cache(of_scale(1.0)), cache(of_scale(2.0))),
    ],
)
def test_what_can_be_called_is_also_what_it_holds(load, before, after):
    config = load("++env.rewards={own: '__main__:own'}")

    def found(function):
        with handed({"__main__:own": function}):
            return with_inputs(config)

    assert inputs_changed(found(before), found(before)) == []
    assert inputs_changed(found(before), found(after)) == ["env.rewards.own"]


def test_what_scores_answers_is_a_change_of_the_answers(code, here):
    saved = yaml.safe_load(recipe_text(code()))
    changed = code("float(", "1 - float(")
    assert [one.path for one in changes_of_answers(saved, changed)] == ["env.rewards.right"]
