"""Peak memory of a rank that trains on one long row, by the number of ranks that share it.

One row of 16 thousand tokens through a few layers with grouped heads and fused log-probabilities, on CPU ranks of one
thread each. The figure is the peak that a train step adds to what the built worker holds, after a step on a short row,
of the rank with the most; its scores are never all in memory, since attention goes block by block.

  python benchmarks/context_parallel.py
  python benchmarks/context_parallel.py --tokens 4096 --ranks 1 2
  python benchmarks/context_parallel.py --set policy.megatron_cfg.activation_checkpointing=true
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from measuring import ROOT, Clock, Figures, alternate, header, load, table
from one_rank import batch, be_the_only_rank

WARM_UP_TOKENS = 64


def overrides(args: argparse.Namespace, ranks: int) -> list[str]:
    return [
        f"policy.model.num_layers={args.layers}",
        f"policy.model.hidden_size={args.hidden}",
        f"policy.model.ffn_hidden_size={3 * args.hidden}",
        "policy.model.num_attention_heads=8",
        "policy.model.num_query_groups=2",
        f"policy.model.max_position_embeddings={args.tokens}",
        f"policy.max_total_sequence_length={args.tokens}",
        "policy.train_micro_batch_size=1",
        "policy.logprob_batch_size=1",
        "policy.train_global_batch_size=2",
        "grpo.num_prompts_per_step=1",
        "grpo.num_generations_per_prompt=2",
        f"cluster.cpu_workers_per_node={ranks}",
        f"policy.megatron_cfg.context_parallel_size={ranks}",
        *(["policy.megatron_cfg.fused_linear_logprobs_context_parallel=true"] if ranks > 1 else []),
        *args.set,
    ]


def rank_of(rank: int, port: str, request: dict[str, Any], found: Any) -> None:
    """Put what this rank's train step costs into the queue."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)

    from nemo_rl_mcore.losses import ClippedPGLossFn
    from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
    from nemo_rl_mcore.recipe.load import load_config

    config = load_config(ROOT / "examples/configs/grpo_copy_cpu.yaml", request["overrides"])
    worker = MegatronPolicyWorker(config.policy, init_reference_model=False)
    loss_fn, clock = ClippedPGLossFn(config.loss_fn), Clock()
    vocabulary = config.policy.model.vocab_size
    worker.train(batch(1, WARM_UP_TOKENS, vocabulary), loss_fn, gbs=1)
    before, start = clock.start_memory(), clock.now()
    worker.train(batch(1, request["tokens"], vocabulary), loss_fn, gbs=1)
    found.put({"CPU s": clock.now() - start, "peak": clock.peak_memory() - before})


def child(request: dict[str, Any]) -> None:
    """Print the most that any of the ranks reports."""
    be_the_only_rank()  # for a port that is free
    found: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (os.environ["MASTER_PORT"], request, found)
    torch.multiprocessing.spawn(rank_of, arguments, nprocs=request["ranks"])
    figures: list[Figures] = [found.get() for _ in range(request["ranks"])]
    print(json.dumps({key: max(one[key] for one in figures) for key in figures[0]}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="the first is compared with")
    parser.add_argument("--set", nargs="+", default=[], help="more overrides of the recipe")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(json.loads(args.child))
        return
    print(f"a row of {args.tokens} tokens, {args.layers} layers of {args.hidden}, {load()}", flush=True)
    requests = {
        f"CP {ranks}": {"ranks": ranks, "tokens": args.tokens, "overrides": overrides(args, ranks)}
        for ranks in args.ranks
    }
    columns = {"CPU s": 1, "peak": 1e6}
    header(columns)
    table(alternate(__file__, requests, args.rounds), columns)


if __name__ == "__main__":
    main()
