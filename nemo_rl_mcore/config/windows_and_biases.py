"""Refuse what windows and sinks of attention, biases and clamped gates of experts do not go with."""

from collections.abc import Iterator
from typing import Protocol

from nemo_rl_mcore.config.base import Problem


class _Model(Protocol):
    """The part of ModelConfig that is read here."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hybrid_layer_pattern(self) -> str | None: ...
    @property
    def multi_latent_attention(self) -> bool: ...
    @property
    def activation_func(self) -> str: ...
    @property
    def add_bias_linear(self) -> bool: ...
    @property
    def softmax_type(self) -> str: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def window_attn_skip_freq(self) -> tuple[int, ...] | None: ...
    @property
    def num_moe_experts(self) -> int | None: ...
    @property
    def dense_layers(self) -> int: ...
    @property
    def moe_shared_expert_intermediate_size(self) -> int | None: ...
    @property
    def mtp_num_layers(self) -> int | None: ...


def window_problems(model: _Model) -> Iterator[Problem]:
    """Yield layers with a window that are not those of the model."""
    layers = model.window_attn_skip_freq
    if layers is None:
        return
    if len(layers) != model.num_layers or not {*layers} <= {0, 1}:
        what = f"{list(layers)} is not a 0 or a 1 for each of {model.num_layers} layers"
        yield Problem(
            "not-allowed", "window_attn_skip_freq", what, "change it, or set it to null", ("num_layers",)
        )
    elif 1 not in layers:
        what = "no layer has the window"
        yield Problem(
            "contradicts", "window_attn_skip_freq", what, "set sliding_window: null", ("sliding_window",)
        )


def sink_problems(model: _Model) -> Iterator[Problem]:
    """Yield what windows and sinks do not go with: layers that are counted or made otherwise."""
    given = {
        "softmax_type": None if model.softmax_type == "vanilla" else model.softmax_type,
        "sliding_window": model.sliding_window,
    }
    others = {
        "hybrid_layer_pattern": model.hybrid_layer_pattern,
        "mtp_num_layers": model.mtp_num_layers,
    }
    for key, value in given.items():
        for other, against in others.items():
            if value is not None and against is not None:
                what = f"{value} does not go with {other}: {against}"
                yield Problem("incompatible", key, what, "remove one of the two", (other,))


def clamped_problems(model: _Model) -> Iterator[Problem]:
    """Yield biases on all projections, and clamped gates, of layers that are not of experts alone."""
    given = {
        "add_bias_linear": model.add_bias_linear,
        "activation_func": model.activation_func == "quick_gelu",
    }
    plain = model.hybrid_layer_pattern is None and not model.multi_latent_attention
    alone = model.num_moe_experts is not None and not model.dense_layers
    if plain and alone and not model.moe_shared_expert_intermediate_size and not model.mtp_num_layers:
        return
    for key in (key for key, on in given.items() if on):
        value = getattr(model, key)
        shown = str(value).lower() if isinstance(value, bool) else value
        what = f"{shown} needs attention of its own and experts, and nothing else, in every layer"
        yield Problem(
            "requires",
            key,
            what,
            "remove it, or set num_moe_experts",
            ("num_moe_experts", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
        )
