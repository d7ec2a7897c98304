"""vLLM's engine on the rank's GPU: it sleeps while the rank trains, wakes, and takes its weights over CUDA IPC."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from report import Report
from runs import CONFIGS, ONE_RANK, check_mismatch, check_rewards, grpo

from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.datasets import Prompt
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration
from nemo_rl_mcore.driver.algorithms.algorithm import policy_loss
from nemo_rl_mcore.driver.algorithms.engine_comparison import bounds_of, compare, rows_to_compare
from nemo_rl_mcore.driver.algorithms.mismatch import model_inputs
from nemo_rl_mcore.driver.parts import Parts, open_parts, stop_ids_of
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.driver.rollouts.player import Responder
from nemo_rl_mcore.driver.run import start_model
from nemo_rl_mcore.engine.kinds import engine_kind
from nemo_rl_mcore.recipe.load import load_config

RECIPE = "grpo_copy_vllm_cpu.yaml"
PRECISION = {"cuda": "bfloat16", "cpu": "float32"}
TURNS = {"cuda": 3, "cpu": 2}
# Steps of the run by the command, and the reward of its last ones.
RUN = {"cuda": (80, 0.15), "cpu": (20, 0.03)}
# On a GPU large enough for its weights to show in the memory.
MODEL = {
    "cuda": (
        *("policy.model.num_layers=8", "policy.model.hidden_size=1024", "policy.model.ffn_hidden_size=4096"),
        *("policy.model.num_attention_heads=16", "policy.generation.vllm_cfg.gpu_memory_utilization=0.3"),
        "policy.generation.vllm_cfg.enforce_eager=true",  # to save time: the run by the command captures graphs
    ),
    "cpu": (),
}
# Of what an engine took when it started; its CUDA context and its code stay.
KEPT_ASLEEP = 0.2


def run(report: Report, device: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        check_turns(report, Path(scratch) / "turns", device)
        check_run(report, Path(scratch) / "run", device)


def check_turns(report: Report, folder: Path, device: str) -> None:
    """Refit, answer, sleep, train, again and again; a refit raises where a digest of what the engine holds differs."""
    group = f"{PRECISION[device]}: engine and rank take turns"
    with report.attempt(group, "a rank and an engine start"):
        settings = (f"logger.log_dir={folder}", f"policy.precision={PRECISION[device]}")
        parts = open_parts(load_config(CONFIGS / RECIPE, [*ONE_RANK[device], *settings, *MODEL[device]]))
        with rank_and_engine(parts) as (policy, engines):
            turns = Turns(report, group, parts, policy, engines)
            for turn in range(TURNS[device]):
                report.doing(f"{group}: turn {turn}")
                turns.take(turn)
            unmoved = len(turns.digests) - len({*turns.digests} - {""})
            report.compared(group, "refits that brought no new weights", float(unmoved), 0.0)


@contextmanager
def rank_and_engine(parts: Parts) -> Iterator[tuple[Policy, EngineGeneration]]:
    """A recipe's policy and its engines, as a run has them; the engines start when they are first given weights."""
    config = parts.config
    [plan] = config.models.values()
    with (
        RayCluster(config.cluster) as cluster,
        start_model(plan, config, cluster) as policy,
        EngineGeneration(
            engine_kind(config),
            config.policy,
            cluster,
            policy,
            stop_ids=stop_ids_of(config, parts.tokenizer),
            seed=config.seed,
        ) as engines,
    ):
        yield policy, engines


@dataclass
class Turns:
    """Turns of an engine and a rank, and what is found in each: log-probabilities, memory, seconds."""

    report: Report
    group: str
    parts: Parts
    policy: Policy
    engines: EngineGeneration
    digests: list[str] = field(default_factory=list)
    _engine_bytes: int | None = None

    def take(self, turn: int) -> None:
        before, start = used_memory(), time.perf_counter()
        self.engines.update_weights(turn)
        refit_s = time.perf_counter() - start
        if self._engine_bytes is None:
            self._engine_bytes = used_memory() - before
        self.digests.append(self.engines.weights_digest)
        asked = self.parts.prompts.train_batch(turn + 1, self.parts.config.prompts_per_step)
        self._compare_vocabulary(turn, asked)
        answered = self._compare_answers(turn, asked)
        awake, start = used_memory(), time.perf_counter()
        self.engines.offload()
        figures = {"refit s": refit_s}
        if self._engine_bytes:  # nothing on CPU, where nothing sleeps
            sleep_s, asleep = time.perf_counter() - start, used_memory()
            figures |= {"sleep s": sleep_s, "awake GB": awake / 1e9, "asleep GB": asleep / 1e9}
            check_asleep(self.report, self.group, turn, self._engine_bytes, awake - asleep)
        self.report.figure("turns", {"": f"{turn}", **figures})
        self._train(answered)

    def _compare_vocabulary(self, turn: int, asked: list[Prompt]) -> None:
        config = self.parts.config
        found = compare(
            self.policy,
            self.engines,
            rows_to_compare(config, asked, self.parts.tokenizer),
            vocabulary=config.policy.model.vocab_size,
            temperature=config.logprob_sampling.temperature,
        )
        allowed, name = bounds_of(config.policy), f"after prompts, turn {turn}"
        self.report.compared(self.group, f"log-probabilities {name}", found.largest, allowed.difference)
        self.report.compared(self.group, f"KL {name}", found.kl, allowed.kl)

    def _compare_answers(self, turn: int, asked: list[Prompt]) -> BatchedDataDict:
        """Of each token that the engine draws, what it and the rank say; returns the step's rows."""
        config = self.parts.config
        responder = Responder(self.engines, self.parts.tokenizer, config.max_prompt_length)
        batch = responder.respond(asked, config.grpo.num_generations_per_prompt, step=turn + 1).batch
        batch["prev_logprobs"] = self.policy.get_logprobs(model_inputs(batch))["logprobs"]
        apart = (batch["prev_logprobs"] - batch["generation_logprobs"]).abs() * batch["token_mask"]
        name, allowed = f"log-probabilities of answers, turn {turn}", bounds_of(config.policy).difference
        self.report.compared(self.group, name, float(apart.max()), allowed)
        return batch

    def _train(self, batch: BatchedDataDict) -> None:
        """A step that moves every weight, whatever the answers were."""
        noise = torch.Generator().manual_seed(0)
        batch["advantages"] = torch.randn(batch.size, 1, generator=noise).expand_as(batch["prev_logprobs"])
        result = self.policy.train(batch, policy_loss(self.parts.config))
        assert result["update_successful"], result["skip_reasons"]


def check_asleep(report: Report, group: str, turn: int, taken: int, given_back: int) -> None:
    kept = 1 - given_back / taken
    report.compared(group, f"share of memory kept asleep, turn {turn}", kept, KEPT_ASLEEP)


def used_memory() -> int:
    """Bytes that all processes have taken of the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_run(report: Report, folder: Path, device: str) -> None:
    precision, (steps, reward) = PRECISION[device], RUN[device]
    group = f"{precision}: GRPO by the command"
    with report.attempt(group, "a run"):
        settings = (f"grpo.max_num_steps={steps}", f"policy.precision={precision}")
        told = grpo(RECIPE, folder, device, *settings, "policy.generation.mismatch_threshold=1.2")
        check_rewards(report, group, told, 0.1, reward)
        check_mismatch(report, group, told, precision)
