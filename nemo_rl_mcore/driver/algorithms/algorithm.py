"""Define the base class of all algorithms: their steps, validations, and the metrics of both."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, Protocol

import torch

from nemo_rl_mcore.config import (
    DistillationMasterConfig,
    DPOMasterConfig,
    GRPOMasterConfig,
    PPOMasterConfig,
    RunConfig,
    SFTMasterConfig,
)
from nemo_rl_mcore.config.algorithm import GivenRowsConfig, RolloutConfig
from nemo_rl_mcore.config.master import reader_of_prev_logprobs
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.batched_data_dict import EPISODE
from nemo_rl_mcore.data.datasets import Prompt, PromptSource
from nemo_rl_mcore.data.tokenizer import Tokenizer, token_texts
from nemo_rl_mcore.driver import activity
from nemo_rl_mcore.driver.algorithms.advantages import group_statistics
from nemo_rl_mcore.driver.algorithms.mismatch import Mismatch
from nemo_rl_mcore.driver.observability.sinks import Sample, TokenTable, TurnRecord
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.player import Rollout, RolloutCollector, in_environment, prompt_lengths
from nemo_rl_mcore.driver.rollouts.scheduler import Scheduler, Step
from nemo_rl_mcore.driver.rollouts.transcript import (
    REPLIES,
    REWARDS_PREFIX,
    TURN_OF_TOKEN,
    WEIGHT_VERSIONS,
    EpisodeRows,
    episode_metrics,
    first_rows,
    trained_columns,
    uncounted_rows,
)
from nemo_rl_mcore.losses import ClippedPGLossFn, DPOLossFn, LossFunction, make_loss
from nemo_rl_mcore.rank.sums import EXTREMA, NEUTRAL, combine_steps
from nemo_rl_mcore.rank.train_step import EMPTY_STEP

_DECIMALS = 4


def samples_of(
    rollout: Rollout, step: int, tokenizer: Tokenizer, *, tables: int = 0, of_validation: bool = False
) -> list[Sample]:
    """Return a Sample for every row of a step or a validation; the first `tables` Samples include token tables."""
    batch = rollout.batch
    # The version of all tokens if the engine does not report versions.
    current = step if of_validation else step - 1
    versions = batch.get(WEIGHT_VERSIONS, torch.full((batch.size, 1), current))
    newest = versions.amax(1)
    columns = {
        "prompt_index": batch["prompt_index"],
        "sample_index": batch["sample_index"],
        "reward": rollout.environment_rewards,
        "shaped_reward": batch["rewards"],
        "prompt_tokens": prompt_lengths(batch),
        "response_tokens": batch["token_mask"].sum(1).long(),
        "truncated": ~batch["finished"],
        "weight_version_min": torch.where(versions < 0, newest.unsqueeze(1), versions).amin(1),
        "weight_version_max": newest,
    }
    if not of_validation:
        columns["sample_mask"] = batch["sample_mask"]
    if "advantages" in batch:
        mask, advantages = batch["token_mask"], batch["advantages"]
        # A response without tokens has a mean that is not finite.
        columns["advantage"] = (advantages * mask).sum(1) / mask.sum(1)
        columns["advantage_first"] = advantages.gather(1, mask.argmax(1, keepdim=True)).squeeze(1)
    values: list[list[Any]] = [column.tolist() for column in columns.values()]  # pyright: ignore[reportUnknownMemberType]
    by_name = {  # None for a reward that overflows float32
        name.removeprefix(REWARDS_PREFIX): [r if math.isfinite(r) else None for r in column.tolist()]
        for name, column in batch.items()
        if name.startswith(REWARDS_PREFIX)
    }

    def gives(row: int, reward: str) -> bool:
        """Return False for a reward that only other environments give."""
        of_one = not rollout.prompts[row].env_name
        return of_one or any(reward in reply.get("rewards", ()) for reply in batch[REPLIES][row])

    return [
        Sample(
            step=step,
            prompt=rollout.prompts[row].text,
            answer=rollout.prompts[row].answer,
            response=rollout.responses[row],
            source=rollout.prompts[row].source,
            rewards={name: rewards[row] for name, rewards in by_name.items() if gives(row, name)} or None,
            turns=[*_turns(batch, row, tokenizer)] if TURN_OF_TOKEN in batch else None,
            tokens=_token_table(batch.slice(row, row + 1), tokenizer, of_validation)
            if row < tables
            else None,
            **dict(zip(columns, of_row, strict=True)),
        )
        for row, of_row in enumerate(zip(*values, strict=True))
    ]


def _turns(batch: BatchedDataDict, row: int, tokenizer: Tokenizer) -> Iterator[TurnRecord]:
    ids_S, turn_S = batch["input_ids"][row].numpy(), batch[TURN_OF_TOKEN][row].numpy()
    replies = batch[REPLIES][row]
    turns = [*range(1, len(replies) + 1)]
    if EPISODE in batch:
        turns = [turn for turn in turns if turn in turn_S]
    for place, turn in enumerate(turns):
        # Record the observation before each answer; the model never sees one after its last answer.
        for role, content in replies[turn - 2].get("observation", ()) if place else ():
            yield TurnRecord(role=role, content=content)
        reply = replies[turn - 1]
        said = TurnRecord(role="assistant", content=tokenizer.decode(ids_S[turn_S == turn].tolist()))
        if not reply.keys() & {"dropped", "unscored"}:
            said["reward"] = reply["reward"]
        yield said


def _token_table(batch: BatchedDataDict, tokenizer: Tokenizer, of_validation: bool) -> TokenTable:
    own = slice(int(prompt_lengths(batch)), int(batch["input_lengths"]))
    ids_N, mask_N = batch["input_ids"][0, own], batch["token_mask"][0, own]
    sampled = mask_N.bool().tolist()

    def numbers(name: str) -> list[float | None] | None:
        if name not in batch:
            return None
        values = zip(batch[name][0, own].tolist(), sampled, strict=True)
        # Turn -0.0 into 0.0.
        return [
            (round(value, _DECIMALS) or 0.0) if drawn and math.isfinite(value) else None
            for value, drawn in values
        ]

    return TokenTable(
        text=token_texts(tokenizer, ids_N.tolist()),
        turn=batch.get(TURN_OF_TOKEN, batch["token_mask"])[0, own].int().tolist(),
        mask=None if of_validation else (mask_N * batch["sample_mask"]).bool().int().tolist(),
        generation_logprobs=numbers("generation_logprobs"),
        prev_logprobs=numbers("prev_logprobs"),
        advantages=numbers("advantages"),
    )


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Return metrics of the answers' rewards and lengths, and of their advantages if the batch has any.

    If there are several environments, each one's metrics are added, as train/env/math/reward. An answer is an episode,
    whose prompt is in its first row. Dropped episodes contribute only their number and their tokens, which ran through
    the model; if all episodes are dropped, there are no other metrics.
    """
    metrics, parts = _rollout_metrics(rollout), rollout.by_environment()
    if len(parts) > 1:  # an environment's own rewards have no mean over all rows
        metrics = {key: value for key, value in metrics.items() if not key.startswith(REWARDS_PREFIX)}
    for name, part in parts.items() if "" not in parts else ():
        metrics |= {in_environment(key, name): value for key, value in _rollout_metrics(part).items()}
    return metrics


def _rollout_metrics(rollout: Rollout) -> dict[str, float]:
    batch, episodes = rollout.batch, EpisodeRows.of(rollout.batch)
    metrics = {"train/total_num_tokens": float(batch["input_lengths"].sum())} | episode_metrics(batch)
    if not len(episodes.first):
        return metrics
    prompt_index = batch["prompt_index"][episodes.first]
    environment_rewards = rollout.environment_rewards[episodes.first]
    response_lengths = episodes.total(batch["token_mask"].sum(1))
    shaped = group_statistics(prompt_index, batch["rewards"][episodes.first], leave_one_out=False)
    one_group = torch.zeros_like(prompt_index)
    of_all = group_statistics(one_group, environment_rewards, leave_one_out=False)
    within_groups = group_statistics(prompt_index, environment_rewards, leave_one_out=False)
    metrics |= {
        "train/reward": float(environment_rewards.mean()),
        "train/reward_min": float(environment_rewards.min()),
        "train/reward_max": float(environment_rewards.max()),
        "train/reward_std": float(of_all.std[0]),
        "train/reward_std_within_groups": float(within_groups.std.mean()),
        "train/mean_prompt_length": float(prompt_lengths(batch)[episodes.first].float().mean()),
        "train/mean_gen_tokens_per_sample": float(response_lengths.mean()),
        "train/max_gen_tokens_per_sample": float(response_lengths.max()),
        "train/truncation_rate": float((~batch["finished"][episodes.first]).float().mean()),
        "train/groups_with_signal": float((shaped.std != 0).float().mean()),
    }
    if "advantages" in batch:
        total = episodes.joined(batch["advantages"] * batch["token_mask"]).sum()
        metrics["train/advantages_mean"] = float(total / response_lengths.sum())
    return metrics


def train_metrics(result: Mapping[str, Any], prefix: str = "train") -> dict[str, float]:
    """Return one number per metric for all optimizer steps of a rollout; extrema over no tokens are left out."""
    per_step: Mapping[str, list[float]] = result["all_mb_metrics"]
    counts = per_step["global_valid_seqs"], per_step["global_valid_toks"]
    combined = {
        name: value
        for name, kind in result["metric_kinds"].items()
        if (value := combine_steps(kind, per_step[name], *counts)) != NEUTRAL[kind] or kind not in EXTREMA
    }
    combined |= {name: sum(per_step[name]) for name in ("global_valid_seqs", "global_valid_toks")}
    combined |= {name: per_step[name][-1] for name in ("lr", "wd")}
    norms = [
        norm
        for norm, reason in zip(result["grad_norm"].tolist(), result["skip_reasons"], strict=True)
        if reason != EMPTY_STEP
    ]
    combined["grad_norm"] = sum(norms) / len(norms) if norms else 0.0
    combined["update_successful"] = float(result["update_successful"])
    metrics = {f"{prefix}/{name}": value for name, value in combined.items()}
    if (peak := result.get("peak_memory_gib")) is not None:
        metrics[f"performance/{'' if prefix == 'train' else f'{prefix}_'}peak_memory_gib"] = peak
    return metrics


def join_results(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the results of several calls to `Policy.train` into one, for `train_metrics`."""
    names = dict.fromkeys(name for result in results for name in result["all_mb_metrics"])
    kinds = {name: kind for result in results for name, kind in result["metric_kinds"].items()}
    per_step: dict[str, list[float]] = {name: [] for name in names}
    for result in results:
        for name, values in per_step.items():
            # A call may lack a metric that other calls returned, such as extrema over no tokens.
            missing = [NEUTRAL[kinds[name]]] * len(result["skip_reasons"]) if name in kinds else []
            values += result["all_mb_metrics"].get(name, missing)
    row_tables = [result["row_table"] for result in results if "row_table" in result]
    return {
        **({"row_table": torch.cat(row_tables)} if row_tables else {}),
        "all_mb_metrics": per_step,
        "metric_kinds": kinds,
        "grad_norm": torch.cat([result["grad_norm"] for result in results]),
        "update_successful": all(result["update_successful"] for result in results),
        "peak_memory_gib": results[-1].get("peak_memory_gib"),
        "skip_reasons": [reason for result in results for reason in result["skip_reasons"]],
    }


class StepObserver(Protocol):
    """Observes a step, as `RunRecorder` does; the methods defined here do nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Add answers, to be written when the step is logged."""


def policy_loss(config: RunConfig) -> LossFunction:
    """Return the loss that the policy is trained with."""
    fused = config.policy.megatron_cfg.use_fused_linear_logprobs
    match config:
        case GRPOMasterConfig() | PPOMasterConfig() if reader_of_prev_logprobs(config) is None:
            # No pass before training computes prev_logprobs, so the loss works without them.
            return ClippedPGLossFn(config.loss_fn, fused, own_previous=True)
        case GRPOMasterConfig() | PPOMasterConfig() | SFTMasterConfig():
            return make_loss(config.loss_fn, fused)
        case DPOMasterConfig():
            return DPOLossFn(config.dpo, fused)
        case DistillationMasterConfig():
            return make_loss(config.loss_fn)
        case _:
            raise NotImplementedError(config.algorithm)


@dataclass(frozen=True)
class Judged:
    """Rows to train on, with all columns that the loss needs.

    rollout: the sampled answers; None if the rows come from the data set. mismatch: each chunk's comparison with the
    engine, if a pass before training makes one. metrics: metrics about the choice of rows.
    """

    batch: BatchedDataDict
    rollout: Rollout | None = None
    mismatch: Sequence[Mismatch] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class StepOutcome:
    """A step's metrics, each optimizer step's skip reason (None if it was not skipped), and the rows trained on."""

    metrics: dict[str, float]
    skip_reasons: Sequence[str | None]
    batch: BatchedDataDict


@dataclass(frozen=True)
class Algorithm[Config: RunConfig](ABC):
    """An algorithm, run by `TrainingLoop`.

    A subclass defines `judge`. It overrides `update` unless the policy trains exactly once on the rows,
    and extends `validate` if more than the policy's answers is evaluated. rollouts: supplies a step's groups; None if
    the data set contains the answers.
    """

    config: Config
    policy: Policy
    collector: RolloutCollector
    prompts: PromptSource
    observer: StepObserver
    rollouts: Scheduler[Any] | None = field(default=None, kw_only=True)

    @cached_property
    def loss_fn(self) -> LossFunction:
        return policy_loss(self.config)

    @abstractmethod
    def judge(self, step: Step) -> Judged:
        """Get a step's rows and add the columns that the loss needs: log-probabilities, values, advantages.

        Must not change any weights, as the step may still be dropped.
        """

    def update(self, step: Step, judged: Judged) -> StepOutcome:
        """Train the models, and call `step.finish` after the last weight change."""
        batch = judged.batch
        with self.training(step.number, judged.rollout) as metrics:
            result = self.policy.train(trained_columns(batch), self.loss_fn)
        metrics |= judged.metrics
        metrics |= step.finish()
        metrics["train/total_num_tokens"] = float(batch["input_lengths"].sum())
        return StepOutcome(train_metrics(result) | metrics, result["skip_reasons"], batch)

    @contextmanager
    def open_step(self, number: int) -> Generator[Step]:
        """Open a step; if the block fails, its groups can be trained again, otherwise unused groups are recorded."""
        if self.rollouts is None:
            yield Step(number)
            return
        with self.rollouts.open_step(number) as step:
            yield step
            for rollout in self.rollouts.take_unused():
                rollout.batch["sample_mask"] = torch.zeros(rollout.batch.size)
                self.observer.add_samples(samples_of(rollout, number, self.collector.tokenizer))

    def redo(self, number: int) -> StepOutcome:
        """Train a finished step again from the same answers; the models must be as they were before the step."""
        step = Step(number) if self.rollouts is None else self.rollouts.known_step(number)
        return self.update(step, self.judge(step))

    def checkpointed(self, step: int) -> None:
        if self.rollouts is not None:
            self.rollouts.checkpointed(step)

    @contextmanager
    def training(self, step: int, rollout: Rollout | None) -> Generator[dict[str, float]]:
        """Time a block as the phase `train`, and record the rollout that it trains on, if there is one.

        Yields a dict that is filled with the rollout's metrics once the block has ended. A second thread prepares the
        records while the block waits for the ranks; neither thread may change the batch.
        """
        metrics = dict[str, float]()
        with self.observer.phase("train"):
            if rollout is None:
                yield metrics
                return
            tokenizer, tables = self.collector.tokenizer, self.config.logger.answers_with_tokens or 0
            with ThreadPoolExecutor(1, "records of a step") as second:
                samples = second.submit(samples_of, rollout, step, tokenizer, tables=tables)
                counted = second.submit(rollout_metrics, rollout)
                yield metrics
        self.observer.add_samples(samples.result())
        metrics |= counted.result()

    def validate(self, step: int) -> dict[str, float]:
        """Answer the held-out prompts, offload the engine, and return mean reward and accuracy.

        Metrics are overall, by source and by environment. The answers are greedy, or sampled if the recipe requests it;
        with several answers per prompt, the metrics include pass_k. Dropped and unscored episodes do not count.
        """
        loop = self.config.loop
        answers, greedy = 1, True
        if isinstance(loop, RolloutConfig):
            answers, greedy = loop.val_num_generations_per_prompt, loop.val_greedy
        prompts = [] if loop.max_val_samples == 0 else self.prompts.validation(loop.max_val_samples)
        samples, judged, kept = list[Sample](), list[Sample](), list[bool]()
        for start in range(0, len(prompts), loop.val_batch_size):
            asked = prompts[start : start + loop.val_batch_size]
            with activity.at(f"prompt {start} of {len(prompts)} of a validation", timed=False):
                rollout = self.collector.collect(asked, answers, step=step, greedy=greedy)
            tables = (self.config.logger.answers_with_tokens or 0) - len(samples)
            of_rows = samples_of(rollout, step, self.collector.tokenizer, tables=tables, of_validation=True)
            first = first_rows(rollout.batch)
            samples += of_rows
            judged += [of_rows[row] for row in first]
            kept += map(bool, ~uncounted_rows(rollout.batch)[first])
        self.collector.generation.offload()
        self.observer.add_samples(samples)  # only after the whole validation has succeeded
        rewards_of: dict[str, list[float]] = {"validation": []}
        answered = [prompt for prompt in prompts for _ in range(answers)]
        for prompt, sample in compress(zip(answered, judged, strict=True), kept):
            places = ["validation"]
            places += [f"validation/{prompt.source}"] if prompt.source else []
            places += [in_environment("validation", prompt.env_name)] if prompt.env_name else []
            for place in places:
                rewards_of.setdefault(place, []).append(sample.reward)
        metrics: dict[str, float] = {}
        for name, rewards in rewards_of.items():
            if rewards:
                metrics[f"{name}/reward"] = sum(rewards) / len(rewards)
                metrics[f"{name}/accuracy"] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        if answers > 1 and prompts:
            # The share of prompts with at least one rewarded answer, as in NeMo RL; dropped answers earn no reward.
            given = [one.reward > 0 and counts for one, counts in zip(judged, kept, strict=True)]
            passed = [any(given[first : first + answers]) for first in range(0, len(given), answers)]
            metrics["validation/pass_k"] = sum(passed) / len(passed)
        return metrics

    def evaluate(
        self, loop: GivenRowsConfig, rows: Callable[[Sequence[Prompt]], BatchedDataDict]
    ) -> dict[str, float]:
        """Return the loss metrics of held-out samples, treated as one batch; rows: builds the batch from prompts."""
        held_out = self.prompts.validation(self.config.val_loss_samples)
        size = loop.val_global_batch_size or self.config.policy.train_global_batch_size
        results: list[dict[str, Any]] = []
        for first in range(0, len(held_out), size):
            with activity.at(f"the loss of row {first} of {len(held_out)} of a validation", timed=False):
                batch = rows(held_out[first : first + size])
                results.append(self.policy.train(batch, self.loss_fn, eval_mode=True))
        return train_metrics(join_results(results), "validation")
