"""Build a vLLM engine's arguments, for one machine or for its part on one of several."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_mcore.engine.engine import EngineMachines
from nemo_rl_mcore.rank import rendezvous

_LOGPROBS_MODE = "processed_logprobs"
"""Of the distribution that is sampled from: the temperature divides the logits, as in training."""
WHOLE_VOCABULARY = -1
_EXTENSION = "nemo_rl_mcore.engine.vllm.worker_extension.RefitExtension"


@dataclass(frozen=True)
class EngineSettings:
    """How to build an engine.

    model_dir: folder with config.json; weights are drawn at random until the first refit. precision: `float32` or
    `bfloat16`. kv_cache_memory_bytes: None is a share of the GPU's memory. tokenizer: folder of one, which stop strings
    need. quantization: of the layers' weights, by vLLM's name for it, but for layers whose names match one of the
    patterns in `unquantized`. further: arguments of the recipe's own.
    """

    model_dir: str
    precision: str
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    quantization: str | None = None
    unquantized: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = True
    enable_sleep_mode: bool = False
    tokenizer: str | None = None
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def arguments(self, machines: EngineMachines | None = None) -> dict[str, Any]:
        """Keyword arguments of vLLM's engines; machines: of an engine that is on several, as this process sees them."""
        processes = self.tensor_parallel_size * self.pipeline_parallel_size
        return {
            **self.further,
            "model": self.model_dir,
            "load_format": "dummy",
            "tokenizer": self.tokenizer,
            "skip_tokenizer_init": self.tokenizer is None,
            "dtype": self.precision,
            "quantization": self.quantization,
            **({"quantization_config": {"ignore": [*self.unquantized]}} if self.unquantized else {}),
            "kv_cache_dtype": self.kv_cache_dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "enable_expert_parallel": self.enable_expert_parallel,
            # Left to itself, vLLM would have Ray start them, in the places that Ray has given to the ranks.
            "distributed_executor_backend": "mp" if processes > 1 else None,
            **_layout_over(machines),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "enforce_eager": self.enforce_eager,
            "enable_sleep_mode": self.enable_sleep_mode,
            "logprobs_mode": _LOGPROBS_MODE,
            "max_logprobs": WHOLE_VOCABULARY,
            "worker_extension_cls": _EXTENSION,
            "disable_log_stats": True,
        }


def _layout_over(machines: EngineMachines | None) -> dict[str, Any]:
    if machines is None:
        return {}
    return {
        "nnodes": machines.count,
        "node_rank": machines.number,
        "master_addr": machines.first,
        "master_port": machines.port,
    }


def on_this_machine() -> EngineMachines | None:
    """Return what this process is told of the machines of its engine; vLLM is reached where the others look."""
    machines = EngineMachines.here()
    if machines is not None:
        os.environ["VLLM_HOST_IP"] = machines.own
        rendezvous.give_up_port()  # vLLM listens there
    return machines
