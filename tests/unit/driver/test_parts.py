"""What a run is opened with, and what is refused before its ranks start."""

import json
from pathlib import Path

import pytest
import yaml
from chat_templates import APPENDING, REWRITING, byte_tokenizer
from refusals import brief, refused

from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.driver.parts import open_parts, stop_ids_of, tokenizer_of
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.recipe.load import load_config

EXEMPLAR = Path(__file__).parents[3] / "examples/configs/grpo_copy_cpu.yaml"


@pytest.fixture
def opened(tmp_path):
    def opened(template, turns, own=None):
        """The parts of a recipe whose tokenizer has this template."""
        tokenizer = byte_tokenizer(tmp_path / "tokenizer", template)
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"question": "2+2?", "answer": "4"}) + "\n")
        tree = yaml.safe_load(EXEMPLAR.read_text())
        tree["policy"] |= {"tokenizer": {"name": f"{tmp_path}/tokenizer"}, "max_total_sequence_length": 64}
        tree["policy"]["model"] |= {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64}
        tree["policy"] |= {"train_global_batch_size": 2, "train_micro_batch_size": 1}
        tree["grpo"] |= {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 5}
        tree["grpo"] |= {"val_period": 0, "val_at_end": False, "max_rollout_turns": turns}
        source = {"data_path": str(rows), "input_key": "question", "output_key": "answer"}
        tree["data"] = {"dataset_name": "jsonl", "apply_chat_template": True, "train": source}
        tree["data"]["train"]["split_validation_size"] = 0
        own = own or ("Steps" if turns > 1 else "LengthReward")
        tree["env"] = {"custom": {"type": f"custom_parts:{own}"}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return open_parts(load_config(tmp_path / "recipe.yaml"))

    return opened


def test_episodes_of_several_turns_show_observations_by_the_chat_template(opened):
    parts = opened(APPENDING, turns=3)
    assert (parts.form.turns, parts.form.tokens) == (3, 64)
    ids = parts.form.observer.ids_of([parts.tokenizer.eos_token_id], [Message("user", "no")])
    assert parts.tokenizer.text_of(ids) == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_earlier_turns_makes_rows_fork(opened):
    assert opened(REWRITING, turns=1).form.turns == 1
    observer = opened(REWRITING, turns=2).form.observer
    said = [Message("user", "2+2?"), Message("assistant", "<think>\nhm\n</think>\n\n5")]
    assert observer.whole_prompt(Prompt(0, "2+2?", ""), said, [Message("user", "no")]) is not None


def test_a_critic_refuses_a_template_that_rewrites_earlier_turns(tmp_path):
    """The row of an episode says nothing of what the next one is worth."""
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", REWRITING)
    (rows := tmp_path / "rows.jsonl").write_text(json.dumps({"input": "2+2?", "output": "4"}) + "\n")
    config = load_config(
        EXEMPLAR.with_name("ppo_cpu.yaml"),
        [
            f"policy.tokenizer.name={tmp_path}/tokenizer",
            f"policy.model.vocab_size={tokenizer.vocab_size}",
            "policy.model.max_position_embeddings=64",
            "policy.max_total_sequence_length=64",
            "ppo.max_rollout_turns=2",
            "+env.custom.type=custom_parts:Steps",
            *("data.dataset_name=jsonl", "+data.apply_chat_template=true"),
            f"+data.train={{data_path: {rows}}}",
        ],
    )
    with refused("rewritten-turns", "data.apply_chat_template", f"{tmp_path}/tokenizer"):
        open_parts(config)


def test_a_class_that_scores_takes_one_answer(opened):
    message = "grpo.max_rollout_turns: 2 does nothing with env.custom.type: custom_parts:LengthReward"
    with pytest.raises(RunStoppedError, match=message):
        opened(APPENDING, turns=2, own="LengthReward")


@pytest.mark.parametrize("of_weights", [False, True])
def test_tokens_that_the_model_lacks_are_named(tmp_path, of_weights):
    folder = str(tmp_path / "tokenizer")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", APPENDING)
    policy = load_config(EXEMPLAR).policy
    model = policy.model.model_copy(update={"vocab_size": tokenizer.vocab_size - 1})
    named = {"tokenizer": policy.tokenizer.model_copy(update={"name": folder}), "model": model}
    policy = policy.model_copy(update=named | {"model_name": folder if of_weights else None})
    with pytest.raises(RunStoppedError) as caught:
        tokenizer_of(policy)
    [problem] = caught.value.__cause__.problems
    told = "policy.tokenizer.name: contradicts (model_name)"
    assert brief(problem) == (told if of_weights else "policy.model.vocab_size: too-small (name)")
    assert repr(tokenizer.text_of([tokenizer.vocab_size - 1])) in str(caught.value)


def test_answers_end_as_the_files_of_the_model_say(tmp_path):
    folder = tmp_path / "model"
    own = byte_tokenizer(folder, APPENDING, marks=("<|endoftext|>", "<|eot|>"))
    eos, other, named = (own.encode(text)[0] for text in ("<|im_end|>", "<|endoftext|>", "<|eot|>"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, other]}))
    config = load_config(
        EXEMPLAR,
        [
            f"policy.tokenizer.name={folder}",
            f"policy.model.vocab_size={own.vocab_size}",
            f"policy.generation.stop_token_ids=[{named}, 7]",
        ],
    )
    tokenizer = tokenizer_of(config.policy)
    assert stop_ids_of(config, tokenizer) == (eos, other, named, 7)
    for end in (eos, other, named):
        assert tokenizer.decode([*tokenizer.encode("42"), end]) == "42"
