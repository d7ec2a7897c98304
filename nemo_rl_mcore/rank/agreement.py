"""What one rank finds wrong, all ranks raise, so that none of them waits in a collective for one that has left."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nemo_rl_mcore.errors import CodedError, PeerLostError, code_of
from nemo_rl_mcore.rank import accelerator, activity
from nemo_rl_mcore.rank.rendezvous import patient_group

_Text = tuple[int, list[tuple[str, str]], str, str]
_Told = tuple[str, _Text | None]
"""Call and error of a rank: its number, classes by module and name, message and code."""


class UnequalCallsError(RuntimeError):
    """The ranks were called differently: one stands at another call than the others."""


@contextmanager
def together(call: str = "", group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside is what may fail on some ranks alone, and holds no collective; raises on all ranks if it fails on any.

    Every rank of the group (None: all ranks, with patience) enters it. See `raise_together` for what is raised.
    """
    try:
        yield
    except Exception as error:  # the ranks beside this one must hear of any
        # Whoever watches this rank hears of it, also where the other ranks never come to.
        activity.advance(
            f"telling the other ranks of {type(error).__name__}: {str(error).partition('\n')[0]}"
        )
        raise_together(error, group, call)
        raise
    raise_together(None, group, call)


def agreed[Result](action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Return the result of what may fail on some ranks alone; see `together`."""
    with together(group=group):
        return action()


def agreed_on_first[Result](
    action: Callable[[], Result], group: dist.ProcessGroup | None = None
) -> Result | None:
    """`agreed` about what the first rank does alone; the others get None."""
    return agreed(lambda: action() if not dist.is_initialized() or dist.get_rank() == 0 else None, group)


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None, call: str = "") -> None:
    """Raise on every rank of the group (None: all ranks) when any of them gives an error; collective.

    A rank that gives an error raises that one. The others raise the first rank's: an error of its class or, where that
    cannot be made from a message, of a class above it; its message names the rank. Without process groups there is no
    other rank.
    Raises UnequalCallsError on all ranks when they do not give the same call, and PeerLostError when one of them does
    not come within the group's time.
    """
    try:
        told = _tell(error, patient_group() if group is None else group, call)
        if error is not None:
            raise error
    finally:
        # Else a frame of its own traceback would hold it, and the activations of all other frames with it.
        del error
    if len({at for at, _ in told}) > 1:
        places = "; ".join(f"rank {rank}: {at}" for rank, (at, _) in enumerate(told))
        raise UnequalCallsError(f"the ranks stand at different calls ({places}); call all of them alike")
    for _, failed in told:
        if failed is None:
            continue
        rank, classes, message, code = failed
        for module, name in classes:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    error = kind(f"rank {rank}: {message}")
                except (TypeError, ValueError, LookupError, AttributeError):  # it wants more than a message
                    continue
                if isinstance(error, CodedError):
                    error.code = code
                raise error
        raise RuntimeError(f"rank {rank}: {message}")


def _tell(error: Exception | None, group: dist.ProcessGroup | None, call: str) -> list[_Told]:
    """Call and error of each rank; nothing where all ranks are at the same call without an error."""
    if not dist.is_initialized():
        return []
    try:
        if error is not None and _is_of_a_lost_peer(error):
            raise error  # that peer would not come to this meeting either
        # Three numbers for the common case; over gloo they are on the CPU, so that nobody waits for the device.
        code = zlib.crc32(call.encode())
        device = "cpu" if dist.get_backend(group) == "gloo" else accelerator.device()
        extremes = torch.tensor([error is not None, code, -code], device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        failed, largest, smallest = extremes.tolist()
        if not failed and largest == -smallest:
            return []
        text: _Text | None = None
        if error is not None:  # as text, since not every error can be sent
            classes = [(kind.__module__, kind.__qualname__) for kind in type(error).__mro__]
            text = dist.get_rank(), classes, str(error) or type(error).__name__, code_of(error)
        told: list[_Told] = [("", None)] * dist.get_world_size(group)
        dist.all_gather_object(told, (call, text), group=group)
        return told
    except RuntimeError as failure:
        if not _is_of_a_lost_peer(failure):
            raise
        if error is not None and error is not failure:
            return []  # it says more
        late = "Timed out" in str(failure)
        limit = "; policy.megatron_cfg.process_group_timeout_s limits the wait" if late else ""
        raise PeerLostError(
            f"rank {dist.get_rank()} waited in vain for the other ranks before {call or 'the next call'}: one of them "
            f"hangs, or has ended{limit} ({failure})"
        ) from failure


def _is_of_a_lost_peer(error: Exception) -> bool:
    """Return whether a collective failed for want of a rank: gloo has no class for it, but tells its own file."""
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )
