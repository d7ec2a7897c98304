import json

import pytest
import yaml
from chat_tokenizer import VOCABULARY, save_chat_tokenizer

from nemo_rl_mcore import cli

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
    assert "3 rows; prompts of 23 tokens in the middle, 59 at most" in out
    assert "the longest is" in out
    assert "rows.jsonl:2" in out
    assert "<turn>user" in out
    assert "earns 1, an empty response 0" in out
    assert "no more than none" not in out


@pytest.mark.needs("math")
def test_rows_left_out_are_counted(recipe, capsys):
    config = recipe([QUESTION, LONG, QUESTION], overlong="drop", max_input_seq_length=50)
    assert full(config) == 0
    out = capsys.readouterr().out
    assert "2 rows; prompts of 23 tokens in the middle, 23 at most" in out
    assert "1 rows with too many tokens (data.overlong)" in out
    assert full(config, "data.overlong=error") == 2
    assert "rows.jsonl:2: the prompt has 59 tokens, and 50 are allowed" in capsys.readouterr().err


@pytest.mark.needs("math")
def test_rows_with_their_answers(recipe, capsys):
    assert full(recipe([QUESTION, LONG], algorithm="sft")) == 0
    assert "with their answers" in capsys.readouterr().out


@pytest.mark.needs("math")
def test_an_answer_that_earns_nothing_is_told(recipe, capsys):
    env = {"math": {"gold": {"after": "####"}, "response": {"boxed": True}}}
    assert full(recipe([QUESTION], env=env)) == 0
    assert "the answer as the data states it earns no more than none" in capsys.readouterr().out


@pytest.mark.needs("math")
def test_a_template_that_fails_is_no_crash(recipe, capsys):
    assert full(recipe([QUESTION]), "++policy.tokenizer.chat_template='{{ 1/0 }}'") == 2
    assert "rows.jsonl:1: policy.tokenizer.chat_template: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"custom": {"type": "custom_parts:NotThere"}}, "env.custom.type: custom_parts:NotThere"),
        (
            {"custom": {"type": "custom_parts:OneScore"}},
            "env.custom.type: custom_parts:OneScore gave 1 ",
        ),
    ],
)
def test_a_class_of_ones_own_is_imported_and_tried(recipe, capsys, env, said):
    config = recipe([QUESTION], env=env)
    # That a class is not there is seen without importing its module; what it does is not.
    assert cli.main(["check", "--config", config]) == (2 if "NotThere" in said else 0)
    capsys.readouterr()
    assert full(config) == 2
    assert said in capsys.readouterr().err


def test_a_task_without_files_tells_of_its_first_step(capsys):
    assert full(EXEMPLAR) == 0
    out = capsys.readouterr().out
    assert "16 rows; prompts of 4 tokens" in out
    assert "127 earns 1, an empty response 0" in out


@pytest.mark.needs("math")
def test_the_conversations_of_the_quick_start_are_not_scored(capsys):
    """They are imitated as they are; what a validation answers is scored."""
    assert full("examples/configs/quickstart/sft_cpu.yaml") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "first held out 5 - 1 = 4 #### 4 earns 1, an empty response 0" in out
    assert "no more than none" not in out
