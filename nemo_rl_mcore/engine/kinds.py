"""Which engines a recipe asks for, where they are not the ranks: a further engine is a further entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.engine.embedded.kind import embedded_kind
from nemo_rl_mcore.engine.engine import EngineKind
from nemo_rl_mcore.engine.vllm.kind import vllm_kind


def engine_kind(config: RunConfig) -> EngineKind:
    """Return the engines apart from the ranks that the recipe asks for."""
    return _ENGINE_KINDS[config.policy.generation.backend](config)


def _vllm(config: RunConfig) -> EngineKind:
    return vllm_kind(
        config.policy,
        Path(config.logger.log_dir),
        os.environ,
        on_cpu=config.cluster.on_cpu,
        reads_texts=config.max_rollout_turns > 1 or config.env.endpoint is not None,
    )


def _embedded(config: RunConfig) -> EngineKind:
    reread = config.asynchrony.recompute_kv_cache_after_weight_updates
    return embedded_kind(config.policy, reread_after_refit=reread)


_ENGINE_KINDS: dict[str, Callable[[RunConfig], EngineKind]] = {"embedded": _embedded, "vllm": _vllm}
