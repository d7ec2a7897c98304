"""A recipe's engines, apart from its ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_mcore.config import PolicyConfig, RunConfig
from nemo_rl_mcore.data.tokenizer import load_tokenizer
from nemo_rl_mcore.engine.embedded import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.engine import EngineKind
from nemo_rl_mcore.engine.vllm.engine import (
    AsyncVllmEngine,
    AsyncVllmShare,
    EngineSettings,
    VllmEngine,
    VllmShare,
)
from nemo_rl_mcore.models.config_json import hf_config_of
from nemo_rl_mcore.models.memory import cpu_cache_bytes, refit_bucket_bytes

CALL_S = 1800.0
"""Deadline in seconds for a batch, and for an engine's acknowledgement of a bucket of weights."""


def embedded_kind(config: PolicyConfig, *, reread_after_refit: bool = False) -> EngineKind:
    return EngineKind(
        name="embedded",
        engine=EmbeddedEngine,
        settings=EmbeddedSettings(config, reread_after_refit),
        environment={},
        engines=config.generation.engines,
        processes=1,
        sleeps=False,
        bucket_bytes=refit_bucket_bytes(config),
        call_timeout_s=CALL_S,
        max_restarts=config.generation.max_restarts,
    )


def vllm_kind(
    config: PolicyConfig, folder: Path, environ: Mapping[str, str], *, on_cpu: bool, reads_texts: bool = False
) -> EngineKind:
    """Describe a policy's vLLM engines.

    folder: the run's folder, in which the engines' `vllm_model/` is written. environ: the driver's variables.
    reads_texts: requests may have their own stop strings.
    """
    vllm, further = config.generation.vllm_cfg, dict(config.generation.vllm_kwargs or {})
    # Only the architecture, since weights are sent.
    model_folder = folder.absolute() / "vllm_model"
    model_folder.mkdir(parents=True, exist_ok=True)
    architecture = hf_config_of(config.model, dtype=config.precision)
    (model_folder / "config.json").write_text(json.dumps(architecture, indent=2))
    if reads_texts := reads_texts or bool(config.generation.stop_strings):
        load_tokenizer(config.tokenizer.name).save_as_hugging_face(model_folder)
    settings = EngineSettings(
        model_dir=str(model_folder),
        precision=vllm.number_format(config.precision),
        # The sent weights have no scales: vLLM quantizes them.
        quantization={"fp8": "fp8_per_block", "mxfp8": "mxfp8"}.get(vllm.precision or ""),
        unquantized=tuple(f"re:.*{re.escape(text)}" for text in vllm.quantization_ignored_layer_kws or ())
        if vllm.quantizes
        else (),
        kv_cache_dtype=vllm.kv_cache_dtype,
        max_model_len=config.max_total_sequence_length,
        max_num_seqs=further.pop("max_num_seqs", 256),
        tensor_parallel_size=vllm.tensor_parallel_size,
        pipeline_parallel_size=vllm.pipeline_parallel_size,
        enable_expert_parallel=vllm.expert_parallel_size > 1,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        kv_cache_memory_bytes=further.pop(
            "kv_cache_memory_bytes", cpu_cache_bytes(config) if on_cpu else None
        ),
        enforce_eager=vllm.enforce_eager or on_cpu,
        enable_sleep_mode=config.generation.colocated.enabled and not on_cpu,
        tokenizer=str(model_folder) if reads_texts else None,
        routes=(config.model.expert_layers, config.model.route_dtype)
        if config.engines_return_routes
        else None,
        further=further,
    )
    return EngineKind(
        name="vLLM",
        engine=AsyncVllmEngine if vllm.async_engine else VllmEngine,
        settings=settings,
        environment=vllm_environment(environ, on_cpu=on_cpu),
        engines=config.generation.engines if on_cpu else 1,
        processes=vllm.processes,
        sleeps=settings.enable_sleep_mode,
        bucket_bytes=refit_bucket_bytes(config),
        call_timeout_s=CALL_S,
        max_restarts=config.generation.max_restarts,
        precision=settings.precision,
        share=AsyncVllmShare if vllm.async_engine else VllmShare,
    )


def vllm_environment(environ: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """Return vLLM's environment variables besides a rank's; the driver's take precedence over our defaults."""
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Processes of an engine on several machines replace it by their machine's address.
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if on_cpu:
        # Compiling costs more than it saves: an engine on CPU is small.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
        # As many threads as OMP_NUM_THREADS, on any core: the ranks use the same ones.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    own = {name: value for name, value in environ.items() if name in defaults or name.startswith("VLLM_")}
    # The engine runs in the actor's process, and ends with it. With MLA enabled, latent attention would compute with
    # products of weights, which a refit does not update.
    return defaults | own | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_MLA_DISABLE": "1"}


def engine_kind(config: RunConfig) -> EngineKind:
    """Describe the recipe's engines; a new kind is a new case here."""
    if config.policy.generation.backend == "embedded":
        reread = config.asynchrony.recompute_kv_cache_after_weight_updates
        return embedded_kind(config.policy, reread_after_refit=reread)
    return vllm_kind(
        config.policy,
        Path(config.logger.log_dir),
        os.environ,
        on_cpu=config.cluster.on_cpu,
        reads_texts=config.max_rollout_turns > 1 or config.env.endpoint is not None,
    )
