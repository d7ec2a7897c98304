"""The backend on Megatron-Core, its only importer. Places of Megatron in comments are paths below `megatron/core/`."""

from __future__ import annotations

import logging
import warnings


def tell_once() -> None:
    """From now on Megatron's notices of its own plans are one line of this process: no user here can act on them."""
    log = logging.getLogger("megatron.core.models.gpt.gpt_model")
    if any(isinstance(one, Once) for one in log.filters):
        return
    log.addFilter(Once())
    for message in (
        r"full scope is deprecated",
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)


class Once(logging.Filter):
    """Lets the first notice of GPTModel's deprecation pass, in few words, and no further one."""

    _told = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("GPTModel IS DEPRECATED"):
            return True
        record.msg, record.args = "megatron-core: GPTModel is deprecated there (told once)", ()
        told, self._told = self._told, True
        return not told
