"""What the process that runs the algorithm takes for large steps: its own seconds and memory, no model's.

    python benchmarks/driver_scale.py [--ranks 8 16 32] [--samples 512 1024 2048] [--tokens 2000] [--from engines]
    python benchmarks/driver_scale.py --ranks 8 --profile FILE    # cProfile's, of one more step of the largest size

Real `GRPOTrainer`, `Policy` and Ray; the ranks answer at once, with tensors of the right shape and digest. Rows are all
equally long, a quarter of them the prompt, and every rank is a data-parallel one; an optimizer step takes 512 samples.
A pass before training gives prev_logprobs, there is no reference policy, and every answer is written down.
`--from ranks` has the ranks sample, `--from engines` as many engines, whose answers travel as an `Engine`'s do.

Parts, in the order of a step: `prompts` are encoded, `generate` asks for answers, `answers` are read and decoded,
`score` is an environment of no cost, `episodes` become a batch, `logprobs` asks the policy, `judge` is the comparison
of log-probabilities, the advantages and the digests, `train` asks the policy, `samples` and `record` write answers.

Seconds are of the driver's CPU, all threads, with one for torch: while it waits for a rank none pass, and on a driver
with more cores torch takes fewer of the wall. `wall` has those of the ranks, which share this machine, and means
little. `memory` is the peak of the resident set above that before the step; `store` is what the driver puts into the
object store and takes out. Each is the median over `--steps` steps; the slope is that of a line through the sizes, and
`power` the exponent between the smallest and the largest: 1 is linear, below 1 a part is constant.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

import nemo_rl_mcore.driver.actors  # noqa: F401 - before ray, which then stays on this machine

# isort: split
import ray
import torch
from driver_fakes import (
    EOS,
    CountingGroup,
    Laps,
    Prompts,
    Rank,
    Recording,
    Scores,
    Store,
    TimedGeneration,
    TimedPolicy,
)
from measuring import ROOT, Clock, in_subprocess, load

from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import as_batch, as_requests
from nemo_rl_mcore.driver.actors.places import only_environment, session_environment
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer
from nemo_rl_mcore.driver.policy import EmbeddedGeneration, Policy
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.scheduler import Scheduler
from nemo_rl_mcore.driver.rollouts.start import open_rollouts
from nemo_rl_mcore.environment.interface import LocalEnvironments
from nemo_rl_mcore.recipe.load import load_config

RECIPE = ROOT / "examples/configs/grpo_copy_cpu.yaml"
PER_UPDATE = 512
ANSWERS_TO_A_PROMPT = 16
OBJECT_STORE_BYTES = 4 << 30
GIB = 1 << 30
UNIT = 10_000
"""Samples that a slope is told for."""
PARTS = (
    *("prompts", "generate", "answers", "score", "episodes"),
    *("logprobs", "judge", "train", "samples", "record", "metrics"),
)


def recipe(ranks: int, samples: int, tokens: int, folder: str) -> GRPOMasterConfig:
    config = load_config(
        RECIPE,
        [
            f"policy.model.max_position_embeddings={tokens}",
            f"policy.max_total_sequence_length={tokens}",
            f"policy.generation.max_new_tokens={tokens - tokens // 4}",
            f"policy.train_global_batch_size={PER_UPDATE}",
            f"policy.train_micro_batch_size={PER_UPDATE // ranks}",
            "policy.recompute_prev_logprobs=always",
            f"grpo.num_prompts_per_step={samples // ANSWERS_TO_A_PROMPT}",
            f"cluster.cpu_workers_per_node={ranks}",
            "data.num_digits=6",
            f"logger.log_dir={folder}",
        ],
    )
    assert isinstance(config, GRPOMasterConfig)
    return config


class Driver:
    """The process that runs the algorithm, with its ranks; a context manager."""

    def __init__(self, ranks: int, tokens: int, source: str) -> None:
        self.laps, self.store, self._clock = Laps(), Store(), Clock()
        self._ranks, self._tokens, self._source = ranks, tokens, source
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        with only_environment(session_environment(os.environ)):
            # The session of a run on CPU has a small object store.
            ray.init(
                address="local",
                num_cpus=self._ranks,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
        self._stack.callback(ray.shutdown)
        config = recipe(self._ranks, PER_UPDATE, self._tokens, self._folder)
        cluster = self._stack.enter_context(RayCluster(config.cluster))
        self._policy = self._stack.enter_context(Policy(config.policy, cluster, seed=0, group=self._group))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _group(self, _class: type, cluster: RayCluster, *_of_class: Any, **options: Any) -> CountingGroup:
        self._workers = CountingGroup(Rank, cluster, (self._tokens - self._tokens // 4,), **options)
        self._workers.store = self.store
        return self._workers

    def _engines_answer(self, data: BatchedDataDict, step: int) -> BatchedDataDict:
        asked = BatchedDataDict(data, seeds=data["prompt_index"], stop_strings=[()] * data.size)
        weights = {"version": step - 1}  # those of the step before
        per_rank = [{"requests": as_requests(share)} | weights for share in asked.split(self._ranks)]
        answers = self._workers.run_all("respond", per_rank_kwargs=per_rank)
        together = [response for of_rank in answers for response in of_rank]
        return as_batch(together, len(together[0].tokens))

    def _ranks_answer(self, data: BatchedDataDict, step: int) -> BatchedDataDict:
        return EmbeddedGeneration(self._policy, (EOS,)).generate(data, step=step)

    @contextmanager
    def algorithm(self, samples: int) -> Generator[GRPOTrainer]:
        """Open GRPO and the scheduler of its groups, before the first step."""
        answer = self._engines_answer if self._source == "engines" else self._ranks_answer
        scores = LocalEnvironments(Scores(self.laps))
        generation = TimedGeneration(answer, self.laps)
        collector = RolloutCollector(generation, load_tokenizer("char"), self._tokens, scores)
        prompts = Prompts(self._tokens // 4)
        with tempfile.TemporaryDirectory() as folder:
            config = recipe(self._ranks, samples, self._tokens, folder)
            with open_rollouts(config, generation, prompts, collector, 0, None, {}) as rollouts:
                yield GRPOTrainer(
                    config,
                    TimedPolicy(self._policy, self.laps),  # type: ignore[arg-type]
                    collector,
                    prompts,
                    Recording(self._folder, self.laps),
                    rollouts=rollouts,
                )

    def step(self, algorithm: GRPOTrainer, number: int) -> dict[str, float]:
        """Figures of a step of GRPO."""
        before, self.store.bytes = self._clock.start_memory(), 0
        began = time.perf_counter()
        self.laps.start()
        with algorithm.open_step(number) as step:
            judged = algorithm.judge(step)
            self.laps.end("judge")
            step.finishing()
            algorithm.update(step, judged)
        scheduler = cast("Scheduler", algorithm.rollouts)
        scheduler.update_weights(number)
        self.laps.end("metrics")
        return {
            **self.laps.seconds,
            "total": sum(self.laps.seconds.values()),
            "wall": time.perf_counter() - began,
            "memory": (self._clock.peak_memory() - before) / GIB,
            "store": self.store.bytes / GIB,
        }


def child(request: str) -> None:
    """Figures of each number of samples."""
    given = json.loads(request)
    found: dict[int, dict[str, float]] = {}
    with Driver(given["ranks"], given["tokens"], given["source"]) as driver:
        for samples in given["samples"]:
            with driver.algorithm(samples) as algorithm:
                runs = [driver.step(algorithm, number + 1) for number in range(1 + given["steps"])]
            found[samples] = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
        if given["profile"]:
            profile = cProfile.Profile()
            with driver.algorithm(given["samples"][-1]) as algorithm:
                profile.runcall(driver.step, algorithm, 1)
            profile.dump_stats(given["profile"])
    print(json.dumps(found))


def slope(values: Mapping[int, float]) -> float:
    """Of the line through the values, for `UNIT` samples; of one value, its share."""
    sizes = [*values]
    if len(sizes) == 1:
        return values[sizes[0]] / sizes[0] * UNIT
    return statistics.linear_regression(sizes, [*values.values()]).slope * UNIT


def power(values: Mapping[int, float]) -> float:
    """Exponent of the growth from the smallest size to the largest."""
    least, most = min(values), max(values)
    if least == most or min(values[least], values[most]) <= 0:
        return math.nan
    return math.log(values[most] / values[least]) / math.log(most / least)


def show(ranks: int, found: Mapping[int, Mapping[str, float]]) -> None:
    """A row for each part: the values at the sizes, the slope and the power."""
    print(f"{ranks} ranks; {load()}")
    print("  " + f"{'':10}" + "".join(f"{size:>9}" for size in found) + f"{f'/{UNIT:,}':>10}{'power':>7}")
    for row in (*PARTS, "total", "wall", "memory", "store"):
        values = {size: figures[row] for size, figures in found.items()}
        cells = "".join(f"{value:9.3f}" for value in values.values())
        unit = "GiB" if row in ("memory", "store") else "s"
        print(f"  {row:10}{cells}{slope(values):10.2f}{power(values):7.2f} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--from", dest="source", choices=("ranks", "engines"), default="ranks")
    parser.add_argument("--profile", help="with one number of ranks: where cProfile's figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    if wrong := [size for size in args.samples if size % PER_UPDATE]:
        parser.error(f"--samples: {wrong} are no multiples of {PER_UPDATE}")
    common = {key: vars(args)[key] for key in ("samples", "tokens", "steps", "source", "profile")}
    for ranks in args.ranks:
        figures = in_subprocess(__file__, common | {"ranks": ranks})
        if figures is not None:
            show(ranks, {int(size): of_size for size, of_size in figures.items()})


if __name__ == "__main__":
    main()
