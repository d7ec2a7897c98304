"""A worker at the sizes of the GPU run: what three steps make of it, and how two such are compared."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiny
import torch
import worker_state
from report import Report
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_mcore.models.config_json import hf_config_of
from nemo_rl_mcore.rank import accelerator

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


def prepare(threads: int | None = None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    accelerator.install()


def leave() -> None:
    tiny.leave()
    torch.distributed.destroy_process_group()


def worker_config(
    folder: Path,
    precision: str,
    device: str,
    fused: bool,
    *,
    layers: str = "local",
    packed: bool = False,
    sharing: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The policy that starts from the weights in `folder`, with layers of that `transformer_impl`."""
    sizes = SIZES[device]
    tokens = 2 * sizes["length"]
    return tiny.policy_config(
        model={"init_method_std": sizes["model"].get("init_method_std", 0.1), **sizes["model"]},
        megatron={
            "use_fused_linear_logprobs": fused,
            "fused_linear_logprobs_chunk_size": sizes["chunk_size"] if fused else None,
            "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
            "fused_linear_logprobs_packed": fused and packed,
            "transformer_impl": layers,
            "fused_linear_logprobs_context_parallel": fused and bool(sharing),
            **sharing,
        },
        sequence_packing={"enabled": packed, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens},
        model_name=str(folder / precision),
        precision=precision,
        max_total_sequence_length=sizes["max_total_sequence_length"],
    )


def batch(device: str, seed: int, vocabulary: int) -> Any:
    """The tests' batch; its log-probabilities are about those of an untrained model of this vocabulary."""
    rows = tiny.grpo_batch(length=SIZES[device]["length"], seed=seed)
    larger = float(torch.tensor(vocabulary / tiny.VOCABULARY).log())
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        rows[name] = rows[name] - larger
    rows["returns"], rows["values"] = rows["advantages"], rows["advantages"] / 2  # of a critic
    return rows


def weights(of: Any) -> dict[str, Tensor]:
    """Copies on the CPU of all weights by their Hugging Face names, whatever the layers are made of."""
    from nemo_rl_mcore.rank.megatron.hf_weights.export import full_tensors

    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in full_tensors(of.backend.chunks, of.policy)
    }


def trained(config: Any, device: str, fused: bool) -> tuple[dict[str, Tensor], Any]:
    """A worker after three steps, and what it reported on the way."""
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
    return found | changes(before, weights(worker)), worker


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What became of each weight, under the name that `changed_otherwise` reads."""
    return {f"changed {name}": weight.float() - before[name].float() for name, weight in after.items()}


def write_start(folder: Path, precision: str, device: str) -> None:
    sizes = SIZES[device]
    config = tiny.policy_config(
        model=sizes["model"],
        precision=precision,
        max_total_sequence_length=sizes["max_total_sequence_length"],
    )
    folder.mkdir()
    save_file(weights(tiny.worker(config, seed=0)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config_of(config.model, dtype=precision)), "utf-8")


# Comparisons


def compare(
    report: Report,
    group: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, float],
) -> None:
    values = found["log-probabilities"] - expected["log-probabilities"]
    report.compared(group, "log-probabilities", float(values.abs().max()), tolerances["log-probabilities"])
    for name in ("loss", "gradient norm"):
        relative = (found[name] - expected[name]).abs() / (1 + expected[name].abs())
        report.compared(group, name, float(relative.max()), tolerances[name])
    report.compared(group, "weights", changed_otherwise(found, expected), tolerances["weights"])


def changed_otherwise(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    names = sorted(name for name in expected if name.startswith("changed "))
    assert names == sorted(name for name in found if name.startswith("changed "))
    difference = torch.stack([(found[name] - expected[name]).norm() for name in names]).norm()
    return float(difference / torch.stack([expected[name].norm() for name in names]).norm())


def check_checkpoint(report: Report, name: str, worker: Any, device: str, loss_fn: Any) -> None:
    """What is saved comes back bit for bit, and the step after it is the step that followed before."""
    group, rows = f"{name}: checkpoint", batch(device, 5, worker.policy.model.vocab_size)
    tolerance = REPEATED[device][worker.policy.precision]
    with report.attempt(group, "save, train, load, train"), tempfile.TemporaryDirectory() as scratch:
        saved, before = _lasting(worker_state.capture(worker)), tiny.parameters(worker)
        worker.save_checkpoint(f"{scratch}/at_once")
        worker.save_checkpoint(f"{scratch}/copied", wait=False)
        first = float(worker.train(rows, loss_fn)["grad_norm"])
        went_on = changes(before, tiny.parameters(worker))
        worker.checkpoint_written()
        for name in ("copied", "at_once"):
            worker.load_checkpoint(f"{scratch}/{name}")
            loaded = _lasting(worker_state.capture(worker))
            note_differences(report, group, worker_state.differences(saved, loaded))
        again = float(worker.train(rows, loss_fn)["grad_norm"])
        report.compared(group, "gradient norm of the step after", abs(first - again) / (1 + first), tolerance)
        difference = changed_otherwise(changes(before, tiny.parameters(worker)), went_on)
        report.compared(group, "weights after it", difference, tolerance)


def _lasting(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without the gradients of the step before, which a checkpoint leaves out."""
    return {key: value for key, value in state.items() if not key.startswith("gradient ")}


def note_differences(report: Report, group: str, names: list[str]) -> None:
    report.compared(group, "tensors and settings that differ in a bit", float(len(names)), EXACT)
    if names:
        sys.stderr.write(f"{group}: {', '.join(names)}\n")
