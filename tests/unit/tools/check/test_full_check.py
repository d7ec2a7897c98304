import json

import pytest
import yaml
from chat_tokenizer import VOCABULARY, save_chat_tokenizer

from nemo_rl_mcore import cli
from nemo_rl_mcore.driver.run_folder import leaves
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.render import resolved_lines

EXEMPLAR = "examples/configs/grpo_copy_cpu.yaml"
QUESTION = {"question": "2+2=", "answer": "two and two\n#### 4"}
LONG = {"question": "the sum of one and one is, as all know, ", "answer": "1+1\n#### 2"}


@pytest.fixture
def recipe(tmp_path, request):
    """A recipe on rows of GSM8K's schema, in characters, with a chat template."""

    def make(rows, algorithm="grpo", env=None, **data):
        tree = yaml.safe_load((request.config.rootpath / EXEMPLAR).read_text())
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        folder = save_chat_tokenizer(tmp_path / "tokenizer")
        tree["policy"] |= {"tokenizer": {"name": folder}, "max_total_sequence_length": 110}
        tree["policy"]["model"] |= {"vocab_size": VOCABULARY, "max_position_embeddings": 110}
        tree["policy"]["generation"]["max_new_tokens"] = 40
        tree["policy"] |= {"train_global_batch_size": 2, "train_micro_batch_size": 1}
        tree["data"] = {
            "dataset_name": "jsonl",
            "apply_chat_template": True,
            "train": {"data_path": str(file), "input_key": "question", "output_key": "answer"},
            **data,
        }
        tree["env"] = env or {"math": {"gold": {"after": "####"}}}
        quiet = {"max_num_steps": 5, "val_period": 0, "val_at_end": False}
        if algorithm == "grpo":
            tree["grpo"] |= quiet | {"num_prompts_per_step": 1, "num_generations_per_prompt": 2}
        else:
            del tree["grpo"], tree["loss_fn"]
            tree[algorithm] = quiet
        tree["data"]["train"]["split_validation_size"] = 0
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return str(tmp_path / "recipe.yaml")

    return make


def full(config, *overrides):
    return cli.main(["check", "--full", "--config", config, *overrides])


@pytest.mark.needs("math")
def test_the_longest_prompt_and_what_it_leaves(recipe, capsys):
    assert full(recipe([QUESTION, LONG, QUESTION])) == 0
    out = capsys.readouterr().out
    # 19 tokens of the template: two marks, two roles, their line feeds, the end of the turn
    assert "3 rows; median 23 tokens per prompt, at most 59" in out
    assert "the longest is" in out
    assert "rows.jsonl:2" in out
    assert "<turn>user" in out
    assert "earns 1, an empty response 0" in out
    assert "no more than an empty one" not in out


@pytest.mark.needs("math")
def test_rows_left_out_are_counted(recipe, capsys):
    config = recipe([QUESTION, LONG, QUESTION], overlong="drop", max_input_seq_length=50)
    assert full(config) == 0
    out = capsys.readouterr().out
    assert "2 rows; median 23 tokens per prompt, at most 23" in out
    assert "1 rows with too many tokens (data.overlong)" in out
    assert full(config, "data.overlong=error") == 2
    assert "rows.jsonl:2: the prompt has 59 tokens, and 50 are allowed" in capsys.readouterr().err


@pytest.mark.needs("math")
def test_a_template_that_fails_is_no_crash(recipe, capsys):
    assert full(recipe([QUESTION]), "++policy.tokenizer.chat_template='{{ 1/0 }}'") == 2
    assert "rows.jsonl:1: policy.tokenizer.chat_template: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"custom": {"type": "custom_parts:NotThere"}}, "env.custom.type: custom_parts:NotThere"),
        ({"custom": {"type": "custom_parts:OneScore"}}, "env.custom.type: custom_parts:OneScore returned 1 "),
    ],
)
def test_a_class_of_ones_own_is_imported_and_tried(recipe, capsys, env, said):
    config = recipe([QUESTION], env=env)
    # That a class is not there is seen without importing its module; what it does is not.
    assert cli.main(["check", "--config", config]) == (2 if "NotThere" in said else 0)
    capsys.readouterr()
    # What cannot be built is the recipe's problem; what comes of a call is what a run would stop at.
    assert full(config) == (2 if "NotThere" in said else 1)
    assert said in capsys.readouterr().err


REWARDS = """
import os

def right(responses, answers):
    return [float(one == other) for one, other in zip(responses, answers)]

def wide(responses):
    return [float(os.environ.get("CUDA_VISIBLE_DEVICES") == "" and "OWN" not in os.environ)] * len(responses)

def raises(responses):
    return [1 / 0 for _ in responses]

def nan(responses):
    return [float("nan")] * len(responses)

def none(responses):
    sorted(responses)

def short(responses):
    return [0.0]

def leaves(responses):
    os._exit(3)

def hangs(responses):
    while True:
        pass
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "rewards_here.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    def named(*names, **pool):
        return {"rewards": {name: f"rewards_here:{name}" for name in names}, "pool": pool}

    return named


def test_each_reward_function_is_called_where_a_run_calls_it(recipe, functions, capsys, monkeypatch):
    monkeypatch.setenv("OWN", "of the driver alone")
    assert full(recipe([QUESTION], env=functions("right", "wide"))) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "earns 2 (right 1, wide 1), an empty response 1 (right 0, wide 1)" in out


@pytest.mark.parametrize(
    ("name", "of_what"),
    [("raises", "ZeroDivisionError"), ("nan", "nan"), ("none", "None"), ("short", "1 rewards of 2")],
)
def test_what_a_reward_function_does_amiss_is_a_finding(recipe, functions, capsys, name, of_what):
    config = recipe([QUESTION], env=functions("right", name, size=0))
    assert cli.main(["check", "--config", config]) == 0
    assert full(config) == 1
    err = capsys.readouterr().err
    assert f"env.rewards.{name}: rewards_here:{name}" in err
    assert of_what in err


@pytest.mark.stage("processes")
@pytest.mark.parametrize(
    ("name", "said"),
    [("leaves", ["status 3"]), ("hangs", ["env.pool.timeout_s", "in hangs"])],  # the stack of the process
)
def test_a_reward_function_that_ends_its_process_or_hangs_is_a_finding(recipe, functions, capfd, name, said):
    assert full(recipe([QUESTION], env=functions(name, timeout_s=5.0))) == 1
    err = capfd.readouterr().err
    assert all(text in err for text in said)


def test_steps_of_ones_own_are_scored_too(recipe, capsys):
    def of(name):
        return recipe([QUESTION], env={"custom": {"type": f"custom_parts:{name}"}, "pool": {"size": 0}})

    assert full(of("Steps")) == 0
    assert "earns 18 (length 18), an empty response 0 (length 0)" in capsys.readouterr().out
    assert full(of("RaisingSteps")) == 1
    assert "env.custom.type: custom_parts:RaisingSteps.step" in capsys.readouterr().err


# check --resolved: every key, its value, and where it comes from


@pytest.fixture
def resolved(tmp_path, exemplar):
    def lines(text: str, *overrides: str, **parents: str) -> dict[str, str]:
        for name, parent in {**parents, "recipe": text}.items():
            (tmp_path / f"{name}.yaml").write_text(parent.format(exemplar=exemplar))
        recipe = tmp_path / "recipe.yaml"
        found = list(resolved_lines(load_config(recipe, overrides), recipe, overrides))
        return {
            line.partition(": ")[0]: line.partition(": ")[2].replace(f"{tmp_path}/", "") for line in found
        }

    return lines


def test_each_key_has_its_value_and_its_origin(resolved, exemplar):
    lines = resolved("defaults: {exemplar}\nseed: 7\n", "grpo.max_num_steps=3")
    assert lines["seed"] == "7  [recipe.yaml:2]"
    assert lines["grpo.max_num_steps"] == "3  [command line]"
    assert lines["grpo.max_rollout_turns"] == "1  [default]"
    assert lines["policy.precision"].startswith(f"float32  [{exemplar}:")
    assert lines["policy.generation.top_k"].startswith(f"null  [{exemplar}:")
    config = load_config(exemplar).model_dump(mode="json", exclude={"environment_values"})
    assert set(lines) == {path for path, _ in leaves(config)}


def test_what_the_parents_of_a_later_file_took_back_is_marked(resolved, exemplar):
    lines = resolved(
        "defaults: [mine.yaml, other.yaml]\nmax_consecutive_skips: 2\n",
        mine="defaults: {exemplar}\nseed: 7\npolicy: {{call_timeout_s: 9.0}}\nmax_consecutive_skips: 1\n",
        other="defaults: {exemplar}\n",
    )
    assert lines["seed"].startswith(f"42  [{exemplar}:")
    assert lines["seed"].endswith(", in place of 7 of mine.yaml:2]")
    assert lines["policy.call_timeout_s"] == "9.0  [mine.yaml:3]"  # which the other one's parent leaves alone
    assert lines["max_consecutive_skips"] == "2  [recipe.yaml:2]"  # over its own parents, as is meant


def test_values_of_the_environment_stay_references(resolved, monkeypatch):
    monkeypatch.setenv("RUN_TOKEN", "hunter2-hunter2")
    lines = resolved("defaults: {exemplar}\nlogger: {{log_dir: '${{oc.env:RUN_TOKEN}}'}}\n")
    assert "hunter2" not in str(lines)
    assert "oc.env:RUN_TOKEN" in lines["logger.log_dir"]


def test_the_command_prints_them(exemplar, capsys):
    assert cli.main(["check", "--resolved", "--config", str(exemplar), "seed=3"]) == 0
    assert "seed: 3  [command line]\n" in capsys.readouterr().out
