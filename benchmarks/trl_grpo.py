"""TRL's GRPOTrainer at the task, batch and loss of `examples/configs/grpo_copy_cpu.yaml`, for `grpo_step.py`."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from measuring import ROOT
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nemo_rl_mcore.data.datasets import DigitTaskSource
from nemo_rl_mcore.data.tokenizer import HuggingFaceTokenizer
from nemo_rl_mcore.environment.games import character_score
from nemo_rl_mcore.recipe.load import load_config

if TYPE_CHECKING:
    from grpo_step import Size

RECIPE = ROOT / "examples/configs/grpo_copy_cpu.yaml"


class StepEnds(TrainerCallback):
    """The times at which steps ended: behind the optimizer, before the step's own log."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.times.append(time.perf_counter())


class Timed(GRPOTrainer):
    """Tells the seconds of each rollout."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.rollout_seconds: list[float] = []
        super().__init__(*args, **more)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        self.rollout_seconds.append(time.perf_counter() - start)
        return result


def run_trl(size: Size, model: str, steps: int, *, threads: int, seed: int) -> dict[str, list[float]]:
    """One number for each step."""
    torch.set_num_threads(threads)
    ends = StepEnds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model,
            reward_of(model),
            args=settings(size, steps, folder, seed),
            train_dataset=prompts(size, steps, seed),
            callbacks=[ends],
        )
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "step": [end - begin for begin, end in zip([start, *ends.times[:-1]], ends.times, strict=True)],
        "generation": trainer.rollout_seconds,
        "reward": [row["reward"] for row in logged],
        "tokens": [row["completions/mean_length"] * size.samples for row in logged],
    }


def prompts(size: Size, steps: int, seed: int) -> Dataset:
    """Those that our run draws, in the same order."""
    source = DigitTaskSource("copy", size.digits, seed)
    drawn = [prompt for step in range(1, steps + 1) for prompt in source.train_batch(step, size.prompts)]
    return Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in drawn])


def reward_of(model: str) -> Any:
    """The function of our environment."""
    tokenizer = HuggingFaceTokenizer(model)

    def reward(completion_ids: list[list[int]], answer: list[str], **more: Any) -> list[float]:
        return [
            character_score(wanted, tokenizer.decode(ids), tokenizer.eos_token_id in ids)
            for wanted, ids in zip(answer, completion_ids, strict=True)
        ]

    return reward


def settings(size: Size, steps: int, folder: str, seed: int) -> GRPOConfig:
    """The recipe's batch, loss and optimizer; the rest as GRPOTrainer has it by itself."""
    config = load_config(RECIPE)
    loss, optimizer = config.loss_fn, config.policy.megatron_cfg.optimizer
    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=size.samples,
        num_generations=size.answers,
        max_completion_length=size.new_tokens,
        steps_per_generation=1,
        num_iterations=1,
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens, as ours
        epsilon=loss.ratio_clip_min,
        epsilon_high=loss.ratio_clip_max,
        entropy_coef=loss.entropy_coef,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_eps,
        max_grad_norm=config.policy.max_grad_norm,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
