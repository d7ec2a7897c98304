"""A recipe for GPUs of an embedded task of several turns, on a tiny model here: its rules, and a chat template."""

from pathlib import Path

import pytest
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from grpo_run import Run

from nemo_rl_mcore.driver.observability import read_rollouts
from nemo_rl_mcore.recipe.load import load_config

RECIPES = Path(__file__).parents[2] / "examples/configs/recipes/llm"
CPU = Path(__file__).parents[2] / "examples/configs"
TEXT = "data.default.prompt_file"


@pytest.mark.exhaustive_cases("guess_number")
@pytest.mark.parametrize("task", ["guess_number", "calculator"])
def test_the_rules_stand_around_the_prompts_of_both_tasks(tmp_path, task):
    recipe = RECIPES / f"grpo-qwen2.5-1.5b-instruct-{task.replace('_', '-')}-1n8g-megatron-fused.yaml"
    data, turns = load_config(recipe).data, load_config(recipe).max_rollout_turns
    assert data.default is not None
    folder = save_chat_tokenizer(tmp_path / "tokenizer")
    run = Run(
        tmp_path / "run",
        *("grpo.max_num_steps=2", "grpo.val_at_end=false", f"grpo.max_rollout_turns={turns}"),
        *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
        *("policy.train_global_batch_size=16", "policy.max_total_sequence_length=640"),
        *(f"policy.tokenizer.name={folder}", f"policy.model.vocab_size={VOCABULARY}"),
        *("policy.model.max_position_embeddings=640", "+logger.answers_with_tokens=16"),
        *("data.apply_chat_template=true", f"data.num_digits={data.num_digits}"),
        *(f"+{TEXT}={data.default.prompt_file}", "policy.generation.max_new_tokens=6"),
        *("grpo.max_val_samples=4", "grpo.val_batch_size=4"),
        recipe=CPU / f"grpo_{task}_cpu.yaml",
    )
    run.finish(within_s=200)
    answers = list(read_rollouts(run.log_dir / "rollouts/step_1.jsonl.gz"))
    assert len(answers) == 16
    rules = Path(data.default.prompt_file).read_text("utf-8")
    for answer in answers:
        before, after = rules.split("{}")
        assert answer["prompt"].startswith(f"<turn>user\n{before}")
        assert answer["prompt"].endswith(f"{after}<end>\n<turn>assistant\n")
        roles = [turn["role"] for turn in answer["turns"]]
        assert roles[::2] == ["assistant"] * (len(roles) // 2 + 1)
        # The mark of a turn that was sampled is text of the answer.
        assert "".join(answer["tokens"]["text"]).startswith(answer["turns"][0]["content"])
