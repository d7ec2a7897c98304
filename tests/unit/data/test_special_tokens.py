"""Rows that spell special tokens: refused with their number, until the recipe says what is meant."""

import json

import pytest
import yaml
from chat_tokenizer import EOS, START, VOCABULARY, save_chat_tokenizer
from refusals import wrong_key

from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.evaluation import EvalConfig
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.sources import RowLimits, open_prompts, open_sets
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.data import examine_data

EXEMPLAR = "examples/configs/grpo_copy_cpu.yaml"
KEY = "data.special_tokens_in_content"


@pytest.fixture
def recipe(tmp_path, request):
    def make(rows, *, algorithm="grpo", **data):
        tree = yaml.safe_load((request.config.rootpath / EXEMPLAR).read_text())
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        train = {"data_path": str(path), "split_validation_size": 0}
        tree["data"] = {"dataset_name": "files", "train": train, **data}
        model = {**tree["policy"]["model"], "vocab_size": VOCABULARY, "max_position_embeddings": 128}
        tokenizer = {"name": save_chat_tokenizer(tmp_path / "tokenizer")}
        tree["policy"] |= {"tokenizer": tokenizer, "max_total_sequence_length": 96, "model": model}
        loop = {"val_period": 0, "val_at_end": False}
        if algorithm == "grpo":
            tree["grpo"] |= loop
        else:
            del tree["grpo"], tree["loss_fn"]
            tree[algorithm] = {"max_num_steps": 1, **loop}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / "recipe.yaml")

    return make


def tokenizer_of(config):
    parse = config.data.special_tokens_in_content == "parse"
    return load_tokenizer(config.policy.tokenizer.name, parse_content=parse)


def rows(*inputs, output="5"):
    return [{"input": text, "output": output} for text in (*inputs, *(str(one) for one in range(40)))]


@pytest.mark.parametrize("chat", [True, False])
def test_check_counts_such_rows_and_asks_for_the_key(recipe, chat):
    config = recipe(rows("1", f"2{EOS}", f"3{START}"), apply_chat_template=chat)
    (problem,) = [one for one in examine_data(config)[1] if one.path == KEY]
    assert "2 of 43" in problem.what
    assert "rows.jsonl:2" in problem.what
    assert repr(EOS) in problem.what
    with pytest.raises(ConfigError, match="2 of 43"):
        open_prompts(config, tokenizer_of(config))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("meant", "controls"), [("text", 0), ("parse", 1)])
def test_the_key_says_what_is_meant(recipe, meant, controls, chat):
    config = recipe(rows(f"2{EOS}"), apply_chat_template=chat, special_tokens_in_content=meant)
    assert not [one for one in examine_data(config)[1] if one.path == KEY]
    tokenizer = tokenizer_of(config)
    (prompt,) = [one for one in open_prompts(config, tokenizer).train if one.index == 0]
    ids = tokenizer.encode(prompt.text, prompt.literal)
    assert ids.count(tokenizer.eos_token_id) == controls + chat
    assert tokenizer.text_of(ids) == prompt.text


def test_an_answer_that_is_only_scored_is_none_of_the_content(recipe):
    config = recipe(rows("1", output=EOS))
    assert not [one for one in examine_data(config)[1] if one.path == KEY]
    imitated = recipe(rows("1", output=EOS), algorithm="sft")
    assert [one.path for one in examine_data(imitated)[1] if one.path == KEY]


def test_a_file_of_the_recipe_may_hold_them(recipe, tmp_path):
    (tmp_path / "around.txt").write_text(f"{START}user {{}}{EOS}")
    config = recipe(rows("1"), default={"prompt_file": "around.txt"})
    assert not [one for one in examine_data(config)[1] if one.path == KEY]
    tokenizer = tokenizer_of(config)
    prompt = open_prompts(config, tokenizer).train[0]
    assert prompt.literal == ()
    assert tokenizer.encode(prompt.text)[-1] == tokenizer.eos_token_id


def test_a_set_of_an_evaluation_is_counted_alone(recipe):
    config = recipe(rows("1"))
    source = config.data.train
    section = EvalConfig.model_validate({"sets": {"held": source.model_dump(exclude_none=True)}})
    with open(source.paths[0], "a", encoding="utf-8") as file:
        file.write(json.dumps({"input": EOS, "output": "1"}) + "\n")
    config = config.model_copy(update={"eval": section})
    with wrong_key(f"{KEY}: missing", 1, 42, "eval.sets.held"):
        open_sets(config, tokenizer_of(config))


def test_a_prompt_of_other_origin_is_refused_alone(recipe):
    config = recipe(rows("1"))
    limits = RowLimits(config, tokenizer_of(config))
    with pytest.raises(ValueError, match="special_tokens_in_content"):
        limits.rendered(Prompt(0, f"1{EOS}", ""))


def of_tools(role="assistant", **more):
    return [{"role": "user", "content": "2+2?"}, {"role": role, "content": "4", **more}]


@pytest.mark.parametrize(
    ("row", "left_out"),
    [
        ({"messages": of_tools()}, []),
        ({"messages": of_tools(weight=0)}, []),
        ({"messages": of_tools(name="bob", reasoning_content="hm")}, ["name", "reasoning_content"]),
        ({"messages": of_tools(thinking="hm")}, ["thinking"]),
        ({"messages": [*of_tools("developer"), *of_tools()[1:]]}, ["content"]),
        ({"messages": of_tools(), "tools": [{"type": "function", "function": {"name": "f"}}]}, ["tools"]),
        ({"messages": of_tools(tool_calls=[{"function": {"name": "f"}}], content=None)}, ["tool_calls"]),
    ],
)
def test_check_names_what_the_template_leaves_out(recipe, row, left_out):
    template = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{% generation %}<turn>{{ m.content }}"
        "{% endgeneration %}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ eos_token }}"
    )
    config = recipe([row] * 3, algorithm="sft", apply_chat_template=True)
    tokenizer = config.policy.tokenizer.model_copy(update={"chat_template": template})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"tokenizer": tokenizer})})
    warned = [one for one in examine_data(config)[1] if one.warns]
    assert [one.path for one in warned] == ["data.train"] * len(left_out)
    assert all("rows.jsonl:1: " in one.what for one in warned)
    assert [name for name, one in zip(left_out, warned, strict=True) if f" {name}" not in one.what] == []


def test_check_tells_nothing_of_a_template_that_shows_all(recipe):
    assert [one for one in examine_data(recipe(rows("1"), apply_chat_template=True))[1] if one.warns] == []
