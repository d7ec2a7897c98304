"""Gloo ranks that live as long as the test session: importing Megatron costs seconds, so it is paid once per rank.

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
from typing import Any


class RankFailedError(AssertionError):
    """A rank raised; the message is its traceback."""


class RankPool:
    """`world_size` processes of one process group; `prepare` is what each runs first."""

    def __init__(self, world_size: int, prepare: Callable[[int], None] | None = None):
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, port, theirs, prepare or prepare_training),
                daemon=prepare is None,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 180.0, stay: bool = False
    ) -> list[Any]:
        """Run `function(*args)` on every rank; the results in rank order.

        stay: the layout that the function leaves behind is there in the next call.
        """
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args, stay))
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.01):
                    answers[rank] = pipe.recv()
                    # The peers of a failed rank may hang in a collective: a short grace, then they are given up.
                    if not answers[rank][0]:
                        deadline = min(deadline, time.monotonic() + 5.0)
            if time.monotonic() > deadline:
                break
        self._raise_failures(function.__name__, answers)
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _raise_failures(self, name: str, answers: dict[int, tuple[bool, Any]]) -> None:
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        hung = [rank for rank in range(len(self._pipes)) if rank not in answers]
        if hung:
            self.close()
            failed.append(f"ranks {hung} did not finish {name}")
        if failed:
            raise RankFailedError("\n".join(failed))

    @property
    def alive(self) -> bool:
        """Whether every rank still serves."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End every rank."""
        for process in self._processes:
            process.kill()
            process.join()


def _free_port() -> int:
    """Below those that the system gives to connections: nothing else takes it before rank 0 does."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def prepare_training(rank: int) -> None:
    """Get torch ready for Megatron."""
    import torch

    from nemo_rl_mcore import accelerator

    torch.set_num_threads(1)
    accelerator.install(rank)


def _serve(rank: int, world_size: int, port: int, pipe: Connection, prepare: Callable[[int], None]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.path.insert(0, os.path.dirname(__file__))
    prepare(rank)
    while True:
        path, name, args, stay = pipe.recv()
        try:
            pipe.send((True, getattr(_load(path), name)(*args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
            pipe.send((False, traceback.format_exc()))
        if not stay and (tiny := sys.modules.get("tiny")) is not None:
            tiny.leave()  # an idle pool holds no groups, whose threads would slow the others down


@cache
def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cases_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
