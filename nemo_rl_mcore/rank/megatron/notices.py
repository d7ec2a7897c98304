"""What Megatron-Core says of its own plans, as one line a process: no user here can act on it."""

from __future__ import annotations

import logging
import warnings

_LOGGER = "megatron.core.models.gpt.gpt_model"
_DEPRECATED = "GPTModel IS DEPRECATED"
# Of what Megatron's own code does.
_WARNINGS = (
    r"full scope is deprecated",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)
_installed = False


def tell_once() -> None:
    """From now on its notices of deprecation are one line of this process; all other warnings are as they were."""
    global _installed
    if _installed:
        return
    _installed = True
    logging.getLogger(_LOGGER).addFilter(Once())
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


class Once(logging.Filter):
    """Lets the first notice of deprecation pass, in few words, and no further one."""

    _told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        if not record.getMessage().startswith(_DEPRECATED):
            return True
        record.msg, record.args = "megatron-core: GPTModel is deprecated there (told once)", ()
        told, self._told = self._told, True
        return not told
