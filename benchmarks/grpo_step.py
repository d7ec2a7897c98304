"""What a GRPO step takes beside TRL's GRPOTrainer: same weights, prompts, batch and rewards, on two CPU cores.

    python benchmarks/grpo_step.py [--sizes tiny mid] [--steps 20] [--rounds 3] [--trl_threads 2] [--json FILE]
    python benchmarks/grpo_step.py --sizes tiny --steps 100 --rounds 1    # what both have learned by then

  trl               GRPOTrainer with transformers' generate: one process of two threads, one batch of all answers
  ours              `nemo_rl_mcore grpo` as a user calls it: a driver, and two ranks of one thread for half of it each
  ours, two passes  the same with policy.recompute_prev_logprobs: always; the others leave that pass out

`tiny` is `examples/configs/grpo_copy_cpu.yaml`, `mid` a wider and longer case of its task. Every run starts from one
random Llama in a Hugging Face folder, and takes one optimizer step for each rollout: float32, AdamW at a constant rate,
clipped gradients, no KL, rewards by the same function, advantages over mean and deviation of the whole group. So both
sides differ from the recipe in what TRL lacks: the decay of the rate and the baseline that leaves the answer out.

Seconds are of the wall: a step is from the end of the one before to its own, logging included; `generation` has the
sampling and the scoring, `rest` is the step without it. Each is the median over the steps but the first three, so that
two need not add up to the third; `quickest` is the least of those steps, which a busy machine disturbs less. What is
printed is the median of that over the rounds, and its ratio to trl's. Further columns: ours' own phases (a dash where a
side does not tell), the mean reward of the last steps, and the tokens that were generated in a step. An answer may end
early on both sides, so tokens can differ; with `mid`'s vocabulary the end of sequence almost never comes up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measuring import ROOT, Figures, alternate, header, load, table

RECIPE = ROOT / "examples/configs/grpo_copy_cpu.yaml"
RANKS = 2
SEED = 42
WARMUP_STEPS = 3
REWARDED_STEPS = 10
PHASES = ("logprobs", "train", "weight_sync")
METHODS = {
    "trl": None,
    "ours": "auto",
    "ours, two passes": "always",
}


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    weight_std: float
    digits: int
    new_tokens: int
    prompts: int
    answers: int

    @property
    def samples(self) -> int:
        return self.prompts * self.answers

    @property
    def length(self) -> int:
        """Tokens of a prompt, which ends with a sign of its own, and an answer."""
        return self.digits + 1 + self.new_tokens


SIZES = {
    "tiny": Size(2, 64, 128, 32, 0.05, digits=3, new_tokens=4, prompts=16, answers=16),
    "mid": Size(4, 256, 1024, 16384, 0.02, digits=9, new_tokens=32, prompts=8, answers=8),
}


def save_model(size: Size, folder: str) -> None:
    """Random weights, and a tokenizer with as many entries: the recipe's characters, then words nobody writes."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    from nemo_rl_mcore.data.tokenizer import CHAR_EOS, CHAR_PAD, CHAR_VOCABULARY

    logging.disable_progress_bar()
    words = [*CHAR_VOCABULARY, *(f"({n})" for n in range(len(CHAR_VOCABULARY), size.vocabulary))]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=CHAR_EOS, pad_token=CHAR_PAD)
    saved.save_pretrained(folder)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_attention_heads=4,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(32, size.length),
        initializer_range=size.weight_std,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[CHAR_EOS],
        pad_token_id=ids[CHAR_PAD],
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def overrides(size: Size, model: str, steps: int, recompute: str, log_dir: str) -> list[str]:
    """The recipe at this size, without validation, and with what TRL can do too."""
    values = {
        "policy.model": "null",
        "policy.model_name": model,
        "policy.tokenizer.name": model,
        "policy.train_global_batch_size": size.samples,
        "policy.train_micro_batch_size": size.samples // RANKS,
        "policy.logprob_batch_size": size.samples // RANKS,
        "policy.max_total_sequence_length": size.length,
        "policy.generation.max_new_tokens": size.new_tokens,
        "policy.recompute_prev_logprobs": recompute,
        "policy.megatron_cfg.scheduler.lr_decay_style": "constant",
        "grpo.adv_estimator.use_leave_one_out_baseline": "false",
        "grpo.num_prompts_per_step": size.prompts,
        "grpo.num_generations_per_prompt": size.answers,
        "grpo.max_num_steps": steps,
        "grpo.val_period": 0,
        "grpo.val_at_end": "false",
        "data.num_digits": size.digits,
        "seed": SEED,
        "cluster.cpu_workers_per_node": RANKS,
        "logger.log_dir": log_dir,
        "logger.tensorboard_enabled": "false",
    }
    return [f"{key}={value}" for key, value in values.items()]


def run_ours(size: Size, model: str, steps: int, recompute: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        given = overrides(size, model, steps, recompute, folder)
        command = [sys.executable, "-m", "nemo_rl_mcore", "grpo", "--config", str(RECIPE), *given]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit((run.stderr.strip() or run.stdout.strip() or "no message").splitlines()[-1])
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    # A phase that a step did without, such as the first one's weight_sync, is not in its row.
    series = {phase: [row.get(f"timing/{phase}", 0.0) for row in rows] for phase in ("generation", *PHASES)}
    series["step"] = [row["timing/total"] for row in rows]
    series["reward"] = [row["train/reward"] for row in rows]
    series["tokens"] = [row["train/mean_gen_tokens_per_sample"] * size.samples for row in rows]
    return series


def figures(series: dict[str, list[float]]) -> Figures:
    """One number for each series of a run's steps; what a side does not tell is left out."""
    rewards, tokens = series.pop("reward"), series.pop("tokens")
    series["rest"] = [a - b for a, b in zip(series["step"], series["generation"], strict=True)]
    medians = {name: statistics.median(values[WARMUP_STEPS:]) for name, values in series.items()}
    return medians | {
        "quickest": min(series["step"][WARMUP_STEPS:]),
        "reward": statistics.fmean(rewards[-REWARDED_STEPS:]),
        "tokens": statistics.fmean(tokens[WARMUP_STEPS:]),
    }


def child(request: str) -> None:
    given = json.loads(request)
    size, model, steps = SIZES[given["size"]], given["model"], given["steps"]
    if (recompute := METHODS[given["method"]]) is not None:
        series = run_ours(size, model, steps, recompute)
    else:
        from trl_grpo import run_trl

        series = run_trl(size, model, steps, threads=given["threads"], seed=SEED)
    print(json.dumps(figures(series)))


def compare(size: str, steps: int, rounds: int, threads: int) -> dict[str, Figures]:
    with tempfile.TemporaryDirectory() as model:
        save_model(SIZES[size], model)
        request = {"size": size, "model": model, "steps": steps, "threads": threads}
        return alternate(__file__, {name: request | {"method": name} for name in METHODS}, rounds)


def show(results: dict[str, Figures]) -> None:
    extra = {
        name: [
            *(f"{run[phase]:.4f}" if phase in run else "-" for phase in PHASES),
            f"{run['reward']:.3f}",
            f"{run['tokens']:.0f}",
        ]
        for name, run in results.items()
    }
    header(
        ("step s", "quickest s", "generation s", "rest s"),
        [phase.replace("weight_", "") for phase in PHASES] + ["reward", "tokens"],
    )
    table(results, {"step": 1, "quickest": 1, "generation": 1, "rest": 1}, extra)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl_threads", type=int, default=RANKS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Nothing is fetched, and a look at the hub would only wait for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.child is not None:
        child(args.child)
        return
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps: the first {WARMUP_STEPS} are not counted, so there must be more")
    results: dict[str, dict[str, Figures]] = {}
    for name in args.sizes:
        print(f"{name}: {SIZES[name]}, {args.steps} steps, {load()}", flush=True)
        results[name] = compare(name, args.steps, args.rounds, args.trl_threads)
        show(results[name])
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
