"""From Hugging Face weights to Hugging Face weights: train, save, export, and ask transformers and the checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from safetensors.torch import load_file

RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_copy_cpu.yaml"
PROMPTS = ["527>", "103>", "999>", "648>"]


def done(*arguments: object, folder: Path) -> str:
    """The output of the command, which succeeds."""
    status, output, errors = run(*arguments, folder=folder)
    assert status == 0, errors[-3000:]
    return output


def save_start(folder: Path) -> None:
    import transformers

    from nemo_rl_mcore.data.tokenizer import load_tokenizer

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=33, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, sliding_window=None, initializer_range=0.2,
        bos_token_id=None, eos_token_id=15,
    )  # fmt: skip
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    load_tokenizer("char").save_as_hugging_face(folder)


def greedy(folder: Path, prompt: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    whole = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    answer = whole[0, ids.shape[1] :].tolist()
    return tokenizer.decode(answer[: answer.index(15)] if 15 in answer else answer)


@pytest.mark.nightly
def test_trained_weights_go_out_as_they_came_in_and_from_any_directory(tmp_path):
    start, output, elsewhere = tmp_path / "start", tmp_path / "exported", tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_start(start)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {RECIPE}\n"
        "policy: {model: null, model_name: start, tokenizer: {name: start}}\n"
        f"checkpointing: {{enabled: true, checkpoint_dir: {tmp_path / 'checkpoints'}, save_period: 2}}\n"
        f"logger: {{log_dir: {tmp_path / 'run'}, tensorboard_enabled: false}}\n"
        "grpo: {max_num_steps: 2, val_period: 0, val_at_end: false}\n"
        "cluster: {cpu_workers_per_node: 1}\n"
    )
    done("grpo", "--config", recipe, "policy.megatron_cfg.tensor_model_parallel_size=1", folder=tmp_path)
    checkpoint = tmp_path / "checkpoints/step_2"
    done("export", "--checkpoint", checkpoint, "--output", output, folder=elsewhere)

    before, after = (load_file(folder / "model.safetensors") for folder in (start, output))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 0.1
    config = json.loads((output / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("mistral", 15)

    asked = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    start.rename(tmp_path / "gone")  # the checkpoint has all that it needs
    shown = done("generate", "--checkpoint", checkpoint, "--greedy", *asked, folder=elsewhere)
    assert [line for line in shown.splitlines() if ">" in line] == [
        f"{prompt}{greedy(output, prompt)}" for prompt in PROMPTS
    ]
    assert np.unique([greedy(output, prompt) for prompt in PROMPTS]).size > 1
