"""How much faster an asynchronous run is, on real actors: ranks that train, an engine that decodes, refits in flight.

    python benchmarks/async_throughput.py [--steps 20] [--token_ms 80] [--slots 16]
    python benchmarks/async_throughput.py --quick

The recipe `examples/configs/grpo_copy_async_cpu.yaml`, whose engine waits before each token of a group, so that answers
have a long tail and take longer than training, as on GPUs: Pareto 1.5, at most 30 times the shortest, the same for a
group in every run. Counted is from the first prompt asked to the last optimizer step, the filling of the pipeline
included; processes are up by then. Shares are of that time: `trainer` waited for groups, `engine` had none.
`async_simulation.py` has the limit of many steps, without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from measuring import ROOT, load

from nemo_rl_mcore.config import GRPOMasterConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration
from nemo_rl_mcore.driver.algorithms.algorithm import StepObserver
from nemo_rl_mcore.driver.algorithms.grpo import GRPOTrainer
from nemo_rl_mcore.driver.parts import open_parts, stop_ids_of
from nemo_rl_mcore.driver.rollouts.player import RolloutCollector
from nemo_rl_mcore.driver.rollouts.scheduler import Scheduler
from nemo_rl_mcore.driver.rollouts.start import open_rollouts
from nemo_rl_mcore.driver.run import start_model
from nemo_rl_mcore.engine.embedded import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.kinds import engine_kind
from nemo_rl_mcore.recipe.load import load_config

RECIPE = ROOT / "examples/configs/grpo_copy_async_cpu.yaml"
TAIL, LONGEST = 1.5, 30
RUNS = {
    "K=0": ["grpo.async_grpo.max_trajectory_age_steps=0"],
    "K=1": ["grpo.async_grpo.max_trajectory_age_steps=1"],
    "K=2": ["grpo.async_grpo.max_trajectory_age_steps=2"],
    "K=2, drained": [
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "grpo.async_grpo.in_flight_weight_updates=false",
    ],
}


@dataclass(frozen=True)
class SlowSettings(EmbeddedSettings):
    """shortest_s: what the quickest groups wait for a token."""

    shortest_s: float = 0.0


class SlowEngine(EmbeddedEngine):
    """Waits before each token of a group, for as long as its ticket says; others are answered meanwhile."""

    def __init__(self, settings: SlowSettings) -> None:
        super().__init__(settings)
        self._shortest_s = settings.shortest_s

    async def _admitted(self, ticket: str, drawn: int) -> None:
        await asyncio.sleep(self._shortest_s * min(random.Random(ticket).paretovariate(TAIL), LONGEST))


@dataclass
class Figures:
    """Seconds of a run, and how many of them one side waited."""

    samples: int
    seconds: float = 0.0
    trainer_idle_s: float = 0.0
    engine_idle_s: float = 0.0
    oldest: float = 0.0

    def add(self, seconds: float, metrics: Mapping[str, float]) -> None:
        self.seconds += seconds
        self.trainer_idle_s += seconds * metrics["async/trainer_idle"]
        self.engine_idle_s += seconds * metrics["async/engine_idle"]
        self.oldest = max(self.oldest, metrics["async/age_max"])

    def row(self, name: str, base: Figures) -> str:
        rate = self.samples / self.seconds
        shares = f"{self.trainer_idle_s / self.seconds:8.2f} {self.engine_idle_s / self.seconds:8.2f}"
        times = rate / (base.samples / base.seconds)
        return f"{name:14} {self.seconds:8.1f} {rate:10.1f} {times:8.2f} {shares} {self.oldest:8.0f}"


def measure(overrides: list[str], token_s: float, cluster: RayCluster) -> Figures:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = load_config(RECIPE, [*overrides, f"logger.log_dir={folder}"])
        assert isinstance(config, GRPOMasterConfig)
        return train(*open_run(config, token_s, cluster, stack))


def open_run(
    config: GRPOMasterConfig, token_s: float, cluster: RayCluster, stack: ExitStack
) -> tuple[GRPOTrainer, Scheduler]:
    """All processes, and the first weights at the engine; nothing has been asked yet."""
    parts = open_parts(config)
    policy = stack.enter_context(start_model(config.models["policy"], config, cluster))
    kind = engine_kind(config)
    engines = stack.enter_context(
        EngineGeneration(
            replace(kind, engine=SlowEngine, settings=SlowSettings(config.policy, shortest_s=token_s)),
            config.policy,
            cluster,
            policy,
            stop_ids=stop_ids_of(config, parts.tokenizer),
            seed=config.seed,
        )
    )
    engines.update_weights(0)
    collector = RolloutCollector(engines, parts.tokenizer, config.max_prompt_length, parts.environments[""])
    rollouts = stack.enter_context(open_rollouts(config, engines, parts.prompts, collector, 0, None, {}))
    algorithm = GRPOTrainer(config, policy, collector, parts.prompts, StepObserver(), rollouts=rollouts)
    return algorithm, rollouts


def train(algorithm: GRPOTrainer, rollouts: Scheduler) -> Figures:
    grpo = algorithm.config.grpo
    figures = Figures(grpo.max_num_steps * grpo.num_prompts_per_step * grpo.num_generations_per_prompt)
    ended = time.monotonic()
    for step in range(1, grpo.max_num_steps + 1):
        rollouts.update_weights(step - 1)
        with algorithm.open_step(step) as opened:
            judged = algorithm.judge(opened)
            opened.finishing()
            metrics = algorithm.update(opened, judged).metrics
        began, ended = ended, time.monotonic()
        figures.add(ended - began, metrics)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--token_ms", type=float, default=80, help="what the quickest groups wait for a token"
    )
    parser.add_argument(
        "--slots", type=int, help="groups answered at a time; by default all that may be asked"
    )
    parser.add_argument("--quick", action="store_true", help="4 steps, K=0 and K=2: whether it works")
    options = parser.parse_args()
    runs = {name: RUNS[name] for name in ("K=0", "K=2")} if options.quick else RUNS
    common = [f"grpo.max_num_steps={4 if options.quick else options.steps}"]
    if options.slots is not None:
        common.append(f"grpo.async_grpo.max_inflight_prompts={options.slots}")
    heads = ("seconds", "samples/s", "times", "trainer", "engine", "max age")
    print(f"{'':14} {heads[0]:>8} {heads[1]:>10} " + " ".join(f"{head:>8}" for head in heads[2:]))
    base = None
    with RayCluster(load_config(RECIPE).cluster) as cluster:
        for name, overrides in runs.items():
            figures = measure([*common, *overrides], options.token_ms / 1000, cluster)
            base = base or figures
            print(f"{figures.row(name, base)}  {load()}", flush=True)


if __name__ == "__main__":
    main()
