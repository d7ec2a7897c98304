"""Rotary frequencies stretched for long contexts, as in Llama 3.1 and later."""

from __future__ import annotations

import math

import torch

from nemo_rl_mcore.config.model import RopeScalingConfig


def stretched_frequencies(frequencies: torch.Tensor, scaling: RopeScalingConfig) -> torch.Tensor:
    """The inverse frequencies [D/2] of a model whose rotations were stretched by `scaling`.

    RotaryEmbedding._apply_scaling (models/common/embeddings/rotary_pos_embedding.py) has this formula too, with the
    original context fixed at 8192 tokens.
    Fast rotations stay, slow ones are divided by the factor, and those between are a mixture of both.
    Source: https://github.com/meta-llama/llama-models, `apply_scaling`.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    share_kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
