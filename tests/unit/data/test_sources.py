import json
from pathlib import Path

import pytest
import yaml
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from refusals import refused, wrong_key

from nemo_rl_mcore.config.base import ConfigError, collect_problems
from nemo_rl_mcore.config.evaluation import EvalConfig
from nemo_rl_mcore.config.source import SourceConfig
from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.data.sources import open_prompts, open_sets
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.errors import CustomCodeError
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.data import examine_data
from nemo_rl_mcore.tools.evaluate.generate import Asked, prompts_to_answer

EXEMPLAR = "examples/configs/grpo_copy_cpu.yaml"
GAME = "examples/configs/grpo_guess_number_cpu.yaml"
CHAR = load_tokenizer("char")


@pytest.fixture
def recipe(tmp_path, request):
    """A recipe over the exemplar; `rows` become the file to train on."""

    def make(rows=None, algorithm="grpo", section=None, data=None, policy=None):
        tree = yaml.safe_load((request.config.rootpath / EXEMPLAR).read_text())
        if rows is not None:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
            tree["data"] = {"dataset_name": "jsonl", "train": {"data_path": str(path)}}
        tree["data"] |= data or {}
        tree["policy"] |= policy or {}
        loop = {"val_period": 0, "val_at_end": False, **(section or {})}
        if algorithm == "grpo":
            tree["grpo"] |= loop
        else:
            del tree["grpo"], tree["loss_fn"]
            tree[algorithm] = {"max_num_steps": 5, **loop}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / "recipe.yaml")

    return make


def rows(count, prompt="{}>"):
    return [{"input": prompt.format(number), "output": number} for number in range(count)]


# Embedded tasks


def test_an_embedded_task_draws_as_ever(recipe):
    config = recipe()
    source = open_prompts(config, CHAR)
    assert source.train_batch(3, 16) == DigitTaskSource("copy", 3, config.seed).train_batch(3, 16)


@pytest.fixture
def game(tmp_path, request):
    """A recipe of the game, its prompts shown with rules around them."""
    (tmp_path / "rules.txt").write_text("Find it: {}\n")

    def make(**data):
        tree = yaml.safe_load((request.config.rootpath / GAME).read_text())
        tree["defaults"] = str(request.config.rootpath / EXEMPLAR)
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


EXEMPLARS = Path(__file__).parents[3] / "examples/configs"


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
    path = tmp_path / "set.jsonl"
    path.write_text(
        "".join(f"{json.dumps(row)}\n" for row in [{"input": "1>", "output": "1" * 40}, *rows(3)])
    )
    config = recipe(algorithm=algorithm, data={"overlong": "drop"})
    config = config.model_copy(update={"eval": EvalConfig(sets={"one": SourceConfig(data_path=str(path))})})
    assert [len(prompt.answer) for prompt in open_sets(config, CHAR)["one"]] == [40, 1, 1, 1]


def test_too_few_rows_that_fit(recipe):
    with wrong_key("grpo.num_prompts_per_step: too-few-rows", "data.overlong: drop", 16):
        open_prompts(recipe(rows(40, "1111{}>") + rows(9), data={"overlong": "drop"}), CHAR)


def test_dynamic_sampling_needs_the_rows_of_a_step_alone(recipe):
    """What it replaces takes rows of the steps behind, maybe of another pass."""
    section = {"use_dynamic_sampling": True}
    open_prompts(recipe(rows(40, "1111{}>") + rows(40), section=section, data={"overlong": "drop"}), CHAR)
    config = recipe(rows(40, "1111{}>") + rows(9), section=section, data={"overlong": "drop"})
    with wrong_key("grpo.num_prompts_per_step: too-few-rows"):
        open_prompts(config, CHAR)


def test_too_few_held_out_rows_that_fit(recipe, tmp_path):
    (tmp_path / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(8, "1111{}>")))
    data = {"overlong": "drop", "validation": {"data_path": str(tmp_path / "held_out.jsonl")}}
    config = recipe(rows(50), section={"val_at_end": True, "max_val_samples": 8}, data=data)
    with wrong_key("grpo.max_val_samples: too-few-rows", 0):
        open_prompts(config, CHAR)


def test_rows_that_are_taken_again_are_rows_of_their_own(recipe, tmp_path):
    """As `Dataset.repeat` does: one time after the other; each has its own noise, and stands on the same side."""
    (tmp_path / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(3)))
    validation = {"data_path": str(tmp_path / "held_out.jsonl"), "repeat": 4}
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


def test_a_set_is_asked_several_times_by_a_key_of_its_own():
    sets = {"one": SourceConfig(data_path="rows.jsonl", repeat=2)}
    assert [one.path for one in collect_problems(EvalConfig(sets=sets))] == ["sets.one.repeat"]


def test_a_row_that_cannot_be_encoded_is_named(recipe):
    with refused("unknown-characters", "rows.jsonl:51", "['é']"):
        open_prompts(recipe([*rows(50), {"input": "é", "output": "1"}]), CHAR)


def test_bad_lines_are_problems(recipe):
    with wrong_key("data.train.data_path: wrong-row", "rows.jsonl:1", "'output'"):
        open_prompts(recipe([{"input": "a"}]), CHAR)


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"type": "custom_parts:LengthReward"},
            r"data\.type: custom_parts:LengthReward lacks train_batch, validation",
        ),
        (
            {"type": "custom_parts:Counting", "args": {"begin": 5}},
            r"data\.args: .* unexpected keyword argument 'begin'",
        ),
    ],
)
def test_a_class_that_does_not_serve_names_its_key(recipe, data, message):
    with pytest.raises(ValueError, match=message):
        open_prompts(recipe(data={"dataset_name": "custom", **data}), CHAR)


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
    (tmp_path / "held_out.jsonl").write_text('{"input": "7>", "output": 7}\n' * 3)
    validation = {"data_path": str(tmp_path / "held_out.jsonl")}
    config = recipe(rows(20), data={"validation": validation})
    assert len(prompts_to_answer(config, Asked(), CHAR)) == 3
    assert len(open_prompts(config, CHAR).validation(8)) == 3
    train = {"data_path": str(tmp_path / "rows.jsonl"), "split_validation_size": 0}
    with refused("no-prompts", "--prompt"):
        prompts_to_answer(recipe(rows(20), data={"train": train}), Asked(), CHAR)
