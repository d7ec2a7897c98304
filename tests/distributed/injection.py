"""Make a real backend fail at one of its calls. The call itself is not replaced: it runs before, half, or whole."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch


class InjectedError(RuntimeError):
    """The failure that a test asked for."""


@dataclass(frozen=True)
class Point:
    """Where a backend fails: at its `nth` call of `call`, `when` it has done nothing of it, half of it, or all."""

    call: str
    when: str
    nth: int = 1

    def __str__(self):
        return f"{self.call}, {self.when}"


IN_BEGIN = (
    Point("snapshot", "before"),
    Point("snapshot", "after"),
    Point("zero_grad", "before"),
    Point("zero_grad", "after"),
    Point("deferred_grad_sync", "on entering"),
)
# The first chunk is added before.
IN_MICROBATCH = (
    Point("forward_backward", "before", nth=2),
    Point("forward_backward", "after the first backward pass", nth=2),
    Point("forward_backward", "after", nth=2),
)
# Not for a pipeline: its other stages wait for the gradient that never comes.
IN_BACKWARD = Point("forward_backward", "inside the second backward pass", nth=2)
IN_FINISH = (
    Point("reduce", "before"),
    Point("reduce", "after"),
    Point("learning_rate_and_weight_decay", "before"),
    Point("learning_rate_and_weight_decay", "after"),
    Point("scale_gradients", "before"),
    Point("scale_gradients", "after"),
    Point("deferred_grad_sync", "on leaving"),
    Point("finalize_gradients", "before"),
    Point("finalize_gradients", "after"),
    Point("gradient_norm", "before"),
    Point("gradient_norm", "after"),
)
# An overlapped reduction is in flight there.
IN_FINALIZE = Point("finalize_gradients", "inside")
IN_OPTIMIZER = (Point("optimizer_step", "before"), Point("optimizer_step", "after"))


@contextmanager
def failing(worker, point):
    """Inside, the worker's backend raises InjectedError at the point; with None it does not."""
    if point is None:
        yield
        return
    backend, calls = worker.backend, 0
    original = getattr(backend, point.call)

    def counted(*args):
        nonlocal calls
        calls += 1
        return _fail(worker, original, point, args) if calls == point.nth else original(*args)

    setattr(backend, point.call, counted)
    try:
        yield
    finally:
        delattr(backend, point.call)


def _fail(worker, original, point, args):
    match point.when:
        case "before":
            raise InjectedError(str(point))
        case "after":
            original(*args)
            raise InjectedError(str(point))
        case "on entering":
            with original():
                raise InjectedError(str(point))
        case "on leaving":
            return _fails_on_leaving(original, point)
        case "inside":
            with _no_end_of_finalize(point):
                return original(*args)
        case "after the first backward pass":
            with _second_microbatch(worker, point):
                return original(*args)
        case "inside the second backward pass":
            with _second_backward_pass(worker, point):
                return original(*args)
        case other:
            raise ValueError(f"a backend cannot fail {other!r}")


@contextmanager
def _fails_on_leaving(original, point):
    with original():
        yield
    raise InjectedError(str(point))


@contextmanager
def _no_end_of_finalize(point):
    """Raise where Megatron's own finalising begins: an overlapped reduction is in flight by then."""
    from nemo_rl_mcore.rank.megatron import train_backend

    def raises(*_args, **_options):
        raise InjectedError(str(point))

    with patch.object(train_backend, "finalize_model_grads", raises):
        yield


@contextmanager
def _second_microbatch(worker, point):
    """Raise at the forward pass that follows the first backward pass; for one or two pipeline stages."""
    # Imported by the ranks only: the process of pytest has no Megatron.
    from megatron.core import parallel_state

    ahead = 0 if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else 1
    passes = 0

    def count(*_args):
        nonlocal passes
        passes += 1
        if passes == 2 + ahead:
            raise InjectedError(str(point))

    handle = worker.backend.chunks[0].register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _second_backward_pass(worker, point):
    """Raise where the second backward pass reaches the first layer: the gradients of the layers above are added."""
    passes = 0

    def count(_gradient):
        nonlocal passes
        passes += 1
        if passes == 2:
            raise InjectedError(str(point))

    first_layer_weight = next(
        parameter
        for name, parameter in worker.backend.chunks[0].named_parameters()
        if "layers.0.mlp" in name and "router" not in name
    )
    handle = first_layer_weight.register_hook(count)
    try:
        yield
    finally:
        handle.remove()
