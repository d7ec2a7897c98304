import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml
from chat_tokenizer import EOS, START, VOCABULARY, save_chat_tokenizer
from refusals import refused, wrong_key
from rows_of_files import EXEMPLAR, recipe_over, write_rows
from rows_of_files import prompts as rows

from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.evaluation import EvalConfig
from nemo_rl_mcore.data.answers import PreferenceSource, answer_row
from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.data.examples import read_examples
from nemo_rl_mcore.data.sources import RowLimits, open_prompts, open_sets
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.errors import CustomCodeError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight
from nemo_rl_mcore.tools.check.data import examine_data
from nemo_rl_mcore.tools.evaluate.generate import Asked, prompts_to_answer

EXEMPLARS = Path(__file__).parents[3] / "examples/configs"
CHAR = load_tokenizer("char")


@pytest.fixture
def recipe(tmp_path):
    """A recipe over the exemplar; `rows` become the file to train on."""
    return partial(recipe_over, tmp_path)


# Embedded tasks


@pytest.fixture
def game(tmp_path):
    """A recipe of the game, its prompts shown with rules around them."""
    (tmp_path / "rules.txt").write_text("Find it: {}\n")

    def make(**data):
        tree = yaml.safe_load((EXEMPLARS / "grpo_guess_number_cpu.yaml").read_text())
        tree["defaults"] = str(EXEMPLARS / "grpo_copy_cpu.yaml")
        tree["data"] |= {"default": {"prompt_file": "rules.txt"}, **data}
        tokenizer = {"name": save_chat_tokenizer(tmp_path / "tokenizer")}
        model = {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
        tree["policy"] |= {"tokenizer": tokenizer, "max_total_sequence_length": 96, "model": model}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / "recipe.yaml")

    return make


@pytest.mark.parametrize(
    ("chat", "shown"), [(False, "Find it: {}\n"), (True, "<turn>user\nFind it: {}\n<end>\n<turn>assistant\n")]
)
def test_a_task_of_several_turns_is_shown_in_the_texts_of_the_recipe(game, chat, shown):
    config = game(apply_chat_template=chat)
    bare = DigitTaskSource("guess_number", 2, config.seed)
    source = open_prompts(config, load_tokenizer(config.policy.tokenizer.name))
    pairs = [(source.train_batch(3, 16), bare.train_batch(3, 16)), (source.validation(4), bare.validation(4))]
    for shown_prompts, bare_prompts in pairs:
        assert [one.text for one in shown_prompts] == [shown.format(one.text) for one in bare_prompts]
        assert [(one.index, one.answer) for one in shown_prompts] == [
            (one.index, one.answer) for one in bare_prompts
        ]
    assert config.max_prompt_length == 96 - config.policy.generation.max_new_tokens


def test_a_prompt_in_texts_that_has_no_room_is_told_when_the_source_opens(game, tmp_path):
    config = game()
    (tmp_path / "rules.txt").write_text("x" * 100 + "{}")
    with refused("row-length", "data.dataset_name: guess_number", 103, 94):
        open_prompts(config, load_tokenizer(config.policy.tokenizer.name))


def test_a_text_of_a_task_that_does_not_serve_is_named_before_the_run(game):
    config = game(default={"prompt_file": "none.txt"})
    assert [one.path for one in examine_data(config)[1]] == ["data.default.prompt_file"]
    with pytest.raises(ConfigError, match=r"data\.default\.prompt_file"):
        open_prompts(config, CHAR)


@pytest.mark.parametrize(
    ("exemplar", "step_key", "validation_key"),
    [
        ("grpo_copy_cpu", "grpo.num_prompts_per_step", "grpo.max_val_samples"),
        ("ppo_cpu", "ppo.num_prompts_per_step", "ppo.max_val_samples"),
        ("distillation_cpu", "distillation.num_prompts_per_step", "distillation.max_val_samples"),
        ("sft_cpu", "policy.train_global_batch_size", "sft.max_val_samples or sft.val_batches"),
        ("dpo_cpu", "policy.train_global_batch_size", "dpo.max_val_samples or dpo.val_batches"),
    ],
)
def test_too_many_prompts_name_the_keys_of_the_algorithm(exemplar, step_key, validation_key):
    config = load_config(EXEMPLARS / f"{exemplar}.yaml")
    source = open_prompts(config, CHAR)
    with refused("too-few-rows", f"{step_key}=20000", "training"):
        source.train_batch(1, 20000)
    with refused("too-few-rows", f"{validation_key}=20000", "held-out"):
        source.validation(20000)


# Files


def test_rows_become_prompts_and_a_step_takes_as_many_as_it_asks_for(recipe):
    source = open_prompts(recipe(rows(100)), CHAR)
    batch = source.train_batch(1, 16)
    assert len({prompt.index for prompt in batch}) == 16
    assert all(prompt == Prompt(prompt.index, f"{prompt.index}>", str(prompt.index)) for prompt in batch)
    assert all(prompt.place.endswith(f"rows.jsonl:{prompt.index + 1}") for prompt in batch)
    seen = {prompt.index for prompt in batch + source.train_batch(2, 16)}
    assert len(seen) == 32
    assert seen.isdisjoint(prompt.index for prompt in source.held_out)


@pytest.mark.parametrize(
    ("data", "prompt", "fits"),
    [
        ({}, "123>", True),  # 8 tokens, of which 4 are for the response
        ({}, "1234>", False),
        ({"max_input_seq_length": 3}, "123>", False),
    ],
)
def test_a_prompt_that_is_too_long_is_named(recipe, tmp_path, data, prompt, fits):
    config = recipe([*rows(50, "{}>"), {"input": prompt, "output": "1"}], data=data | {"overlong": "error"})
    if fits:
        assert open_prompts(config, CHAR)
        return
    allowed = data.get("max_input_seq_length", 4)
    with refused("row-length", "rows.jsonl:51", len(prompt), allowed, "data.max_input_seq_length"):
        open_prompts(config, CHAR)


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_sets_are_prompts_whatever_is_trained_on(recipe, tmp_path, algorithm):
    path = write_rows(tmp_path / "set.jsonl", [{"input": "1>", "output": "1" * 40}, *rows(3)])
    config = recipe(
        algorithm=algorithm, data={"overlong": "drop"}, eval={"sets": {"one": {"data_path": path}}}
    )
    assert [len(prompt.answer) for prompt in open_sets(config, CHAR)["one"]] == [40, 1, 1, 1]


@pytest.mark.parametrize("section", [{}, {"use_dynamic_sampling": True}])
def test_a_step_needs_as_many_rows_that_fit(recipe, section):
    """What dynamic sampling replaces takes rows of the steps behind, maybe of another pass."""
    drop = {"section": section, "data": {"overlong": "drop"}}
    assert open_prompts(recipe(rows(40, "1111{}>") + rows(40), **drop), CHAR)
    with wrong_key("grpo.num_prompts_per_step: too-few-rows", "data.overlong: drop", 16):
        open_prompts(recipe(rows(40, "1111{}>") + rows(9), **drop), CHAR)


def test_too_few_held_out_rows_that_fit(recipe, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", rows(8, "1111{}>"))
    data = {"overlong": "drop", "validation": {"data_path": held_out}}
    config = recipe(rows(50), section={"val_at_end": True, "max_val_samples": 8}, data=data)
    with wrong_key("grpo.max_val_samples: too-few-rows", 0):
        open_prompts(config, CHAR)


def test_rows_that_are_taken_again_are_rows_of_their_own(recipe, tmp_path):
    """As `Dataset.repeat` does: one time after the other; each has its own noise, and stands on the same side."""
    validation = {"data_path": write_rows(tmp_path / "held_out.jsonl", rows(3)), "repeat": 4}
    section = {"val_at_end": True, "max_val_samples": None, "val_greedy": False}
    source = open_prompts(recipe(rows(50), section=section, data={"validation": validation}), CHAR)
    held_out = source.validation(None)
    assert [prompt.answer for prompt in held_out] == [str(row) for _ in range(4) for row in range(3)]
    assert [prompt.index for prompt in held_out] == list(range(12))
    assert source.validation(5) == held_out[:5]


def test_what_is_held_out_is_never_trained_on_however_often_rows_are_taken(recipe, tmp_path):
    config = recipe(rows(100))
    path = config.data.train.data_path
    once, twice = (
        open_prompts(recipe(data={"dataset_name": "files", "train": {"data_path": path, **more}}), CHAR)
        for more in ({}, {"repeat": 2})
    )
    assert [prompt.answer for prompt in twice.train] == 2 * [prompt.answer for prompt in once.train]
    assert len({prompt.index for prompt in [*twice.train, *twice.held_out]}) == 200
    assert {prompt.text for prompt in twice.train}.isdisjoint(prompt.text for prompt in twice.held_out)


def test_a_sample_of_the_rows_is_always_the_same_one(recipe):
    path = recipe(rows(100)).data.train.data_path

    def drawn(count):
        train = {"data_path": path, "max_samples": count, "split_validation_size": 0}
        source = open_prompts(recipe(data={"dataset_name": "files", "train": train}), CHAR)
        return [int(prompt.answer) for prompt in source.train]

    some = drawn(20)
    assert some == drawn(20) == sorted(some)
    assert len(set(some)) == 20
    assert some != list(range(20))
    assert drawn(100) == drawn(1000) == list(range(100))


def test_a_row_that_cannot_be_encoded_is_named(recipe):
    with refused("unknown-characters", "rows.jsonl:51", "['é']"):
        open_prompts(recipe([*rows(50), {"input": "é", "output": "1"}]), CHAR)


SMALL = {"train_global_batch_size": 4, "train_micro_batch_size": 2}


def test_an_answer_to_imitate_counts_with_its_prompt_and_its_end(recipe):
    fitting = [{"input": "123>", "output": "456"}] * 20
    config = recipe(fitting, "sft", policy=SMALL)
    assert open_prompts(config, CHAR)  # 4 + 3 + 1 tokens of 8
    # A prompt that nobody answers may leave less room than a response takes.
    assert open_prompts(recipe([{"input": "12345>", "output": "4"}] * 20, "sft", policy=SMALL), CHAR)
    with refused("row-length", "rows.jsonl:21", 9, "policy.max_total"):
        open_prompts(recipe([*fitting, {"input": "123>", "output": "4567"}], "sft", policy=SMALL), CHAR)


def test_held_out_prompts_that_are_answered_are_held_to_the_length_of_prompts(recipe):
    section = {"val_at_end": True, "max_val_samples": 1}
    given = [{"input": f"{number:04d}>", "output": "4"} for number in range(40)]
    config = recipe(given, "sft", section, policy=SMALL)
    with refused("row-length", 5, 4):
        open_prompts(config, CHAR)


def test_given_pairs_are_those_of_the_rows(recipe):
    given = [{"prompt": f"{number}>", "chosen": "12", "rejected": "3"} for number in range(40)]
    config = recipe(given, "dpo", policy=SMALL)
    source = open_prompts(config, CHAR)
    batch = PreferenceSource(source, CHAR).train_batch(1, 4)
    asked = source.train_batch(1, 4)
    rows_of_ids = zip(batch["input_ids"].tolist(), batch["input_lengths"].tolist(), strict=True)
    texts = [CHAR.decode(ids[:length]) for ids, length in rows_of_ids]
    assert texts == [prompt.text + answer for prompt in asked for answer in ("12", "3")]
    assert batch["prompt_index"].tolist() == [prompt.index for prompt in asked for _ in range(2)]
    assert batch["token_mask"].sum(1).tolist() == [3, 2] * 4
    long = [*given, {"prompt": "1>", "chosen": "1", "rejected": "123456"}]
    with refused("row-length", "rows.jsonl:41", 9):
        open_prompts(recipe(long, "dpo", policy=SMALL), CHAR)


def test_a_prompt_without_a_rejected_answer_makes_no_pair(recipe):
    with refused("no-rejected-answer", 4):
        PreferenceSource(open_prompts(recipe(), CHAR), CHAR).rows([Prompt(4, "4>", "4")])


def test_the_chat_template_is_applied_to_texts_and_conversations(recipe, tmp_path):
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": VOCABULARY}
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    given = [{"input": f"{number}?", "output": "yes"} for number in range(40)] + [{"messages": talk}]
    train = {"data_path": str(tmp_path / "rows.jsonl"), "split_validation_size": 0.0}
    config = recipe(
        given,
        "sft",
        data={"apply_chat_template": True, "train": train},
        policy={"tokenizer": {"name": folder}, "max_total_sequence_length": 64, "model": model, **SMALL},
    )
    source = open_prompts(config, load_tokenizer(folder))
    texts = {prompt.index: prompt.text for prompt in source.train}
    assert texts[0] == "<turn>user\n0?<end>\n<turn>assistant\n"
    assert texts[40] == "<turn>user\nhello<end>\n<turn>assistant\n"


# A class of the user's own


def test_a_class_is_called_with_the_seed_and_its_arguments(recipe):
    config = recipe(data={"dataset_name": "custom", "type": "custom_parts:Counting", "args": {"start": 5}})
    source = open_prompts(config, CHAR)
    assert [prompt.index for prompt in source.train_batch(1, 3)] == [42005, 42006, 42007]
    with refused(
        "prompt-indices", "data.type: custom_parts:Counting: validation(2)", 2, 1, by=CustomCodeError
    ):
        source.validation(2)


@pytest.mark.parametrize(("algorithm", "output"), [("grpo", 1), ("sft", "1" * 10**6)])
def test_what_is_far_too_long_is_not_encoded_to_be_counted(recipe, algorithm, output):
    class Failing:
        special_tokens, opening = (), ""

        def encode(self, text, literal=()):
            raise AssertionError(f"{len(text)} characters were encoded")

    prompt = "1>" if algorithm == "sft" else "1" * 10**6
    short = [{"input": "1>", "output": 1}] * 300
    config = recipe([{"input": prompt, "output": output}, *short], algorithm)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .* 1000000 characters"):
        open_prompts(config, Failing())


def test_generate_takes_the_held_out_prompts_that_there_are(recipe, tmp_path):
    validation = {"data_path": write_rows(tmp_path / "held_out.jsonl", rows(3))}
    config = recipe(rows(20), data={"validation": validation})
    assert len(prompts_to_answer(config, Asked(), CHAR)) == 3
    assert len(open_prompts(config, CHAR).validation(8)) == 3
    train = {"data_path": str(tmp_path / "rows.jsonl"), "split_validation_size": 0}
    with refused("no-prompts", "--prompt"):
        prompts_to_answer(recipe(rows(20), data={"train": train}), Asked(), CHAR)


@pytest.fixture
def files_recipe(tmp_path):
    """The exemplar over files of rows: a name says how many, and how its prompts begin."""

    def make(files, data, section=None, algorithm="grpo", **sections):
        for name, count in files.items():
            write_rows(tmp_path / f"{name}.jsonl", rows(count, f"{name[0]}{{}}>"))
        return recipe_over(tmp_path, None, algorithm, section, data=data, **sections)

    return make


def source(name, **keys):
    return {"data_path": f"{name}.jsonl", "split_validation_size": 0, **keys}


def test_rows_of_sources_without_weights_are_joined(files_recipe):
    config = files_recipe({"a1": 30, "b1": 10}, {"train": [source("a1"), source("b1")]})
    drawn = open_prompts(config, CHAR)
    prompts = [prompt for step in range(1, 6) for prompt in drawn.train_batch(step, 16)]
    assert Counter(prompt.index for prompt in prompts) == dict.fromkeys(range(40), 2)
    assert {(prompt.source, prompt.text[0]) for prompt in prompts} == {("a1", "a"), ("b1", "b")}
    assert preflight(config).data.rows == 40


def test_weights_share_out_the_prompts(files_recipe):
    train = [source("a1", weight=0.75), source("b1", weight=0.25)]
    config = files_recipe({"a1": 12, "b1": 40}, {"train": train})
    drawn = open_prompts(config, CHAR)
    for step in range(1, 9):
        batch = drawn.train_batch(step, 16)
        assert {prompt.source for prompt in batch} == {"a1", "b1"}
        assert len({prompt.index for prompt in batch}) == 16
        assert batch == open_prompts(config, CHAR).train_batch(step, 16)
    assert preflight(files_recipe({}, {"train": train}, {"max_num_epochs": 3})).steps == 3 * 52 // 16


@pytest.mark.parametrize(
    ("files", "train", "key", "of"),
    [
        (
            {"a1": 11, "b1": 40},
            [source("a1", weight=3), source("b1", weight=1)],
            "data.train.0.weight: too-few-rows",
            [16, 12, 11, "'a1'"],
        ),
        ({"a1": 9, "b1": 6}, [source("a1"), source("b1")], "grpo.num_prompts_per_step: too-few-rows", [16]),
    ],
)
def test_shares_that_cannot_be(files_recipe, files, train, key, of):
    with wrong_key(key, *of):
        preflight(files_recipe(files, {"train": train}))


def test_validation_takes_as_many_rows_of_each_source_and_names_of_sets(files_recipe):
    sets = {"easy": source("e1"), "hard": source("h1")}
    config = files_recipe(
        {"a1": 20, "e1": 3, "h1": 40},
        {"train": source("a1"), "validation": ["easy", "hard", source("a1", split="train[:50%]")]},
        {"val_at_end": True, "max_val_samples": 12},
        eval={"sets": sets},
    )
    prompts = open_prompts(config, CHAR).validation(12)
    assert Counter(prompt.source for prompt in prompts) == {"easy": 3, "hard": 5, "a1": 4}
    assert len({prompt.index for prompt in prompts}) == 12
    assert [prompt.text for prompt in open_sets(config, CHAR)["easy"]] == ["e0>", "e1>", "e2>"]


def test_texts_around_prompts_are_those_of_the_source_or_of_all(files_recipe, tmp_path):
    for name, text in (("all", "1{}"), ("own", "2{}"), ("system", "3")):
        (tmp_path / f"{name}.txt").write_text(text)
    train = [source("a1"), source("b1", prompt_file="own.txt", system_prompt_file="system.txt")]
    config = files_recipe({"a1": 10, "b1": 10}, {"train": train, "default": {"prompt_file": "all.txt"}})
    sources = config.train_sources, config.validation_sources
    examples, problems = read_examples(*sources, config.row_kind, chat=False)
    assert problems == []
    assert [examples.train[row].text for row in (0, 10)] == ["1a0>", "3\n2b0>"]
    (tmp_path / "all.txt").write_text("no place")
    with wrong_key("data.train.0.prompt_file: not-allowed", 0):
        preflight(config)


def test_sft_imitates_the_solution_and_is_scored_on_the_answer_in_it(files_recipe, tmp_path):
    rows = [{"question": f"{number}=", "answer": f"0#{number}"} for number in range(40)]
    write_rows(tmp_path / "g.jsonl", rows)
    train = {"dataset_name": "gsm8k", "data_path": "g.jsonl", "answer": {"after": "#"}}
    small = {"policy": {"train_global_batch_size": 2, "train_micro_batch_size": 1}}
    config = files_recipe({}, {"train": train}, {"max_val_samples": 2, "val_at_end": True}, "sft", **small)
    drawn = open_prompts(config, CHAR)
    prompt = drawn.train_batch(1, 2)[0]
    assert prompt.answer == prompt.text[:-1]
    assert CHAR.decode(answer_row(prompt, CHAR).ids) == f"{prompt.text}0#{prompt.answer}"
    assert all(prompt.answer == prompt.text[:-1] for prompt in drawn.validation(2))


def test_data_of_the_hub_are_not_fetched_by_a_check(files_recipe):
    config = files_recipe({"a1": 3}, {"train": [{"dataset_name": "gsm8k"}, source("a1")]})
    plan = preflight(config)
    assert (plan.data, plan.fetched) == (None, ("openai/gsm8k",))
    with wrong_key("data.train.1.data_path: not-readable", "'gone.jsonl'"):
        preflight(files_recipe({}, {"train": [{"dataset_name": "gsm8k"}, source("gone")]}))


KEY = "data.special_tokens_in_content"


@pytest.fixture
def chat_recipe(tmp_path):
    def make(rows, *, algorithm="grpo", **data):
        train = {"data_path": str(tmp_path / "rows.jsonl"), "split_validation_size": 0}
        policy = {
            "tokenizer": {"name": save_chat_tokenizer(tmp_path / "tokenizer")},
            "max_total_sequence_length": 96,
            "model": load_config(EXEMPLAR).policy.model.model_dump(exclude_unset=True)
            | {"vocab_size": VOCABULARY, "max_position_embeddings": 128},
        }
        return recipe_over(tmp_path, rows, algorithm, data={"train": train, **data}, policy=policy)

    return make


def tokenizer_of(config):
    parse = config.data.special_tokens_in_content == "parse"
    return load_tokenizer(config.policy.tokenizer.name, parse_content=parse)


def marked_rows(*inputs, output="5"):
    return [{"input": text, "output": output} for text in (*inputs, *(str(one) for one in range(40)))]


@pytest.mark.parametrize("chat", [True, False])
def test_check_counts_such_rows_and_asks_for_the_key(chat_recipe, chat):
    config = chat_recipe(marked_rows("1", f"2{EOS}", f"3{START}"), apply_chat_template=chat)
    (problem,) = [one for one in examine_data(config)[1] if one.path == KEY]
    assert "2 of 43" in problem.what
    assert "rows.jsonl:2" in problem.what
    assert repr(EOS) in problem.what
    with pytest.raises(ConfigError, match="2 of 43"):
        open_prompts(config, tokenizer_of(config))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("meant", "controls"), [("text", 0), ("parse", 1)])
def test_the_key_says_what_is_meant(chat_recipe, meant, controls, chat):
    config = chat_recipe(marked_rows(f"2{EOS}"), apply_chat_template=chat, special_tokens_in_content=meant)
    assert not [one for one in examine_data(config)[1] if one.path == KEY]
    tokenizer = tokenizer_of(config)
    (prompt,) = [one for one in open_prompts(config, tokenizer).train if one.index == 0]
    ids = tokenizer.encode(prompt.text, prompt.literal)
    assert ids.count(tokenizer.eos_token_id) == controls + chat
    assert tokenizer.text_of(ids) == prompt.text


def test_an_answer_that_is_only_scored_is_none_of_the_content(chat_recipe):
    config = chat_recipe(marked_rows("1", output=EOS))
    assert not [one for one in examine_data(config)[1] if one.path == KEY]
    imitated = chat_recipe(marked_rows("1", output=EOS), algorithm="sft")
    assert [one.path for one in examine_data(imitated)[1] if one.path == KEY]


def test_a_set_of_an_evaluation_is_counted_alone(chat_recipe):
    config = chat_recipe(marked_rows("1"))
    source = config.data.train
    section = EvalConfig.model_validate({"sets": {"held": source.model_dump(exclude_none=True)}})
    with open(source.paths[0], "a", encoding="utf-8") as file:
        file.write(json.dumps({"input": EOS, "output": "1"}) + "\n")
    config = config.model_copy(update={"eval": section})
    with wrong_key(f"{KEY}: missing", 1, 42, "eval.sets.held"):
        open_sets(config, tokenizer_of(config))


def test_a_prompt_of_other_origin_is_refused_alone(chat_recipe):
    config = chat_recipe(marked_rows("1"))
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
def test_check_names_what_the_template_leaves_out(chat_recipe, row, left_out):
    template = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{% generation %}<turn>{{ m.content }}"
        "{% endgeneration %}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ eos_token }}"
    )
    config = chat_recipe([row] * 3, algorithm="sft", apply_chat_template=True)
    tokenizer = config.policy.tokenizer.model_copy(update={"chat_template": template})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"tokenizer": tokenizer})})
    warned = [one for one in examine_data(config)[1] if one.warns]
    assert [one.path for one in warned] == ["data.train"] * len(left_out)
    assert all("rows.jsonl:1: " in one.what for one in warned)
    assert [name for name, one in zip(left_out, warned, strict=True) if f" {name}" not in one.what] == []
