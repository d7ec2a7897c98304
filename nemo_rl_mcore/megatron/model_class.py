"""The class of a policy's model, the one place that names it: upstream means to replace GPTModel by HybridModel.

GPTModel is deprecated from megatron-core 0.19 on (Megatron-LM issue 6071); HybridModel has no `output_processor` there
(Megatron-LM pull request 7008).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.models.gpt import GPTModel as LanguageModel

__all__ = ["LanguageModel", "language_models"]


def language_models(modules: Iterable[torch.nn.Module]) -> list[LanguageModel]:
    """Return the models inside of what Megatron wraps around them."""
    return [part for module in modules for part in module.modules() if isinstance(part, LanguageModel)]
