"""The generators of a recipe, as the driver runs them."""

from __future__ import annotations

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.engine.embedded.engine import EmbeddedEngine, EmbeddedSettings
from nemo_rl_mcore.engine.engine import EngineKind
from nemo_rl_mcore.models.engine_sizes import refit_bucket_bytes


def embedded_kind(config: PolicyConfig, *, reread_after_refit: bool = False) -> EngineKind:
    """Return the engines that run this policy, apart from the ranks that train it; see `EmbeddedSettings`."""
    embedded = config.generation.embedded_cfg
    return EngineKind(
        name="embedded",
        engine=EmbeddedEngine,
        settings=EmbeddedSettings(config, reread_after_refit),
        environment={},
        engines=embedded.engines,
        processes=1,
        sleeps=False,
        bucket_bytes=refit_bucket_bytes(config),
        section="policy.generation.embedded_cfg",
        start_timeout_s=embedded.start_timeout_s,
        call_timeout_s=embedded.call_timeout_s,
        max_restarts=embedded.max_restarts,
        restart_backoff_s=embedded.restart_backoff_s,
    )
