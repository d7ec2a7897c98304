"""The worker in one process over NCCL, against numbers that a process without a GPU makes of the same weights."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
import worker_state
from one_rank import be_the_only_rank
from report import Report
from safetensors.torch import load_file, save_file
from torch import Tensor
from trained_worker import (
    EXACT,
    PRECISIONS,
    REPEATED,
    STEPS,
    TOLERANCES,
    batch,
    changed_otherwise,
    changes,
    check_checkpoint,
    compare,
    leave,
    note_differences,
    prepare,
    trained,
    weights,
    worker_config,
    write_start,
)

from nemo_rl_mcore.losses import MseValueLossFn
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.policy_backend import OnDevice


def run(report: Report, device: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with _reference_process(folder, device) as reference:
            report.doing("importing Megatron")
            be_the_only_rank()
            prepare()
            report.doing("the numbers of a process without a GPU")
            _finish(reference)
        for precision in PRECISIONS:
            check_precision(report, precision, device, folder)
        check_critic(report, folder, device)
        check_reference_places(report, folder, device)
        check_offload(report, folder, device)
        report.doing("leaving the process group")
        leave()


# The numbers of the CPU


def _reference_process(folder: Path, device: str) -> subprocess.Popen[str]:
    blind = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder), device]
    return subprocess.Popen(command, env=os.environ | blind, stderr=subprocess.PIPE, text=True)


def _finish(reference: subprocess.Popen[str]) -> None:
    """Wait for the numbers. Raises RuntimeError with the last line of what the process wrote, if it failed."""
    _, errors = reference.communicate()
    if reference.returncode:
        sys.stderr.write(errors)
        raise RuntimeError(f"the process without a GPU failed: {errors.strip().splitlines()[-1:]}")


def be_reference(folder: Path, device: str) -> None:
    be_the_only_rank()
    prepare(threads=1 if device == "cpu" else os.cpu_count())
    assert not accelerator.has_cuda()
    for precision in PRECISIONS:
        write_start(folder / precision, precision, device)
        for fused in (False, True):
            found = trained(worker_config(folder, precision, device, fused), device, fused)[0]
            save_file(found, folder / f"{precision}-{fused}.safetensors")
    leave()


# Comparisons


def check_precision(report: Report, precision: str, device: str, folder: Path) -> None:
    """Every check of a precision; what a failed run leaves out, the checks that need it tell."""
    own: dict[bool, dict[str, Tensor]] = {}
    for fused in (False, True):
        name = f"{precision}, {'fused' if fused else 'unfused'}"
        with report.attempt(f"{name}: as on the CPU", "a worker trains"):
            config = worker_config(folder, precision, device, fused)
            own[fused], worker = trained(config, device, fused)
            expected = load_file(folder / f"{precision}-{fused}.safetensors")
            compare(report, f"{name}: as on the CPU", own[fused], expected, TOLERANCES[precision])
            report.compared(f"{name}: as on the CPU", "the reference policy is the start, bit for bit",
                            _reference_moved(own[fused]), EXACT)  # fmt: skip
            check_abort(report, name, worker, device, fused)
            check_checkpoint(report, name, worker, device, tiny.grpo_loss(fused=fused))
            check_split_step(report, name, own[fused], config, device, fused)
    with report.attempt(f"{precision}: fused as unfused", "both trained"):
        compare(report, f"{precision}: fused as unfused", own[True], own[False], TOLERANCES[precision])


def check_critic(report: Report, folder: Path, device: str) -> None:
    """A critic in bfloat16, whose head is float32, and whose gradients lie in several buckets with padding between."""
    buckets = {"distributed_data_parallel_config": {"overlap_grad_reduce": True}}
    with report.attempt("bfloat16, critic: checkpoint", "a worker trains"):
        config = worker_config(folder, "bfloat16", device, fused=False, sharing=buckets)
        worker, loss_fn = tiny.worker(config, role="value"), MseValueLossFn({"cliprange": 0.2})
        worker.train(batch(device, 0, config.model.vocab_size), loss_fn)
        check_checkpoint(report, "bfloat16, critic", worker, device, loss_fn)


def _reference_moved(found: Mapping[str, Tensor]) -> float:
    return float((found["reference log-probabilities"] - found["log-probabilities"]).abs().max())


def check_split_step(
    report: Report, name: str, whole: Mapping[str, Tensor], config: Any, device: str, fused: bool
) -> None:
    """A new worker gets each batch in two chunks of whole microbatches, with log-probabilities in between."""
    group, tolerance = f"{name}: the split step is train", REPEATED[device][config.precision]
    with report.attempt(group, "two chunks a step"):
        worker = tiny.worker(config)
        before, vocabulary = weights(worker), config.model.vocab_size
        for step in range(STEPS):
            rows = batch(device, step, vocabulary)
            worker.begin_train_step(tiny.grpo_loss(fused=fused))
            for start, end in ((0, 2), (2, 8)):
                worker.train_microbatch(rows.slice(start, end))
                worker.get_logprobs(data=rows)
            result = worker.finish_train_step()
            norm = float(result["grad_norm"])
            difference = abs(norm - float(whole["gradient norm"][step])) / (1 + norm)
            report.compared(group, f"gradient norm of step {step}", difference, tolerance)
        difference = changed_otherwise(changes(before, weights(worker)), whole)
        report.compared(group, "weights", difference, tolerance)


def check_abort(report: Report, name: str, worker: Any, device: str, fused: bool) -> None:
    with report.attempt(f"{name}: abort leaves no trace", "tensors and settings that differ in a bit"):
        # The gradients of the step before are no state: a step begins by clearing them.
        worker.backend.zero_grad()
        before = worker_state.capture(worker) | {"device generators": accelerator.device_rng_states()[-1]}
        worker.begin_train_step(tiny.grpo_loss(fused=fused))
        worker.train_microbatch(batch(device, 7, worker.policy.model.vocab_size))
        torch.rand(3, device=accelerator.device())
        worker.abort_train_step()
        after = worker_state.capture(worker) | {"device generators": accelerator.device_rng_states()[-1]}
        note_differences(report, f"{name}: abort leaves no trace", worker_state.differences(before, after))


def check_reference_places(report: Report, folder: Path, device: str) -> None:
    """The reference kept on the device and in the CPU's memory: the same bits, and how long the two exchanges take."""
    from nemo_rl_mcore.rank.megatron import reference_policy

    group, found, seconds = "the reference on the device and on the CPU", [], []
    whole = reference_policy.PIECE_BYTES
    with report.attempt(group, "both read"):
        for on_device in (True, False):
            config = worker_config(folder, "bfloat16", device, fused=False)
            # So small that each spare is filled many times while the other one is emptied.
            reference_policy.PIECE_BYTES = 1 << 12
            reference_policy.ON_DEVICE = on_device
            worker = tiny.worker(config)
            worker.train(batch(device, 0, config.model.vocab_size), tiny.grpo_loss())
            before = weights(worker)
            rows = batch(device, 9, config.model.vocab_size)
            read = worker.get_reference_policy_logprobs(data=rows)["reference_logprobs"]
            after = weights(worker)
            moved = max(float((after[name] - before[name]).abs().max()) for name in before)
            report.compared(group, f"the policy's own, on_device: {on_device}", moved, EXACT)
            found.append(read)
            reference_policy.PIECE_BYTES = whole
            seconds.append(_seconds_of_exchanges(worker.backend.chunks, on_device))
        report.compared(group, "log-probabilities", float((found[0] - found[1]).abs().max()), EXACT)
        report.figure(
            "exchanges with the reference", {"": "CPU / device", "time ratio": seconds[1] / seconds[0]}
        )


def _seconds_of_exchanges(chunks: Any, on_device: bool, repeats: int = 10) -> float:
    """Seconds of a reference pass in which nothing is computed."""
    from nemo_rl_mcore.rank.megatron.reference_policy import ReferencePolicy

    reference = ReferencePolicy(chunks, on_device=on_device)
    for repeat in range(repeats + 1):
        if repeat == 1:  # the first one takes memory
            accelerator.synchronize(accelerator.device())
            start = time.perf_counter()
        with reference.swapped_in():
            pass
    accelerator.synchronize(accelerator.device())
    return (time.perf_counter() - start) / repeats


def check_offload(report: Report, folder: Path, device: str) -> None:
    """Three steps with everything off the device between them are three without; what is away takes no memory."""
    for precision in PRECISIONS:
        _check_offload_of(report, folder, device, precision)


def _check_offload_of(report: Report, folder: Path, device: str, precision: str) -> None:
    group = f"{precision}: offloading between steps"
    with report.attempt(group, "three steps"):
        config = worker_config(folder, precision, device, fused=False)
        found = trained(config, device, fused=False)[0]
        gc.collect()
        others = torch.cuda.memory_allocated()  # the libraries' own, which no model gives back
        worker = tiny.worker(config.model_copy(update={"offload": "all"}), init_reference_model=False)
        before, vocabulary = weights(worker), config.model.vocab_size
        for step in range(STEPS):
            worker.train(batch(device, step, vocabulary), tiny.grpo_loss())
            held = {what: _allocated(worker, what) - others for what in (OnDevice.WEIGHTS, OnDevice.NOTHING)}
            worker.get_logprobs(data=batch(device, 9, vocabulary))
            held[OnDevice.EVERYTHING] = _allocated(worker, OnDevice.EVERYTHING) - others
        difference = changed_otherwise(changes(before, weights(worker)), found)
        report.compared(group, "weights", difference, REPEATED[device][precision])
        whole = held[OnDevice.EVERYTHING]
        if whole:  # torch counts memory on GPUs alone
            shares = {f"{what.value} kept": kept / whole for what, kept in held.items()}
            report.figure("share of the device memory", {"": precision, **shares})
            report.compared(group, "memory with nothing kept, of all", held[OnDevice.NOTHING] / whole, 0.1)


def _allocated(worker: Any, what: Any) -> int:
    worker.backend.keep_on_device(what)
    accelerator.synchronize(accelerator.device())
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    be_reference(Path(sys.argv[1]), sys.argv[2])
