"""A refit on CPU against saving and reloading files: seconds, and what each process needs beside the model.

    python benchmarks/refit.py [--layers 6] [--rounds 5]

All ways move the same weights from a training rank to a vLLM engine, two processes of one Ray session, and take turns.
A refit compares digests of what the engine holds with the trainer's, unless it is said not to.
The files are what `save_pretrained` writes, on a disk or, with --folder, anywhere; the engine reads them tensor by
tensor. Times are wall seconds; memory is the high-water mark above what the process held before, shared pages included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nemo_rl_mcore.driver.actors  # noqa: F401 - before ray, which then stays on this machine

# isort: split
import ray
from measuring import Clock, Figures, header, table

from nemo_rl_mcore.config import ClusterConfig, PolicyConfig
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.engine_generation import EngineGeneration
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.engine.kinds import vllm_kind
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.models.memory import refit_bucket_bytes

MIB = 1 << 20
UNVERIFIED = "refit, unverified"
COLUMNS = {"seconds": 1.0, "rank MiB": MIB, "engine MiB": MIB}


def policy_config(layers: int) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {
            "model": {
                "num_layers": layers, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4,
                "ffn_hidden_size": 4096, "vocab_size": 16_000, "max_position_embeddings": 128, "qk_layernorm": True,
            },
            "tokenizer": {"name": "char"},
            "train_global_batch_size": 1,
            "train_micro_batch_size": 1,
            "max_total_sequence_length": 128,
            "megatron_cfg": {"optimizer": {"lr": 1e-3, "optimizer": "sgd", "use_distributed_optimizer": False}},
            "generation": {
                "backend": "vllm", "max_new_tokens": 4, "vllm_cfg": {"kv_cache_memory_bytes": 64 * MIB},
            },
        }
    )  # fmt: skip


def forget_peak(_worker: Any) -> int:
    return Clock().start_memory()


def peak(_worker: Any) -> int:
    return Clock().peak_memory()


def verify(worker: Any, verified: bool) -> None:
    worker._sender._settings = replace(worker._sender._settings, verify=verified)


def save(worker: Any, folder: str) -> None:
    from nemo_rl_mcore.rank.megatron.hf_weights.export import save_pretrained

    save_pretrained(worker.backend.chunks, worker.policy, Path(folder))


def reload(worker: Any, folder: str) -> None:
    def read() -> Any:
        from safetensors import safe_open

        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    yield name, file.get_tensor(name)

    llm = worker._llm
    llm.collective_rpc(lambda vllm_worker: vllm_worker.model_runner.get_model().load_weights(read()) and None)
    llm.reset_prefix_cache()


class Methods:
    def __init__(self, policy: Policy, generation: EngineGeneration, folder: Path) -> None:
        self._generation, self._folder, self._version = generation, folder, 0
        generation.update_weights(0)
        self._rank, self._engine = policy._workers.actors[0], generation._fleet.live[0].actor

    def verify(self, verified: bool) -> None:
        ray.get(self._rank.__ray_call__.remote(verify, verified))

    def refit(self) -> None:
        self._version += 1
        self._generation.update_weights(self._version)

    def files(self) -> None:
        folder = str(self._folder / str(time.monotonic_ns()))
        ray.get(self._rank.__ray_call__.remote(save, folder))
        ray.get(self._engine.__ray_call__.remote(reload, folder))

    def measure(self, method: Callable[[], None]) -> Figures:
        processes = {"rank MiB": self._rank, "engine MiB": self._engine}
        before = {name: ray.get(actor.__ray_call__.remote(forget_peak)) for name, actor in processes.items()}
        began = time.perf_counter()
        method()
        seconds = time.perf_counter() - began
        extra = {
            name: ray.get(actor.__ray_call__.remote(peak)) - before[name] for name, actor in processes.items()
        }
        return {"seconds": seconds, **extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the files go; by default the system's temporary folder")
    options = parser.parse_args()
    config = policy_config(options.layers)
    size, bucket = count_parameters(config.model) * 4 / MIB, refit_bucket_bytes(config) / MIB
    print(f"{size:.0f} MiB of float32 weights, two buckets of {bucket:.0f} MiB", flush=True)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        RayCluster(ClusterConfig()) as cluster,
        Policy(config, cluster, seed=0, init_reference_model=False) as policy,
        EngineGeneration(
            vllm_kind(config, Path(folder), os.environ, on_cpu=True),
            config,
            cluster,
            policy,
            stop_ids=(),
            seed=0,
        ) as generation,
    ):
        methods = Methods(policy, generation, Path(folder))
        runs: dict[str, list[Figures]] = {UNVERIFIED: [], "refit": [], "files": []}
        ways = {UNVERIFIED: methods.refit, "refit": methods.refit, "files": methods.files}
        for turn in range(options.rounds):
            for name in runs if turn % 2 == 0 else reversed(runs):
                methods.verify(name != UNVERIFIED)
                runs[name].append(methods.measure(ways[name]))
    header(COLUMNS)
    table(
        {
            name: {key: statistics.median(run[key] for run in measured) for key in COLUMNS}
            for name, measured in runs.items()
        },
        COLUMNS,
    )


if __name__ == "__main__":
    main()
