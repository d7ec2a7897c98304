"""Three migrated recipes of NeMo RL, at toy size, beside what its formulas give: rate, advantages, loss of each step.

The model is one of transformers, two layers deep; the run has two ranks, so that a batch is cut where theirs is whole.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_tokenizer import VOCABULARY, save_chat_tokenizer
from grpo_run import Run
from nemo_rl_formulas import (
    Faults,
    Rows,
    Trainer,
    advantages,
    clipped_loss,
    conversation,
    preference_loss,
    token_mean,
)

from nemo_rl_mcore.cli import main
from nemo_rl_mcore.driver.observability import read_rollouts
from nemo_rl_mcore.tools.migrate.migrate import migrate

pytestmark = pytest.mark.exhaustive

THEIRS = Path(__file__).parents[1] / "fixtures/nemo_rl"
FUSED = "qwen2.5-math7b-1n8g-megatron_fused_linear_logprobs"
STEPS = 4
CLOSE = 1e-5
"""Of numbers in float32, after some steps of Adam; loss of tokens that have 4 nats or so."""
MEGATRON = "policy.megatron_cfg"
SMALL = (
    *("policy.precision=float32", "policy.max_total_sequence_length=64", "policy.train_micro_batch_size=2"),
    *(f"{MEGATRON}.{kind}_model_parallel_size=1" for kind in ("tensor", "pipeline")),
    *(f"{MEGATRON}.sequence_parallel=false", f"{MEGATRON}.optimizer.bf16=false"),
    *(f"{MEGATRON}.optimizer.lr=3.0e-3", f"{MEGATRON}.optimizer.min_lr=3.0e-4"),
    *(f"{MEGATRON}.optimizer.weight_decay=0.1", f"{MEGATRON}.scheduler.lr_warmup_init=1.0e-4"),
    *(f"{MEGATRON}.scheduler.lr_warmup_iters=2", f"{MEGATRON}.scheduler.lr_decay_iters=5"),
    *("cluster.gpus_per_node=0", "checkpointing.enabled=false", "data.shuffle=false"),
    *("logger.wandb_enabled=false", "logger.tensorboard_enabled=false"),
)
"""In keys of theirs."""
RATES = (1e-4, 1.55e-3, 3e-3)
"""Of the first calls of `train` there."""
ROWS = [{"input": f"{n}+{n * 7 % 10}?", "output": f"{n + n * 7 % 10}"} for n in range(3, 23)]
PAIRS = [
    {"prompt": row["input"], "chosen": row["output"], "rejected": f"{'no' * (n % 3)}?"}
    for n, row in enumerate(ROWS)
]
REWARD = """
def digits(responses):
    return [sum(ord(c) % 7 for c in r) / (1 + len(r)) + len(r) / 50 for r in responses]
"""


@dataclass
class Finished:
    """A run that has ended: the recipe of theirs, as it was computed, and the folder of all that is of it."""

    theirs: dict[str, Any]
    folder: Path

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]

    def trainer(self, steps, faults):
        return Trainer(self.theirs, self.folder / "model", steps, faults)


def finished(folder, algorithm, base, theirs, ours=()):
    """Migrate, and run what was written."""
    model = folder / "model"
    save_model(model)
    tokenizer = save_chat_tokenizer(
        folder / "tokenizer"
    )  # beside the model, whose family has a class of its own
    for name, rows in (("rows", ROWS), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "toy_rewards.py").write_text(REWARD)
    changes = [
        *SMALL,
        f"policy.model_name={model}",
        f"policy.tokenizer.name={tokenizer}",
        f"{algorithm}.max_num_steps={STEPS}",
        *theirs,
    ]
    written = folder / "ours.yaml"
    assert main(["migrate", str(THEIRS / f"{base}.yaml"), "--output", str(written), *changes]) == 0
    run = Run(folder / "run", "++cluster.cpu_workers_per_node=2", *ours, algorithm=algorithm, recipe=written)
    run.finish(within_s=300)
    return Finished(migrate(THEIRS / f"{base}.yaml", changes).read.tree, folder)


def save_model(folder):
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.15, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def differences(told, expected):
    return {name for name, value in expected.items() if abs(told[name] - value) > CLOSE * max(1, abs(value))}


GRPO = (
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=8"),
    *("grpo.val_at_start=false", "grpo.val_period=0", "policy.generation.backend=megatron"),
    *("policy.generation.max_new_tokens=8", f"{MEGATRON}.scheduler.lr_decay_style=linear"),
    "loss_fn.reference_policy_kl_penalty=0.3",
    "data.train={dataset_name: ResponseDataset, data_path: $ROWS, split_validation_size: 0}",
    *("data.default.prompt_file=null", "env=null"),
)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    ours = ("++env.rewards={digits: 'toy_rewards:digits'}", "++logger.answers_with_tokens=16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield finished(folder, "grpo", "grpo_math_1B_megatron", with_rows(GRPO, folder), ours)


def with_rows(overrides, folder):
    return tuple(
        text.replace("$ROWS", str(folder / "rows.jsonl")).replace("$PAIRS", str(folder / "pairs.jsonl"))
        for text in overrides
    )


def wrong_in_grpo(run, faults):
    """What of the run is not what the formulas give."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder / "tokenizer")
    ids_of = {tokenizer.decode([token]): token for token in range(VOCABULARY)}
    trainer, wrong = run.trainer(2, faults), set[str]()
    for step, told in enumerate(run.metrics, 1):
        answers = [*read_rollouts(run.folder / f"run/rollouts/step_{step}.jsonl.gz")]
        assert [answer["prompt_index"] for answer in answers] == [
            (4 * (step - 1) + place // 4) % len(ROWS) for place in range(16)
        ], "rows as they lie"
        rows = Rows.of([_answered(tokenizer, ids_of, answer) for answer in answers])
        gains = torch.cat([
            advantages(torch.tensor([answer["reward"] for answer in answers[start : start + 4]]), faults)
            for start in range(0, 16, 4)
        ])  # fmt: skip
        logged = torch.tensor([answer["advantage"] for answer in answers])
        if not torch.allclose(gains, logged, rtol=CLOSE, atol=CLOSE):
            wrong.add("advantage")
        with torch.no_grad():
            before, reference = trainer.logprobs(rows), trainer.logprobs(rows, trainer.reference)
        sums = dict.fromkeys(("train/loss", "train/kl_penalty"), 0.0)
        norms = list[float]()
        for optimizer_step, batch in enumerate((slice(0, 8), slice(8, 16))):
            mask, loss_fn = rows.mask[batch], run.theirs["loss_fn"]
            actor, k3 = clipped_loss(
                trainer.logprobs(rows[batch]), before[batch], reference[batch],
                gains[batch].unsqueeze(1).expand_as(mask), mask, loss_fn, faults,
            )  # fmt: skip
            loss = actor + loss_fn["reference_policy_kl_penalty"] * k3
            for name, value in (("train/loss", loss), ("train/kl_penalty", k3)):
                sums[name] += value.item() * float(mask.sum())
            norms.append(trainer.apply(loss, optimizer_step))
        # Of several batches here each token counts alike in what is logged; there each batch does.
        means = {name: value / float(rows.mask.sum()) for name, value in sums.items()}
        norm = {"train/grad_norm": sum(norms) / 2}
        wrong |= differences(told, {**means, **norm, "train/lr": trainer.rate(1)})
        trainer.calls += 1
    return wrong


def _answered(tokenizer, ids_of, answer):
    message = [{"role": "user", "content": ROWS[answer["prompt_index"]]["input"]}]
    shown = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(shown, add_special_tokens=False)["input_ids"]
    sampled = [ids_of[text] for text in answer["tokens"]["text"]]
    return [*prompt, *sampled], [*[False] * len(prompt), *(bool(one) for one in answer["tokens"]["mask"])]


def test_grpo(grpo):
    """Two optimizer steps a rollout, with clipped ratios and a reference, on packed rows."""
    assert wrong_in_grpo(grpo, Faults()) == set()
    assert len(grpo.metrics) == STEPS
    assert max(abs(row["train/loss"]) for row in grpo.metrics) > 100 * CLOSE


NO_ANSWERS = (
    "policy.train_global_batch_size=4",
    "data.validation=null",
    f"{MEGATRON}.scheduler.lr_decay_style=cosine",
)
DPO = (
    *NO_ANSWERS,
    *(
        "dpo.val_period=0",
        "dpo.val_at_start=false",
        "dpo.sft_loss_weight=0.2",
        "policy.train_micro_batch_size=1",
    ),
    "data.train={dataset_name: BinaryPreferenceDataset, data_path: $PAIRS, split_validation_size: 0}",
)
SFT = (
    *NO_ANSWERS,
    *("sft.val_period=0", "sft.val_at_start=false", "data.default.prompt_file=null"),
    "data.train={dataset_name: ResponseDataset, data_path: $ROWS, split: train, output_key: output}",
    "data.train.split_validation_size=0",
)


@pytest.fixture(scope="module")
def dpo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    return finished(folder, "dpo", f"dpo-{FUSED}", with_rows(DPO, folder))


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    return finished(folder, "sft", f"sft-{FUSED}", with_rows(SFT, folder))


def wrong_in_dpo(run, faults):
    """What of the run is not what the formulas give; a call of `train` takes the rows of four pairs."""

    def rows_of(tokenizer, pair):
        asked = {"role": "user", "content": pair["prompt"]}
        answers = [{"role": "assistant", "content": pair[key]} for key in ("chosen", "rejected")]
        return [conversation(tokenizer, [asked, answer], opened=False, faults=faults) for answer in answers]

    def loss_of(trainer, rows):
        with torch.no_grad():
            reference = trainer.logprobs(rows, trainer.reference)
        return preference_loss(trainer.logprobs(rows), reference, rows.mask, run.theirs["dpo"], faults)

    return _wrong_in_given(run, PAIRS, rows_of, loss_of, faults)


def wrong_in_sft(run, faults):
    """What of the run is not what the formulas give; the recipe has a template, which ends no answer."""

    def rows_of(tokenizer, row):
        tokenizer.chat_template = run.theirs["policy"]["tokenizer"]["chat_template"]
        messages = [
            {"role": "user", "content": row["input"]},
            {"role": "assistant", "content": row["output"]},
        ]
        opened = run.theirs["data"]["add_generation_prompt"]
        return [conversation(tokenizer, messages, opened=opened, faults=faults)]

    def loss_of(trainer, rows):
        return -token_mean(trainer.logprobs(rows), rows.mask, faults)

    return _wrong_in_given(run, ROWS, rows_of, loss_of, faults)


def _wrong_in_given(run, data, rows_of, loss_of, faults):
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder / "tokenizer")
    trainer, wrong = run.trainer(1, faults), set[str]()
    for step, told in enumerate(run.metrics):
        rows = Rows.of([row for one in data[4 * step : 4 * step + 4] for row in rows_of(tokenizer, one)])
        loss = loss_of(trainer, rows)
        expected = {"train/lr": trainer.rate(0), "train/loss": loss.item()}
        wrong |= differences(told, {**expected, "train/grad_norm": trainer.apply(loss, 0)})
        trainer.calls += 1
    return wrong


def test_dpo(dpo):
    """Fused log-probabilities, pairs of which the whole turn counts, and the likelihood of the chosen answers."""
    assert wrong_in_dpo(dpo, Faults()) == set()
    assert len(dpo.metrics) == STEPS
    assert [row["train/lr"] for row in dpo.metrics][:3] == pytest.approx(RATES[:3])


def test_sft(sft):
    """Fused log-probabilities, a template of the recipe, and an end of sequence that it does not write."""
    assert wrong_in_sft(sft, Faults()) == set()
    assert len(sft.metrics) == STEPS
    assert [row["train/lr"] for row in sft.metrics][:3] == pytest.approx(RATES[:3])


WRONG = {"grpo": wrong_in_grpo, "dpo": wrong_in_dpo, "sft": wrong_in_sft}


@pytest.mark.parametrize(
    ("algorithm", "faults", "seen"),
    [
        *((algorithm, Faults(ticks=2), "train/lr") for algorithm in WRONG),
        ("grpo", Faults(leave_one_out=False), "advantage"),
        ("grpo", Faults(normalize=False), "advantage"),
        ("grpo", Faults(denominator="rows"), "train/loss"),
        ("dpo", Faults(denominator="pairs"), "train/loss"),
        ("dpo", Faults(imitated="answer"), "train/loss"),
        ("sft", Faults(denominator="rows"), "train/loss"),
        ("sft", Faults(imitated="unended"), "train/loss"),
    ],
)
def test_another_formula_is_seen(request, algorithm, faults, seen):
    assert seen in WRONG[algorithm](request.getfixturevalue(algorithm), faults)
