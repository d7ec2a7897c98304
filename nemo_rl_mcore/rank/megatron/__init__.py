"""The backend on Megatron-Core, its only importer. Places of Megatron in comments are paths below `megatron/core/`."""

from __future__ import annotations

import logging
import warnings


def quiet_notices() -> None:
    """Drop Megatron's notices of its own plans, which no user here can act on."""
    log = logging.getLogger("megatron.core.models.gpt.gpt_model")
    log.addFilter(_is_no_deprecation)
    for message in (
        r"full scope is deprecated",
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)


def _is_no_deprecation(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("GPTModel IS DEPRECATED")
