"""Protocol fakes of what the algorithms are given, and small recipes of each.

All fakes of a run write into one list of calls, so that a test reads what happened in which order.
"""

import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from refusals import checked_run

from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.answers import PreferenceSource
from nemo_rl_mcore.data.datasets import DigitTaskSource
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.algorithms.algorithm import StepOutcome
from nemo_rl_mcore.driver.algorithms.distillation import DistillationTrainer
from nemo_rl_mcore.driver.algorithms.dpo import DPOTrainer
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer
from nemo_rl_mcore.driver.algorithms.loop import TrainingLoop
from nemo_rl_mcore.driver.algorithms.ppo import PPOTrainer
from nemo_rl_mcore.driver.algorithms.run_checkpoints import RunCheckpoints
from nemo_rl_mcore.driver.algorithms.sft import SFTTrainer
from nemo_rl_mcore.driver.rollouts.ledger import Ledger
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector
from nemo_rl_mcore.driver.rollouts.scheduler import Step
from nemo_rl_mcore.driver.rollouts.start import draw_of, limits_of, scheduler_of
from nemo_rl_mcore.environment.games import ArithmeticEnvironment
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.errors import RanksFailedError, RunStoppedError
from nemo_rl_mcore.losses.base import MetricKind

TOKENIZER = load_tokenizer("char")


def train_result(reasons=(None, None), **metrics):
    """What `train` returns for two optimizer steps of 30 and 10 tokens; further metrics are means over tokens."""
    own = {name: (MetricKind.TOKENS, values) for name, values in metrics.items()}
    kinds = {
        "loss": (MetricKind.TOKENS, [0.5, 1.5]),
        "probs_ratio_min": (MetricKind.MIN, [0.5, 0.25]),
        "probs_ratio_max": (MetricKind.MAX, [1.0, 3.0]),
        "values_min": (MetricKind.MIN, [math.inf, math.inf]),
        "num_valid_samples": (MetricKind.NONE, [10.0, 30.0]),
    } | own
    return {
        "all_mb_metrics": {name: values for name, (_, values) in kinds.items()}
        | {
            "lr": [0.5, 0.25],
            "wd": [0.1, 0.1],
            "global_valid_seqs": [1.0, 1.0],
            "global_valid_toks": [30.0, 10.0],
        },
        "metric_kinds": {name: kind for name, (kind, _) in kinds.items()},
        "grad_norm": torch.tensor([1.0, 2.0]),
        "update_successful": not any(reasons),
        "skip_reasons": list(reasons),
        "peak_memory_gib": 1.5,
    }


@dataclass(frozen=True)
class TrainCall:
    data: BatchedDataDict
    loss_fn: object
    eval_mode: bool
    gbs: int | None
    mbs: int | None


class FakeModel:
    """Keeps what it is trained on; `reasons` say which optimizer steps are skipped.

    looks: at a copy that is being written, until it is; on_written: what happens then.
    """

    def __init__(self, calls=None, name="", reasons=(None, None)):
        self.calls = [] if calls is None else calls
        self.name, self.reasons = f" {name}" if name else "", reasons
        self.trained, self.evaluated, self.loaded = [], [], None
        self.alive, self.updates, self.unknown_update = True, 0, False
        self.looks, self.on_written, self._copy = 1, lambda: None, None

    def has_unknown_update(self):
        return self.unknown_update

    def serves(self):
        return self.alive

    def restart(self):
        self.calls.append(f"restart{self.name}")
        self.alive, self._copy = True, None

    @property
    def batches(self):
        return [call.data for call in self.trained]

    @property
    def loss_fns(self):
        return [call.loss_fn for call in self.trained]

    def train(self, data, loss_fn, *, eval_mode=False, gbs=None, mbs=None):
        self.calls.append(f"{'evaluate' if eval_mode else 'train'}{self.name}")
        # What came in: later steps may add to the batch.
        call = TrainCall(BatchedDataDict(data), loss_fn, eval_mode, gbs, mbs)
        (self.evaluated if eval_mode else self.trained).append(call)
        reasons = ("eval_mode",) * 2 if eval_mode else self.reasons
        pairs = {"rewards_chosen_mean": [1.0, 2.0], "rewards_rejected_mean": [0.5, 0.5]}
        return train_result(reasons, accuracy=[0.25, 0.75], **pairs)

    def abort_train_step(self):
        self.calls.append(f"abort{self.name}")

    def save_checkpoint(self, folder, *, wait=True):
        self.calls.append(f"save{self.name}")
        path, weights = Path(folder) / "weights", str(len(self.trained))
        if wait:
            path.write_text(weights)
        else:
            self._copy = [self.looks, path, weights]

    def checkpoint_written(self, *, wait=True):
        if not self.alive:
            raise RanksFailedError(f"{self.name} has lost ranks")
        if self._copy is None:
            raise RunStoppedError("no copy was taken")
        self._copy[0] -= 1
        if self._copy[0] >= 0 and not wait:
            return None
        _, path, weights = self._copy
        self._copy = None
        self.on_written()
        path.write_text(weights)
        return 0.5

    def load_checkpoint(self, folder, *, weights_only=False):
        self.calls.append(f"load{self.name}")
        self.loaded = (Path(folder) / "weights").read_text()


class FakePolicy(FakeModel):
    """A policy and the engine that samples from it.

    Sample 0 of every third prompt is two digits right, all other answers stop at once; sample 1 never finishes.
    """

    def __init__(self, calls=None, reasons=(None, None)):
        super().__init__(calls, reasons=reasons)
        self.versions = []

    def generate(self, data, *, step, greedy=False):
        self.calls.append("validate" if greedy else "generate")
        rows = []
        for prompt, index, sample in zip(
            data["input_ids"].tolist(),
            data["prompt_index"].tolist(),
            data["sample_index"].tolist(),
            strict=True,
        ):
            digits = prompt[:2] if sample == 0 and index % 3 == 0 else []
            rows.append([*digits, TOKENIZER.eos_token_id])
        tokens = torch.zeros(len(rows), 3, dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        finished = torch.tensor([sample != 1 for sample in data["sample_index"].tolist()])
        lengths = torch.tensor([len(row) for row in rows])
        return BatchedDataDict(
            tokens=tokens, logprobs=-torch.ones(len(rows), 3), lengths=lengths, finished=finished
        )

    def update_weights(self, version):
        self.calls.append("update_weights")
        self.versions.append((version, len(self.trained)))

    def offload(self):
        self.calls.append("offload")

    def get_logprobs(self, data, *, trained_only=False):
        self.calls.append("logprobs")
        assert not trained_only or "token_mask" in data
        return BatchedDataDict(logprobs=torch.zeros(data["input_ids"].shape))

    def get_reference_policy_logprobs(self, data, *, trained_only=False):
        """Another number for each column, so that a shift shows."""
        self.calls.append("reference")
        columns = torch.arange(data["input_ids"].shape[1], dtype=torch.float32)
        asked = data["token_mask"] if trained_only else torch.ones(data["input_ids"].shape)
        return BatchedDataDict(reference_logprobs=columns * asked)


class FakeCritic(FakeModel):
    """Expects a tenth of the column's number of every state."""

    def __init__(self, calls, reasons=(None, None)):
        super().__init__(calls, "value", reasons)

    def get_values(self, data):
        self.calls.append("values")
        assert set(data) == {"input_ids", "input_lengths"}
        rows, columns = data["input_ids"].shape
        return BatchedDataDict(values=torch.arange(float(columns)).div(10).expand(rows, columns).clone())


class FakeTeacher(FakeModel):
    """Names the first k ids at every position."""

    def __init__(self, calls):
        super().__init__(calls, "teacher")
        self.asked = []

    def get_topk_logits(self, data, k, *, trained_only=False):
        self.calls.append("topk")
        self.asked.append((set(data), k))
        shape = data["input_ids"].shape
        return BatchedDataDict(
            topk_logits=torch.ones(*shape, k),
            topk_indices=torch.arange(k).expand(*shape, k),
            logsumexp=torch.full(shape, 2.0),
        )


class Notes:
    """What the run told its observer."""

    def __init__(self):
        self.steps, self.phases, self.sampled, self.saved = {}, [], [], []

    @contextmanager
    def phase(self, name):
        self.phases.append(name)
        yield

    @contextmanager
    def attempt(self):
        before = len(self.sampled)
        try:
            yield
        except BaseException:
            del self.sampled[before:]
            raise

    @contextmanager
    def redoing(self):
        before = len(self.sampled), len(self.phases)
        with self.phase("recovery"):
            yield
        del self.sampled[before[0] :], self.phases[before[1] + 1 :]

    def checkpointed(self, step):
        self.saved.append(step)

    def log(self, step, metrics):
        self.steps[step] = dict(metrics)

    def add_samples(self, samples):
        self.sampled += samples


LOOP = {"max_num_steps": 2, "max_val_samples": 4}
ROLLOUT = LOOP | {"num_prompts_per_step": 4, "num_generations_per_prompt": 3}
POLICY = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32},
    "tokenizer": {"name": "char"},
    "train_global_batch_size": 4,
    "train_micro_batch_size": 1,
    "max_total_sequence_length": 8,
    "megatron_cfg": {"optimizer": {"lr": 1e-3}},
    "generation": {"max_new_tokens": 3},
}
SECTIONS = {
    "grpo": {"grpo": ROLLOUT, "loss_fn": {"reference_policy_kl_penalty": 0.0}},
    "ppo": {
        "ppo": ROLLOUT,
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "value": {"optimizer": {"lr": 1e-3}},
    },
    "dpo": {"dpo": LOOP},
    "sft": {"sft": LOOP},
    "distillation": {"distillation": ROLLOUT | {"topk_logits_k": 2}, "teacher": {"init_checkpoint": "there"}},
}
"""What the smallest recipe of each algorithm has beside policy and data."""


def recipe(algorithm, policy=None, **sections):
    """A recipe on two digits; sections are merged into those above, and a section that is None is left out."""
    tree = {
        "seed": 1,
        "policy": POLICY | (policy or {}),
        "data": {"dataset_name": "copy", "num_digits": 2},
    } | SECTIONS[algorithm]
    for name, given in sections.items():
        tree[name] = tree.get(name, {}) | given if isinstance(given, dict) else given
    kept = {name: section for name, section in tree.items() if section is not None}
    return checked_run(RUN_CONFIGS[algorithm], kept)


LARGE_REWARDS = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1e4}
"""Reward scaling under which an answer that is partly right has an advantage above 100."""


def source(config):
    return DigitTaskSource(config.data.dataset_name, config.data.num_digits, config.seed)


def collector(config, engine):
    environments = LocalEnvironments(ArithmeticEnvironment())
    return RolloutCollector(engine, TOKENIZER, config.data.max_prompt_length, environments)


_TRAINERS = {
    "grpo": GRPOTrainer,
    "ppo": PPOTrainer,
    "dpo": DPOTrainer,
    "sft": SFTTrainer,
    "distillation": DistillationTrainer,
}


def trainer(config, policy=None, **parts):
    """The algorithm of a recipe over fakes; parts: what it has in place of its own."""
    policy = policy or FakePolicy()
    prompts = parts.get("prompts") or source(config)
    match config.algorithm:
        case "ppo":
            parts.setdefault("critic", FakeCritic(policy.calls))
        case "distillation":
            parts.setdefault("teacher", FakeTeacher(policy.calls))
        case "dpo":
            online = bool(config.dpo.num_generations_per_prompt)
            parts.setdefault("pairs", None if online else PreferenceSource(prompts, TOKENIZER, made_up=True))
    given = {"collector": collector(config, policy), "observer": Notes()} | parts | {"prompts": prompts}
    return _TRAINERS[config.algorithm](config, policy, **given)


def run(config, policy=None, **parts):
    """Train it to its end."""
    algorithm = trainer(config, policy, **parts)
    train(algorithm)
    return algorithm


def scheduled(algorithm, after=0):
    """The algorithm with what opens its steps behind one, where it samples; its groups are in memory alone."""
    config, engine = algorithm.config, algorithm.collector
    if not config.generations_per_prompt or algorithm.rollouts is not None:
        return algorithm
    draw, events = draw_of(config, algorithm.prompts, engine), []
    ledger = Ledger(limits_of(config), events.append, version=after)
    scheduler = scheduler_of(config, ledger, {}, engine.generation, draw)
    return replace(algorithm, rollouts=scheduler, collector=replace(engine, generation=scheduler))


def train(algorithm, checkpoints=None):
    """Train an algorithm to the end of its run; of PPO with its critic."""
    algorithm = scheduled(algorithm, (checkpoints and checkpoints.resumed_step) or 0)
    models = {"policy": algorithm.policy}
    if algorithm.config.algorithm == "ppo":
        models["value"] = algorithm.critic
    engine = algorithm.collector.generation
    parts = algorithm.config, algorithm, models, engine, algorithm.observer, checkpoints or RunCheckpoints()
    deque(TrainingLoop(*parts).steps(), maxlen=0)  # to its end


def train_step(algorithm, number):
    """Train a step of an algorithm, without the loop."""
    with algorithm.open_step(number) as step:
        judged = algorithm.judge(step)
        step.finishing()
        return algorithm.update(step, judged)


def select(rollout, rows):
    """These rows of a rollout, in this order."""
    named = ([of_row[row] for row in rows] for of_row in (rollout.prompts, rollout.responses))
    return Rollout(rollout.batch.select_indices(rows), *named)


# The loop over fakes of an algorithm, its models and the engine


BATCH = BatchedDataDict(
    rewards=torch.tensor([1.0]), prompt_index=torch.tensor([7]), sample_index=torch.tensor([0])
)


@dataclass
class FakeAlgorithm:
    """Reports the number of its step, and as many optimizer steps as `reasons` has for it.

    events: what happens in the middle of which part of which step.
    """

    calls: list[str]
    reasons: dict[int, list[str | None]] = field(default_factory=dict)
    events: dict = field(default_factory=dict)

    @property
    def collector(self):
        return SimpleNamespace(generation=FakeEngine(self.calls))

    @contextmanager
    def open_step(self, number):
        yield Step(number)

    def judge(self, step):
        self.calls.append(f"step {step.number}")
        self._meet("prepare", step.number)

    def update(self, opened, judged):
        step = opened.number
        self._meet("update", step)
        return StepOutcome(
            {"train/number": float(step), "train/loss": float(step)}, self.reasons.get(step, [None]), BATCH
        )

    def redo(self, step):
        self.calls.append(f"redo {step}")
        self._meet("redo", step)
        return StepOutcome({"train/loss": float(step)}, [None], BATCH)

    def checkpointed(self, step): ...

    def validate(self, step):
        self.calls.append(f"validate {step}")
        self._meet("validate", step)
        return {"validation/number": float(step)}

    def _meet(self, part, step):
        if (event := self.events.get((part, step))) is not None:
            event()
            self.calls.append(f"{part} {step} goes on")


class FakeEngine:
    def __init__(self, calls):
        self.calls = calls

    def update_weights(self, version):
        self.calls.append(f"weights {version}")

    def offload(self):
        self.calls.append("asleep")


@dataclass
class LoopRun:
    """A run, which `go` starts: what was called, in which order, and what was noted."""

    config: object
    checkpoints: RunCheckpoints
    algorithm: FakeAlgorithm
    notes: Notes
    models: dict[str, FakeModel]

    @property
    def calls(self):
        return self.algorithm.calls

    def go(self):
        engine = FakeEngine(self.calls)
        loop = TrainingLoop(self.config, self.algorithm, self.models, engine, self.notes, self.checkpoints)
        deque(loop.steps(), maxlen=0)  # to its end


def loop_run(loop=None, checkpoints=None, reasons=None, events=None, algorithm="grpo", **top):
    calls = []
    config = recipe(algorithm, **{algorithm: {"max_num_steps": 3} | (loop or {})}, **top)
    models = {"policy": FakeModel(calls, "policy"), "value": FakeModel(calls, "value")}
    fake = FakeAlgorithm(calls, reasons or {}, events or {})
    return LoopRun(config, checkpoints or RunCheckpoints(), fake, Notes(), models)
