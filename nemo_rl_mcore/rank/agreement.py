"""Raise one rank's error on all ranks, so that none waits in a collective for a rank that has left."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nemo_rl_mcore.errors import CodedError, PeerLostError, code_of
from nemo_rl_mcore.rank import accelerator, activity, rendezvous

_Text = tuple[int, list[tuple[str, str]], str, str]
_Report = tuple[str, _Text | None]
"""Call and error of a rank: its number, classes by module and name, message and code."""


class UnequalCallsError(RuntimeError):
    """Ranks made different calls."""


@contextmanager
def together(call: str = "", group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks if the block, which must not contain a collective, fails on any; group: None for all."""
    try:
        yield
    except Exception as error:
        # Recorded first, for the health check, in case the other ranks never arrive.
        first_line = str(error).partition("\n")[0]
        activity.advance(f"reporting to the other ranks: {type(error).__name__}: {first_line}")
        raise_together(error, group, call)
        raise
    raise_together(None, group, call)


def agreed[Result](action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Return the result of a function that may fail on some ranks only; see `together`."""
    with together(group=group):
        return action()


def agreed_on_first[Result](
    action: Callable[[], Result], group: dist.ProcessGroup | None = None
) -> Result | None:
    """Call a function on the first rank only; the others get None. Errors are raised on all, see `together`."""
    return agreed(lambda: action() if not dist.is_initialized() or dist.get_rank() == 0 else None, group)


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None, call: str = "") -> None:
    """Raise on every rank of the group (None: all ranks) if any of them passes an error; collective.

    A rank raises its own error. The others raise the error of the lowest failing rank, of the same class or, if that
    class cannot be built from a message, of a base class; the message names the rank.
    Raises UnequalCallsError on all ranks if their `call` differs, and PeerLostError if a rank does not arrive in time.
    """
    try:
        reports = _exchange(error, rendezvous.patient_group if group is None else group, call)
        if error is not None:
            raise error
    finally:
        # Otherwise a frame of its own traceback keeps the error alive, and with it the activations of all frames.
        del error
    if len({at for at, _ in reports}) > 1:
        places = "; ".join(f"rank {rank}: {at}" for rank, (at, _) in enumerate(reports))
        raise UnequalCallsError(f"the ranks stand at different calls ({places}); call all of them alike")
    for _, failed in reports:
        if failed is None:
            continue
        rank, classes, message, code = failed
        for module, name in classes:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(f"rank {rank}: {message}")
                except (TypeError, ValueError, LookupError, AttributeError):  # needs more than a message
                    continue
                if isinstance(error, CodedError):
                    error.code = code
                raise error
        raise RuntimeError(f"rank {rank}: {message}")


def _exchange(error: Exception | None, group: dist.ProcessGroup | None, call: str) -> list[_Report]:
    """Return call and error of each rank; empty if all ranks made the same call without an error."""
    if not dist.is_initialized():
        return []
    try:
        if error is not None and _is_of_a_lost_peer(error):
            raise error  # the lost peer would not arrive here either
        # The common case costs three numbers; over gloo on the CPU, so that nothing waits for the device.
        code = zlib.crc32(call.encode())
        device = "cpu" if dist.get_backend(group) == "gloo" else accelerator.device()
        extremes = torch.tensor([error is not None, code, -code], device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        failed, largest, smallest = extremes.tolist()
        if not failed and largest == -smallest:
            return []
        text: _Text | None = None
        if error is not None:  # as text, since not every error can be pickled
            classes = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
            text = dist.get_rank(), classes, str(error) or type(error).__name__, code_of(error)
        reports: list[_Report] = [("", None)] * dist.get_world_size(group)
        dist.all_gather_object(reports, (call, text), group=group)
        return reports
    except RuntimeError as failure:
        if not _is_of_a_lost_peer(failure):
            raise
        if error is not None and error is not failure:
            return []  # this rank's own error has more detail
        limit = "; policy.call_timeout_s limits the wait" if "Timed out" in str(failure) else ""
        raise PeerLostError(
            f"rank {dist.get_rank()} waited in vain for the other ranks before {call or 'the next call'}: one of them "
            f"hangs, or has ended{limit} ({failure})"
        ) from failure


def _is_of_a_lost_peer(error: Exception) -> bool:
    """Return True if a collective failed because a rank was lost; gloo's message names only its source file."""
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )
