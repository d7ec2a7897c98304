"""Train a tiny GPT twice from the same weights: by Megatron's labels path, and through `output_processor`.

    OMP_NUM_THREADS=1 uv run python examples/hook_experiment.py [--lr 5e-3] [--unfused]

One process, no Ray; on a machine without a GPU the same Megatron code runs on CPU.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence

import torch

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

STEPS, ROWS, LENGTH, VOCABULARY = 6, 4, 8, 64
TokenLosses = Callable[[MegatronPolicyWorker, torch.Tensor, torch.Tensor], torch.Tensor]


def policy_config(lr: float, fused: bool) -> PolicyConfig:
    """Two layers, hidden size 64; AdamW with a weight decay of 0.01."""
    return PolicyConfig.model_validate(
        {
            "model": {
                "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256,
                "vocab_size": VOCABULARY,
            },
            "tokenizer": {"name": "char"},
            "train_global_batch_size": ROWS,
            "train_micro_batch_size": ROWS,
            "max_total_sequence_length": LENGTH,
            "generation": {"max_new_tokens": 1},
            "megatron_cfg": {
                "use_fused_linear_logprobs": fused,
                "optimizer": {"lr": lr, "weight_decay": 0.01},
            },
        }
    )  # fmt: skip


def labels_path(worker: MegatronPolicyWorker, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return [B, S] losses as GPTModel computes them when it is given labels."""
    return worker.backend.chunks[0](*_inputs(ids), labels=labels)


def hook_path(worker: MegatronPolicyWorker, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[B, S] losses from the log-probabilities of the labels, selected inside the output processor."""
    # Imported after the worker has prepared the device, as everything that imports Megatron.
    from nemo_rl_mcore.rank.megatron.output_processor import TokenSelection

    selection = TokenSelection(
        targets_SB=labels.t().contiguous(), mask_SB=torch.ones_like(labels.t(), dtype=torch.bool)
    )
    logprobs_SB = worker.backend.chunks[0](
        *_inputs(ids),
        output_processor=worker.backend.forward.passes.token_processor,
        output_processor_context=selection,
    )
    return -logprobs_SB.t()


def _inputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).expand(rows, -1)
    return ids, positions, torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).triu(1)


def train(config: PolicyConfig, token_losses: TokenLosses) -> list[float]:
    """Return the mean token loss before each of the steps, and after the last one."""
    worker = MegatronPolicyWorker(config, seed=1234, init_reference_model=False)
    noise = torch.Generator().manual_seed(1234)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=noise)
    device = next(worker.backend.chunks[0].parameters()).device
    ids, labels = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    losses: list[float] = []
    for _ in range(STEPS):
        worker.backend.zero_grad()
        loss = token_losses(worker, ids, labels).mean()
        loss.backward()
        worker.backend.finalize_gradients()
        worker.backend.gradient_norm()
        worker.backend.optimizer_step(ROWS)
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(token_losses(worker, ids, labels).mean()))
    worker.shutdown()
    return losses


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both and write the two curves side by side."""
    parser = argparse.ArgumentParser(description="Megatron's labels path against the output_processor hook.")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--unfused", action="store_true", help="select from full logits in the processor")
    options = parser.parse_args(arguments)
    config = policy_config(options.lr, fused=not options.unfused)
    curves: list[list[float]] = []
    for token_losses in (labels_path, hook_path):
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
        curves.append(train(config, token_losses))
    sys.stdout.write("step  labels path  output_processor\n")
    for step, (labels, hook) in enumerate(zip(*curves, strict=True)):
        sys.stdout.write(f"{step:>4}  {labels:>11.4f}  {hook:>16.4f}\n")


if __name__ == "__main__":
    main()
