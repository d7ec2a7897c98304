"""The worker in one process over NCCL, against numbers that a process without a GPU makes of the same weights.

Log-probabilities, three train steps, the reference policy, the split step, abort and checkpoints, in both precisions,
fused and not. With `--device cpu` both processes compute on the CPU, over gloo.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from one_rank import be_the_only_rank
from report import Report
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_mcore import accelerator

PRECISIONS = ("float32", "bfloat16")
STEPS = 3
# Of the batch and, where the model is larger than the tests' own, of the model.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "length": 64,
        "chunk_size": 64,
        "max_total_sequence_length": 64,
        "model": {
            "num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2,
            "ffn_hidden_size": 512, "vocab_size": 4096, "max_position_embeddings": 64, "init_method_std": 0.05,
        },
    },
    "cpu": {"length": 12, "chunk_size": 5, "max_total_sequence_length": 16, "model": {}},
}  # fmt: skip

# What is allowed, by precision. `weights` is the norm of the difference of what three steps of Adam at 1e-3 changed,
# over the norm of what they changed: Adam divides a gradient by its own size, and where that is all rounding an entry
# may go the other way. Losses and norms are relative to 1 + their size.
TOLERANCES: dict[str, dict[str, float]] = {
    # The device against the CPU: other kernels, sums in another order; float32 products are IEEE, without TF32.
    "float32": {"log-probabilities": 1e-4, "loss": 2e-5, "gradient norm": 1e-4, "weights": 5e-3},
    # Activations are rounded to eight bits of mantissa at other places.
    "bfloat16": {"log-probabilities": 1e-1, "loss": 5e-2, "gradient norm": 1.5e-1, "weights": 4e-1},
    # Transformer Engine multiplies float32 matrices in TF32, of ten bits.
    "float32 in TF32": {"log-probabilities": 2e-2, "loss": 5e-3, "gradient norm": 1e-2, "weights": 1e-1},
}
# The same device, kernels and microbatches, in the same order: the CPU repeats every bit, a GPU may add atomically.
REPEATED = {"cuda": {"float32": 1e-5, "bfloat16": 1e-2}, "cpu": {"float32": 0.0, "bfloat16": 0.0}}
# Copies are exact.
EXACT = 0.0


def run(report: Report, device: str) -> None:
    """The CPU's numbers from a process of its own, then this device's, compared."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with _reference_process(folder, device) as reference:
            report.doing("importing Megatron")
            be_the_only_rank()
            _prepare(threads=None)
            report.doing("the numbers of a process without a GPU")
            _finish(reference)
        for precision in PRECISIONS:
            check_precision(report, precision, device, folder)
        check_reference_places(report, folder, device)
        check_offload(report, folder, device)
        if device == "cuda":
            check_transformer_engine(report, folder)
        report.doing("leaving the process group")
        _leave()


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
    """Draw weights, write them as Hugging Face folders, and write what the CPU makes of them."""
    be_the_only_rank()
    _prepare(threads=1 if device == "cpu" else os.cpu_count())
    assert not accelerator.has_cuda()
    for precision in PRECISIONS:
        _write_start(folder / precision, precision, device)
        for fused in (False, True):
            found = trained(_config(folder, precision, device, fused), device, fused)[0]
            save_file(found, folder / f"{precision}-{fused}.safetensors")
    _leave()


def _write_start(folder: Path, precision: str, device: str) -> None:
    from tiny import policy_config, worker

    from nemo_rl_mcore.config.hf.hf_config import hf_config_of

    sizes = SIZES[device]
    config = policy_config(
        model=sizes["model"],
        precision=precision,
        max_total_sequence_length=sizes["max_total_sequence_length"],
    )
    folder.mkdir()
    save_file(weights(worker(config, seed=0)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config_of(config.model, dtype=precision)), "utf-8")


# What both processes do


def _prepare(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    accelerator.install()  # before Megatron is imported, which the tests' helpers do
    importlib.import_module("tiny")
    importlib.import_module("worker_state")


def _leave() -> None:
    import tiny

    tiny.leave()
    torch.distributed.destroy_process_group()


def _config(folder: Path, precision: str, device: str, fused: bool, **megatron: Any) -> Any:
    import tiny

    sizes = SIZES[device]
    return tiny.policy_config(
        model={"init_method_std": sizes["model"].get("init_method_std", 0.1), **sizes["model"]},
        megatron={
            "use_fused_linear_logprobs": fused,
            "fused_linear_logprobs_chunk_size": sizes["chunk_size"] if fused else None,
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
            "transformer_impl": "local",
            **megatron,
        },
        model_name=str(folder / precision),
        precision=precision,
        max_total_sequence_length=sizes["max_total_sequence_length"],
    )


def batch(device: str, seed: int, vocabulary: int) -> Any:
    """The tests' batch; its log-probabilities are about those of an untrained model of this vocabulary."""
    import tiny

    rows = tiny.grpo_batch(length=SIZES[device]["length"], seed=seed)
    larger = float(torch.tensor(vocabulary / tiny.VOCABULARY).log())
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        rows[name] = rows[name] - larger
    return rows


def weights(of: Any) -> dict[str, Tensor]:
    """Copies on the CPU of all weights by their Hugging Face names, whatever the layers are made of."""
    from nemo_rl_mcore.megatron.hf_weights.export import full_tensors

    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in full_tensors(of.backend.chunks, of.policy)
    }


def trained(config: Any, device: str, fused: bool) -> tuple[dict[str, Tensor], Any]:
    """A worker after three steps, and what it reported on the way."""
    import tiny

    worker = tiny.worker(config)
    before, vocabulary = weights(worker), config.model.vocab_size
    found = {"log-probabilities": worker.get_logprobs(data=batch(device, 9, vocabulary))["logprobs"]}
    loss_fn = tiny.grpo_loss(fused=fused)
    steps = [worker.train(batch(device, step, vocabulary), loss_fn) for step in range(STEPS)]
    assert all(step["update_successful"] for step in steps), [step["skip_reasons"] for step in steps]
    found["loss"] = torch.cat([step["global_loss"] for step in steps])
    found["gradient norm"] = torch.cat([step["grad_norm"] for step in steps])
    reference = worker.get_reference_policy_logprobs(data=batch(device, 9, vocabulary))
    found["reference log-probabilities"] = reference["reference_logprobs"]
    return found | _changes(before, weights(worker)), worker


def _changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"changed {name}": weight.float() - before[name].float() for name, weight in after.items()}


# Comparisons


def check_precision(report: Report, precision: str, device: str, folder: Path) -> None:
    """Every check of a precision; what a failed run leaves out, the checks that need it tell."""
    own: dict[bool, dict[str, Tensor]] = {}
    for fused in (False, True):
        name = f"{precision}, {'fused' if fused else 'unfused'}"
        with report.attempt(f"{name}: as on the CPU", "a worker trains"):
            config = _config(folder, precision, device, fused)
            own[fused], worker = trained(config, device, fused)
            expected = load_file(folder / f"{precision}-{fused}.safetensors")
            compare(report, f"{name}: as on the CPU", own[fused], expected, TOLERANCES[precision])
            report.compared(f"{name}: as on the CPU", "the reference policy is the start, bit for bit",
                            _reference_moved(own[fused]), EXACT)  # fmt: skip
            check_abort(report, name, worker, device, fused)
            check_checkpoint(report, name, worker, device, fused)
            check_split_step(report, name, own[fused], config, device, fused)
    with report.attempt(f"{precision}: fused as unfused", "both trained"):
        compare(report, f"{precision}: fused as unfused", own[True], own[False], TOLERANCES[precision])


def compare(
    report: Report,
    group: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, float],
) -> None:
    """Note the differences of what `trained` returned."""
    values = found["log-probabilities"] - expected["log-probabilities"]
    report.compared(group, "log-probabilities", float(values.abs().max()), tolerances["log-probabilities"])
    for name in ("loss", "gradient norm"):
        relative = (found[name] - expected[name]).abs() / (1 + expected[name].abs())
        report.compared(group, name, float(relative.max()), tolerances[name])
    report.compared(group, "weights", _changed_otherwise(found, expected), tolerances["weights"])


def _changed_otherwise(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    names = sorted(name for name in expected if name.startswith("changed "))
    assert names == sorted(name for name in found if name.startswith("changed "))
    difference = torch.stack([(found[name] - expected[name]).norm() for name in names]).norm()
    return float(difference / torch.stack([expected[name].norm() for name in names]).norm())


def _reference_moved(found: Mapping[str, Tensor]) -> float:
    return float((found["reference log-probabilities"] - found["log-probabilities"]).abs().max())


def check_split_step(
    report: Report, name: str, whole: Mapping[str, Tensor], config: Any, device: str, fused: bool
) -> None:
    """A new worker gets each batch in two chunks of whole microbatches, with log-probabilities in between."""
    import tiny

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
        difference = _changed_otherwise(_changes(before, weights(worker)), whole)
        report.compared(group, "weights", difference, tolerance)


def check_abort(report: Report, name: str, worker: Any, device: str, fused: bool) -> None:
    """Everything that a step may change, before it was opened and after it was dropped."""
    import tiny
    import worker_state

    with report.attempt(f"{name}: abort leaves no trace", "tensors and settings that differ in a bit"):
        # The gradients of the step before are no state: a step begins by clearing them.
        worker.backend.zero_grad()
        before = worker_state.capture(worker) | {"device generators": accelerator.device_rng_states()[-1]}
        worker.begin_train_step(tiny.grpo_loss(fused=fused))
        worker.train_microbatch(batch(device, 7, worker.policy.model.vocab_size))
        torch.rand(3, device=accelerator.device())
        worker.abort_train_step()
        after = worker_state.capture(worker) | {"device generators": accelerator.device_rng_states()[-1]}
        _note_differences(report, f"{name}: abort leaves no trace", worker_state.differences(before, after))


def check_checkpoint(report: Report, name: str, worker: Any, device: str, fused: bool) -> None:
    """What is saved comes back bit for bit, and the step after it is the step that followed before."""
    import tiny
    import worker_state

    group, rows = f"{name}: checkpoint", batch(device, 5, worker.policy.model.vocab_size)
    tolerance, loss_fn = REPEATED[device][worker.policy.precision], tiny.grpo_loss(fused=fused)
    with report.attempt(group, "save, train, load, train"), tempfile.TemporaryDirectory() as scratch:
        saved, before = _lasting(worker_state.capture(worker)), weights(worker)
        worker.save_checkpoint(f"{scratch}/saved")
        first = float(worker.train(rows, loss_fn)["grad_norm"])
        went_on = _changes(before, weights(worker))
        worker.load_checkpoint(f"{scratch}/saved")
        loaded = _lasting(worker_state.capture(worker))
        _note_differences(report, group, worker_state.differences(saved, loaded))
        again = float(worker.train(rows, loss_fn)["grad_norm"])
        report.compared(group, "gradient norm of the step after", abs(first - again) / (1 + first), tolerance)
        difference = _changed_otherwise(_changes(before, weights(worker)), went_on)
        report.compared(group, "weights after it", difference, tolerance)


def _lasting(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without the gradients of the step before, which a checkpoint leaves out."""
    return {key: value for key, value in state.items() if not key.startswith("gradient ")}


def _note_differences(report: Report, group: str, names: list[str]) -> None:
    report.compared(group, "tensors and settings that differ in a bit", float(len(names)), EXACT)
    if names:
        sys.stderr.write(f"{group}: {', '.join(names)}\n")


def check_reference_places(report: Report, folder: Path, device: str) -> None:
    """The reference kept on the device and in the CPU's memory: the same bits, and how long the two exchanges take."""
    import tiny

    group, found, seconds = "the reference on the device and on the CPU", [], []
    with report.attempt(group, "both read"):
        for on_device in (True, False):
            config = _config(folder, "bfloat16", device, fused=False)
            worker = tiny.worker(config.model_copy(update={"reference_on_device": on_device}))
            worker.train(batch(device, 0, config.model.vocab_size), tiny.grpo_loss())
            before = weights(worker)
            rows = batch(device, 9, config.model.vocab_size)
            read = worker.get_reference_policy_logprobs(data=rows)["reference_logprobs"]
            after = weights(worker)
            moved = max(float((after[name] - before[name]).abs().max()) for name in before)
            report.compared(group, f"the policy's own, on_device: {on_device}", moved, EXACT)
            found.append(read)
            seconds.append(_seconds_of_exchanges(worker.backend.chunks, on_device))
        report.compared(group, "log-probabilities", float((found[0] - found[1]).abs().max()), EXACT)
        report.figure(
            "exchanges with the reference", {"": "CPU / device", "time ratio": seconds[1] / seconds[0]}
        )


def _seconds_of_exchanges(chunks: Any, on_device: bool, repeats: int = 10) -> float:
    """Seconds of a reference pass in which nothing is computed."""
    from nemo_rl_mcore.megatron.reference_policy import ReferencePolicy

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
    import tiny

    from nemo_rl_mcore.training.policy_backend import OnDevice

    for precision in PRECISIONS:
        group = f"{precision}: offloading between steps"
        with report.attempt(group, "three steps"):
            config = _config(folder, precision, device, fused=False)
            found = trained(config, device, fused=False)[0]
            gc.collect()  # of that worker nothing is to be counted
            worker = tiny.worker(config.model_copy(update={"offload": "all"}), init_reference_model=False)
            before, vocabulary = weights(worker), config.model.vocab_size
            for step in range(STEPS):
                worker.train(batch(device, step, vocabulary), tiny.grpo_loss())
                held = {what: _allocated(worker, what) for what in (OnDevice.WEIGHTS, OnDevice.NOTHING)}
                worker.get_logprobs(data=batch(device, 9, vocabulary))
                held[OnDevice.EVERYTHING] = _allocated(worker, OnDevice.EVERYTHING)
            difference = _changed_otherwise(_changes(before, weights(worker)), found)
            report.compared(group, "weights", difference, REPEATED[device][precision])
            whole = held[OnDevice.EVERYTHING]
            if whole:  # torch counts memory on GPUs alone
                shares = {f"{what.value} kept": kept / whole for what, kept in held.items()}
                report.figure("share of the device memory", {"": precision, **shares})
                report.compared(
                    group, "memory with nothing kept, of all", held[OnDevice.NOTHING] / whole, 0.5
                )


def _allocated(worker: Any, what: Any) -> int:
    worker.backend.keep_on_device(what)
    accelerator.synchronize(accelerator.device())
    return torch.cuda.memory_allocated()


def check_transformer_engine(report: Report, folder: Path) -> None:
    """The same weights in Transformer Engine's layers, against the same numbers; nothing without the package."""
    if find_spec("transformer_engine") is None:
        report.figure("left out", {"": "Transformer Engine", "why": "not installed"})
        return
    for precision in PRECISIONS:
        tolerances = TOLERANCES["float32 in TF32" if precision == "float32" else precision]
        for fused in (False, True):
            group = f"{precision}, {'fused' if fused else 'unfused'}, Transformer Engine: as on the CPU"
            with report.attempt(group, "a worker trains"):
                config = _config(folder, precision, "cuda", fused, transformer_impl="transformer_engine")
                found, _ = trained(config, "cuda", fused)
                compare(
                    report, group, found, load_file(folder / f"{precision}-{fused}.safetensors"), tolerances
                )


if __name__ == "__main__":
    be_reference(Path(sys.argv[1]), sys.argv[2])
