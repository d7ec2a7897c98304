"""Gloo ranks that live as long as the test session: importing Megatron costs seconds, so it is paid once per process.

A test sends a function of its own file by name; every rank runs it and sends its result, or its traceback, back.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple


class RankFailedError(AssertionError):
    """A rank raised; the message is its traceback, and the code that of the first rank."""

    code = ""


class _Rank(NamedTuple):
    process: Any
    pipe: Connection


class Ranks:
    """Processes that serve as ranks, started when a world first needs them; `ranks(2)` is the first two of them.

    Worlds of different sizes share processes: each call enters its own world. prepare: what a process runs first.
    """

    def __init__(self, prepare: Callable[[int], None] | None = None):
        self._prepare = prepare
        self._ranks: list[_Rank] = []
        self._world = 0, 0

    def __call__(self, world_size: int) -> RankPool:
        """Return the pool of this size; processes that a test has broken are restarted."""
        return RankPool(self, world_size)

    def first(self, world_size: int) -> tuple[list[_Rank], int]:
        """Return the processes of a world, and the port where they meet."""
        if not self.alive:
            self.close()
        while len(self._ranks) < world_size:
            self._ranks.append(self._start(len(self._ranks)))
        if self._world[0] != world_size:
            self._world = world_size, _free_port()
        return self._ranks[:world_size], self._world[1]

    @property
    def alive(self) -> bool:
        """Whether every process that was started still serves."""
        return all(rank.process.is_alive() for rank in self._ranks)

    def close(self) -> None:
        """End every process."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self._ranks, self._world = [], (0, 0)

    def _start(self, rank: int) -> _Rank:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(rank, theirs, self._prepare or prepare_training),
            daemon=self._prepare is None,
        )
        process.start()
        theirs.close()
        return _Rank(process, ours)


class RankPool:
    """A world: so many processes of one process group."""

    def __init__(self, ranks: Ranks, world_size: int):
        self._ranks, self._world_size = ranks, world_size

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 180.0, stay: bool = False
    ) -> list[Any]:
        """Run `function(*args)` on every rank; the results in rank order.

        stay: the layout that the function leaves behind is there in the next call, if that is of the same size.
        """
        ranks, port = self._ranks.first(self._world_size)
        for rank in ranks:
            world = self._world_size, port
            rank.pipe.send((world, function.__code__.co_filename, function.__name__, args, stay))
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(ranks):
            for number, (_, pipe) in enumerate(ranks):
                if number not in answers and pipe.poll(0.01):
                    answers[number] = pipe.recv()
                    # The peers of a failed rank may hang in a collective: a short grace, then they are given up.
                    if not answers[number][0]:
                        deadline = min(deadline, time.monotonic() + 5.0)
            if time.monotonic() > deadline:
                break
        self._raise_failures(function.__name__, answers)
        return [answers[number][1] for number in range(len(ranks))]

    def _raise_failures(self, name: str, answers: dict[int, tuple[bool, Any]]) -> None:
        raised = [(rank, *told) for rank, (ok, told) in sorted(answers.items()) if not ok]
        failed = [f"rank {rank}:\n{text}" for rank, text, _ in raised]
        hung = [rank for rank in range(self._world_size) if rank not in answers]
        if hung:
            self._ranks.close()
            failed.append(f"ranks {hung} did not finish {name}")
        if failed:
            error = RankFailedError("\n".join(failed))
            error.code = raised[0][2] if raised else ""
            raise error

    @property
    def alive(self) -> bool:
        """Whether every rank still serves."""
        return self._ranks.alive


def _free_port() -> int:
    """Return a port below those that the system gives to connections; an idle pool does not hold its own.

    From the system's randomness: building a model seeds `random`, and two sessions side by side would draw one port.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def prepare_training(rank: int) -> None:
    """Get torch ready for Megatron."""
    import torch

    from nemo_rl_mcore.rank import accelerator

    torch.set_num_threads(1)
    accelerator.install(rank)


def _serve(rank: int, pipe: Connection, prepare: Callable[[int], None]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    sys.path.insert(0, os.path.dirname(__file__))
    prepare(rank)
    while True:
        (world_size, port), path, name, args, stay = pipe.recv()
        try:
            _enter(world_size, port)
            pipe.send((True, getattr(_load(path), name)(*args)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
            pipe.send((False, (traceback.format_exc(), getattr(error, "code", ""))))
        if not stay and (tiny := sys.modules.get("tiny")) is not None:
            tiny.leave_call()  # an idle pool holds no groups, whose threads would slow the others down


def _enter(world_size: int, port: int) -> None:
    """Leave the last call's world, unless it is the same one."""
    world = {"WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
    if world.items() <= os.environ.items():
        return
    if "WORLD_SIZE" in os.environ and (rendezvous := sys.modules.get("nemo_rl_mcore.rank.rendezvous")):
        if (tiny := sys.modules.get("tiny")) is not None:
            tiny.leave()
        rendezvous.leave()
    os.environ.update(world)


@cache
def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cases_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
