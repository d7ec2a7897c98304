"""The Megatron-Core backend, its only importer. Megatron's paths in comments are relative to `megatron/core/`."""

from __future__ import annotations

import logging
import warnings


def quiet_notices() -> None:
    """Suppress Megatron's notices about its own plans, which users of this package cannot act on."""
    log = logging.getLogger("megatron.core.models.gpt.gpt_model")
    log.addFilter(_is_no_deprecation)
    for message in (
        r"full scope is deprecated",
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)


def _is_no_deprecation(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")
