"""Weights from one process to another through the product's sender and receiver, without Ray.

A worker sends over CUDA IPC (`--device cpu`: shared memory) to a process that keeps what arrives. Every tensor must
arrive bit for bit, and after `close` both processes must have given the memory of the buffers back.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tiny
import torch
from one_rank import be_the_only_rank
from report import Report
from torch import Tensor
from trained_worker import weights

from nemo_rl_mcore.engine.receivers import Receiver
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.refit.digests import digests as refit_digests
from nemo_rl_mcore.rank.refit.sender import EngineLostError, RefitSettings, open_sender
from nemo_rl_mcore.rank.refit.transports import Bucket

NamedTensors = Iterable[tuple[str, Tensor]]

TRANSPORTS = {"cuda": "cuda_ipc", "cpu": "shared_memory"}
ANSWER_S = 60.0
BUCKET = {"cuda": 64 << 20, "cpu": 1 << 16}
# A buffer that stays shows as at least one bucket; contexts and kernels that are loaded late take less than half.
LEFT_OVER = {"cuda": float(BUCKET["cuda"] // 2), "cpu": 0.0}


def run(report: Report, device: str) -> None:
    """A worker's weights before and after a step, tensors of odd shapes and dtypes, and the memory afterwards."""
    accelerator.install()  # before Megatron is imported
    import tiny

    report.doing("a worker of one rank")
    be_the_only_rank()
    worker = tiny.worker(tiny.policy_config(precision="bfloat16"))
    report.doing("the start of the receiving process")
    with receiving_process(device) as engine:
        check_odd_tensors(report, engine, device)
        check_memory(report, engine, device)
        if device == "cuda":
            measure_speed(report, engine, device)
        check_worker(report, worker, engine, device)
    report.doing("leaving the process group")
    worker.shutdown()


# The receiving process


class ReceivingProcess:
    """`sender.Engines`: one process behind a pipe, which answers in the order it is asked."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._asked = pipe, 0

    def load_bucket(self, message: dict[str, Any]) -> int:
        return self._send("load", message)

    def wait(self, loading: int, timeout_s: float) -> None:
        self._answer(loading, "load", timeout_s)

    def ask(self, command: str) -> Any:
        return self._answer(self._send(command, None), command, ANSWER_S)

    def _send(self, command: str, message: Any) -> int:
        self._asked += 1
        self._pipe.send((self._asked, command, message))
        return self._asked

    def _answer(self, number: int, command: str, timeout_s: float) -> Any:
        """Raises EngineLostError after the timeout, or what the process raised.

        A sender that fails does not wait for what it has asked before: answers that nobody waited for are dropped.
        """
        answered = 0
        while answered < number:
            if not self._pipe.poll(timeout_s):
                raise EngineLostError(f"no answer to {command!r} within {timeout_s:g} s")
            try:
                answered, answer = self._pipe.recv()
            except EOFError as error:
                raise EngineLostError(
                    f"the receiving process ended before it answered {command!r}"
                ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def receiving_process(device: str) -> Iterator[ReceivingProcess]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_receive, args=(there, device), daemon=True)
    process.start()
    there.close()  # so that its end is seen here
    engine = ReceivingProcess(here)
    try:
        engine.ask("hello")
        yield engine
    finally:
        here.close()  # which ends it
        process.join(10)
        process.kill()


def _receive(pipe: Connection, device_type: str) -> None:
    """Answer commands until the pipe closes; an exception is an answer too."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context is there before any memory is measured
    receiver = Receiver(device)
    held: dict[str, Tensor] = {}
    while True:
        try:
            number, command, message = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((number, _obey(command, message, receiver, held, device)))
        except Exception as error:  # noqa: BLE001 - it is raised where it was asked
            pipe.send((number, error))


def _obey(
    command: str, message: Any, receiver: Receiver, held: dict[str, Tensor], device: torch.device
) -> Any:
    match command:
        case "load":
            bucket = Bucket.from_message(message)
            held |= {n: tensor.clone() for n, tensor in bucket.read(receiver.open(bucket.location))}
            accelerator.synchronize(device)  # the sender may fill the buffer again once it is told
        case "digests":
            return digests(held.items())
        case "refit digests":
            return refit_digests(held.items())
        case "forget":
            held.clear()
            receiver.close()
            return shared_memory_in_use(device)
        case "hello":
            pass
        case _:
            raise ValueError(command)
    return None


# Checks


def check_worker(report: Report, worker: Any, engine: ReceivingProcess, device: str) -> None:
    group = f"a worker's weights over {TRANSPORTS[device]}"
    seen: list[dict[str, str]] = []
    with report.attempt(group, "send, train, send"):
        worker.connect_engines(engine, RefitSettings(TRANSPORTS[device], BUCKET[device], ANSWER_S))
        for moment in ("at the start", "after a step"):
            report.doing(f"{group}: {moment}")
            sent, expected = worker.send_weights(), digests(weights(worker).items())
            seen.append(engine.ask("digests"))
            report.compared(group, f"tensors that differ, {moment}", _wrong(seen[-1], expected), 0.0)
            report.compared(group, f"tensors missing, {moment}", float(len(expected) - len(sent)), 0.0)
            held = engine.ask("refit digests")
            report.compared(group, f"digests that differ, {moment}", _wrong(held, sent), 0.0)
            assert worker.train(tiny.grpo_batch(), tiny.grpo_loss())["update_successful"]
        same = sum(seen[0][name] == seen[1][name] for name in seen[0]) / len(seen[0])
        report.compared(group, "share of tensors that a step left as they were", same, 0.5)
    engine.ask("forget")


def check_odd_tensors(report: Report, engine: ReceivingProcess, device: str) -> None:
    """Scalars, odd sizes, other dtypes, values that are no numbers, and far more of them than buffers."""
    group = f"odd tensors over {TRANSPORTS[device]}"
    with report.attempt(group, "tensors that differ"):
        tensors = dict(odd_tensors(device))
        with _sender(engine, device, bucket=4096) as sender:
            sent = sender.send(tensors.items())
        difference = _wrong(engine.ask("digests"), digests(tensors.items()))
        report.compared(group, "tensors that differ", difference, 0.0)
        told = refit_digests((name, tensor.cpu()) for name, tensor in tensors.items())
        report.compared(group, "digests that are not those on a CPU", _wrong(sent, told), 0.0)
    engine.ask("forget")
    with report.attempt(group, "a tensor that is larger than a buffer is refused"):
        with _sender(engine, device, bucket=4096) as sender:
            try:
                sender.send([("large", torch.zeros(4097, dtype=torch.uint8, device=device))])
                refused = False
            except ValueError:
                refused = True
        report.compared(group, "a tensor that is larger than a buffer is refused", float(not refused), 0.0)
    engine.ask("forget")


def odd_tensors(device: str) -> Iterator[tuple[str, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    shapes = [(17, 11), (3,), (1,), (5, 60), (13, 13), (), (30, 30), (2, 2), (700,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    for number in range(54):
        values = torch.randn(shapes[number % 9], generator=noise).to(dtypes[number // 9 % 3])
        if number % 7 == 0:
            values.view(-1)[0] = float("nan") if number % 2 else float("inf")
        yield f"weight.{number}", values.to(device)


def check_memory(report: Report, engine: ReceivingProcess, device: str) -> None:
    """What a refit's buffers took is there again after `close`, on both sides, also if one was never opened."""
    group = f"memory after {TRANSPORTS[device]}"
    where = accelerator.device()
    for case, count in (
        ("both buffers were opened", 4),
        ("one buffer was opened", 1),
        ("none was opened", 0),
    ):
        with report.attempt(group, f"{case}: bytes still taken"):
            _refit_and_forget(engine, device, 4)  # what is allocated once is allocated
            before = shared_memory_in_use(where), engine.ask("forget")
            _refit_and_forget(engine, device, count)
            after = shared_memory_in_use(where), engine.ask("forget")
            left = max(0, after[0] - before[0], after[1] - before[1])
            report.compared(group, f"{case}: bytes still taken", float(left), LEFT_OVER[device])


def _refit_and_forget(engine: ReceivingProcess, device: str, buckets: int) -> None:
    """Send tensors that fill so many buckets, then let go on both sides, the receiver first."""
    size = BUCKET[device] - 64
    with _sender(engine, device, BUCKET[device]) as sender:
        sender.send(
            (f"filler.{n}", torch.zeros(size, dtype=torch.uint8, device=device)) for n in range(buckets)
        )
        engine.ask("forget")


def shared_memory_in_use(device: torch.device) -> int:
    """Bytes that a buffer which was not given back would add to: of the whole GPU, or of this process's mappings."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines if "memfd:nemo_rl_mcore" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in mapped)


def measure_speed(report: Report, engine: ReceivingProcess, device: str) -> None:
    """Seconds to send 4 GiB of bfloat16, which the receiver copies out of the buffers, without digests and with."""
    pieces, bucket = 64, 256 << 20
    with report.attempt("speed", "4 GiB"):
        piece = torch.zeros(8192, 4096, dtype=torch.bfloat16, device=device)  # 64 MiB
        for verify in (False, True):
            with _sender(engine, device, bucket, verify) as sender:
                sender.send([("layer.0", piece)])
                torch.cuda.synchronize()
                start = time.perf_counter()
                sender.send((f"layer.{n}", piece) for n in range(pieces))
                seconds = time.perf_counter() - start
            rate = pieces * piece.nbytes / seconds / 1e9
            what = f"4 GiB, buckets of 256 MiB, {'with' if verify else 'without'} the sender's digests"
            report.figure("refit", {"": what, "seconds": seconds, "GB/s": rate})
    engine.ask("forget")


@contextmanager
def _sender(engine: ReceivingProcess, device: str, bucket: int, verify: bool = True) -> Iterator[Any]:
    settings = RefitSettings(TRANSPORTS[device], bucket, ANSWER_S, verify=verify)
    sender = open_sender(settings, engine, accelerator.device())
    try:
        yield sender
    finally:
        sender.close()


def digests(tensors: NamedTensors) -> dict[str, str]:
    """Of dtype, shape and every byte."""
    return {name: _digest(tensor) for name, tensor in tensors}


def _digest(tensor: Tensor) -> str:
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + octets).hexdigest()


def _wrong(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    names = found.keys() | expected.keys()
    return float(sum(found.get(name) != expected.get(name) for name in names))
