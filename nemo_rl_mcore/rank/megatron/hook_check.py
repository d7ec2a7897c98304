"""Make sure that the installed Megatron calls the `output_processor` that it is handed, see `output_processor`.

A branch of Megatron accepts the keyword and ignores it; log-probabilities would then be read off something else. So the
first pass of a last stage is watched: it costs nothing that can be measured, and later passes nothing at all. Of a
HybridModel the keyword is ours, and the pass shows that upstream hands the processor on, see `hybrid_model`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from megatron.core import __version__ as megatron_version

from nemo_rl_mcore.rank.megatron.model_class import LanguageModel

FIRST_VERSION_WITH_HOOK = "0.18.0"


def require_hook(models: Iterable[LanguageModel]) -> None:
    """Have the first pass of each last stage raise RuntimeError unless it calls the processor that it is handed.

    models: the stages on this rank. Raises RuntimeError at once for a forward that does not take the keyword.
    Both errors name the version to install.
    """
    for model in models:
        try:
            inspect.signature(model.forward).bind_partial(output_processor=None)
        except TypeError as error:
            raise _no_hook(model, "does not take") from error
        if model.post_process:
            _FirstPass(model)


class _FirstPass:
    """Watches a model until one pass has called its processor."""

    def __init__(self, model: LanguageModel):
        self._handed_over = self._called = False
        self._hooks = (
            model.register_forward_pre_hook(self._hand_over, with_kwargs=True),
            model.register_forward_hook(self._check),
        )

    def _hand_over(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        processor = kwargs.get("output_processor")
        self._handed_over, self._called = processor is not None, False
        if processor is None:  # a pass of someone who wants the logits
            return None

        def watched(**hook: Any) -> Any:
            self._called = True
            return processor(**hook)

        return args, kwargs | {"output_processor": watched}

    def _check(self, model: Any, _args: tuple[Any, ...], _output: Any) -> None:
        if not self._handed_over:
            return
        if not self._called:
            raise _no_hook(model, "takes, and ignores,")
        for hook in self._hooks:
            hook.remove()


def _no_hook(model: object, what_it_does: str) -> RuntimeError:
    return RuntimeError(
        f"megatron-core {megatron_version}: the forward of {type(model).__name__} {what_it_does} the output_processor "
        f"that log-probabilities are taken by; install megatron-core >= {FIRST_VERSION_WITH_HOOK}, with a model that "
        "calls it"
    )
