"""What the split train step costs beside Megatron's own loop: same model, same microbatches, same loss.

  python benchmarks/train_step.py
  python benchmarks/train_step.py --hidden 256 --layers 4
  python benchmarks/train_step.py --two-ranks

In each subprocess one worker runs every method in turn, again and again, every other time in reverse order; a method's
time is the median of its turns, in CPU seconds of one thread. What is printed is the median over the subprocesses.

  megatron   forward_backward_func over all microbatches, finalize_model_grads, optimizer and scheduler, nothing else
  train      MegatronPolicyWorker.train
  split 1    begin, one chunk, finish
  split 8    begin, eight chunks of the same microbatches, finish

With --two-ranks two data-parallel ranks of a thread each run `train` of one worker, in wall seconds:

  train      the gradients are reduced at the step's end
  overlap    the same buckets, within the last backward pass
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from measuring import ROOT, Clock, header, in_subprocess, load, table
from one_rank import batch, be_the_only_rank

MICROBATCHES = 16
REFERENCE = "train"


def megatron_loop(worker: Any, data: Any, loss_fn: Any, mbs: int) -> Callable[[], None]:
    """The loop that a Megatron training script would have, with the worker's model, optimizer and loss."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from nemo_rl_mcore.data.microbatch import FixedRows
    from nemo_rl_mcore.losses.base import TokenOutputs
    from nemo_rl_mcore.rank.megatron.output_processor import TokenSelection

    backend = worker.backend
    cut = FixedRows(mbs)
    microbatches = [part.rows for part in cut.build(data, cut.groups(data))]
    rows, tokens = microbatches[0]["input_ids"].shape
    positions = torch.arange(tokens).expand(rows, -1)
    count = float(data["token_mask"][:, 1:].sum())

    def forward_step(iterator: Any, model: Any) -> Any:
        microbatch = next(iterator)
        ids, mask = microbatch["input_ids"], microbatch["token_mask"]
        selection = TokenSelection(
            ids.roll(-1, 1).t().contiguous(),
            torch.nn.functional.pad(mask[:, 1:], (0, 1)).bool().t().contiguous(),
            backend.forward.passes.temperature,
        )
        output = model(
            ids,
            positions,
            None,
            output_processor=backend.forward.passes.token_processor,
            output_processor_context=selection,
        )

        def loss(logprobs_SB: Any) -> Any:
            total = loss_fn.sums(TokenOutputs(logprobs_SB[:-1].t()), microbatch).loss / count
            return total, torch.zeros((), dtype=torch.int), {"loss": total.detach()}

        return output, loss

    def step() -> None:
        for chunk in backend.chunks:
            chunk.zero_grad_buffer()
        backend.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=backend.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=tokens,
            micro_batch_size=rows,
            forward_only=False,
        )
        backend.optimizer.step()
        backend.scheduler.step(data.size)

    return step


def methods(worker: Any, data: Any, loss_fn: Any, mbs: int) -> dict[str, Callable[[], Any]]:
    def split(chunks: int) -> Callable[[], None]:
        rows = data.size // chunks
        parts = [data.slice(start, start + rows) for start in range(0, data.size, rows)]

        def step() -> None:
            worker.begin_train_step(loss_fn, gbs=data.size, mbs=mbs)
            for part in parts:
                worker.train_microbatch(part)
            worker.finish_train_step()

        return step

    return {
        REFERENCE: lambda: worker.train(data, loss_fn, gbs=data.size, mbs=mbs),
        "megatron": megatron_loop(worker, data, loss_fn, mbs),
        "split 1": split(1),
        "split 8": split(8),
    }


def child(request: str) -> None:
    import torch

    sizes = json.loads(request)
    if sizes["two_ranks"]:
        be_the_only_rank()  # for the address at which the ranks meet
        torch.multiprocessing.spawn(rank_of_two, (sizes,), nprocs=2)
        return
    torch.set_num_threads(1)
    be_the_only_rank()
    worker, data, loss_fn = subject(sizes)
    clock = Clock()
    print(json.dumps(medians(methods(worker, data, loss_fn, sizes["mbs"]), clock.now, sizes["turns"])))


def rank_of_two(rank: int, sizes: dict[str, int]) -> None:
    import torch

    from nemo_rl_mcore.rank.megatron import model

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    ddp = "policy.megatron_cfg.distributed_data_parallel_config"
    model.BUCKET_SIZE = sizes["hidden"] ** 2 * 4
    worker, data, loss_fn = subject(sizes, f"{ddp}.overlap_grad_reduce=true")

    def train(overlaps: bool) -> Callable[[], None]:
        def step() -> None:
            worker.backend.overlaps_grad_sync = overlaps
            worker.train(data, loss_fn, gbs=2 * data.size, mbs=sizes["mbs"])

        return step

    calls = {"overlap": train(True), REFERENCE: train(False)}
    calls["overlap"]()  # Megatron learns
    times = medians(calls, time.perf_counter, sizes["turns"])
    if rank == 0:
        print(json.dumps({name: times[name] for name in (REFERENCE, "overlap")}), flush=True)


def subject(sizes: dict[str, int], *overrides: str) -> tuple[Any, Any, Any]:
    """A worker, its rows and their loss."""
    from nemo_rl_mcore.losses import ClippedPGLossFn
    from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
    from nemo_rl_mcore.recipe.load import load_config

    config = load_config(
        ROOT / "examples/configs/grpo_copy_cpu.yaml",
        [
            f"policy.model.hidden_size={sizes['hidden']}",
            f"policy.model.ffn_hidden_size={2 * sizes['hidden']}",
            f"policy.model.num_layers={sizes['layers']}",
            f"policy.model.max_position_embeddings={sizes['tokens']}",
            f"policy.max_total_sequence_length={sizes['tokens']}",
            "loss_fn.entropy_coef=0",
            "cluster.gpus_per_node=1",
            *overrides,
        ],
    )
    worker = MegatronPolicyWorker(config.policy, init_reference_model=False)
    data = batch(sizes["mbs"] * MICROBATCHES, sizes["tokens"], config.policy.model.vocab_size)
    return worker, data, ClippedPGLossFn(config.loss_fn)


def medians(calls: dict[str, Callable[[], Any]], now: Callable[[], float], turns: int) -> dict[str, float]:
    """The calls' seconds, in turns of all of them; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name in calls if turn % 2 else reversed(calls):
            start = now()
            calls[name]()
            times[name].append(now() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"hidden": 128, "layers": 2, "tokens": 64, "mbs": 8, "turns": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--two-ranks", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    sizes = {
        name: getattr(args, name) for name in ("hidden", "layers", "tokens", "mbs", "turns", "two_ranks")
    }
    print(f"{sizes}, {MICROBATCHES} microbatches, {load()}", flush=True)
    runs = [run for _ in range(args.rounds) if (run := in_subprocess(__file__, sizes)) is not None]
    header(("step s",))
    table({name: {"step": statistics.median(run[name] for run in runs)} for name in runs[0]}, {"step": 1})


if __name__ == "__main__":
    main()
