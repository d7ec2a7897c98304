"""A worker's train step and log-probabilities, fused against unfused, packed against padded: model, loss and optimizer.

One rank of the GRPO recipe `examples/configs/grpo_copy_cpu.yaml` with a vocabulary of 32 thousand and rows of two
thousand tokens, a quarter of which are the prompt; `of trained` are log-probabilities of the others alone. See
`measuring` for how the methods take turns. CPU times are of one thread; memory is the peak that the call adds to what
the built worker holds, after a warm-up.

With --shortest the rows are of unequal length, and what is compared are packed and padded rows of equally many tokens a
microbatch: packed ones fused and unfused, padded ones fused.

  python benchmarks/worker_step.py
  python benchmarks/worker_step.py --tokens 1024 --rows 4 --set policy.precision=bfloat16
  python benchmarks/worker_step.py --tokens 1024 --rows 8 --shortest 0.1
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from measuring import ROOT, Clock, Figures, alternate, header, load, table
from one_rank import batch, be_the_only_rank

REPEATS = 2
PACKED = "++policy.sequence_packing.enabled=true"
FUSED_PACKED = "++policy.megatron_cfg.fused_linear_logprobs_packed=true"
# Whether log-probabilities are fused, and further overrides.
METHODS: dict[str, tuple[bool, list[str]]] = {"fused": (True, []), "unfused": (False, [])}
UNEVEN_METHODS: dict[str, tuple[bool, list[str]]] = {
    "packed fused": (True, [PACKED, FUSED_PACKED]),
    "padded fused": (True, []),
    "packed unfused": (False, [PACKED]),
}


def overrides(args: argparse.Namespace, fused: bool, more: list[str]) -> list[str]:
    return [
        f"policy.model.vocab_size={args.vocab}",
        f"policy.model.max_position_embeddings={args.tokens}",
        f"policy.max_total_sequence_length={args.tokens}",
        "policy.train_micro_batch_size=1",
        "policy.logprob_batch_size=1",
        f"policy.train_global_batch_size={args.rows}",
        f"grpo.num_prompts_per_step={args.rows // 2}",
        "grpo.num_generations_per_prompt=2",
        "cluster.gpus_per_node=1",
        f"policy.megatron_cfg.use_fused_linear_logprobs={str(fused).lower()}",
        *more,
        *args.set,
    ]


def child(request: str) -> None:
    import torch

    from nemo_rl_mcore.losses import ClippedPGLossFn
    from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
    from nemo_rl_mcore.recipe.load import load_config

    rows, tokens, prompt, shortest, changes = json.loads(request)
    torch.set_num_threads(1)
    be_the_only_rank()
    config = load_config(ROOT / "examples/configs/grpo_copy_cpu.yaml", changes)
    worker = MegatronPolicyWorker(config.policy, init_reference_model=False)
    data = batch(rows, tokens, config.policy.model.vocab_size, prompt, shortest)
    loss_fn = ClippedPGLossFn(config.loss_fn)
    figures: Figures = {}
    for name, call in {
        "train": lambda: worker.train(data, loss_fn),
        "logprobs": lambda: worker.get_logprobs(data=data),
        "of trained": lambda: worker.get_logprobs(data=data, trained_only=True),
    }.items():
        seconds, peak = cost(call)
        figures |= {f"{name} s": seconds, f"{name} peak": peak}
    print(json.dumps(figures))


def cost(call: Any) -> tuple[float, float]:
    clock = Clock()
    call()
    before = clock.start_memory()
    call()
    peak, times = clock.peak_memory() - before, []
    for _ in range(REPEATS):
        start = clock.now()
        call()
        times.append(clock.now() - start)
    return min(times), peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--prompt", type=float, default=0.25, help="share of a row that is not trained on")
    parser.add_argument("--shortest", type=float, default=1.0, help="length of the shortest row, as a share")
    parser.add_argument("--set", nargs="+", default=[], help="more overrides of the recipe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    print(f"{args.rows} rows of {args.tokens} tokens, vocabulary {args.vocab}, {load()}", flush=True)
    methods = {
        name: [args.rows, args.tokens, args.prompt, args.shortest, overrides(args, *method)]
        for name, method in (METHODS if args.shortest == 1.0 else UNEVEN_METHODS).items()
    }
    columns = {"train s": 1, "train peak": 1e6, "logprobs s": 1, "logprobs peak": 1e6}
    columns |= {"of trained s": 1, "of trained peak": 1e6}
    median = alternate(__file__, methods, args.rounds)
    header(columns)
    table(median, columns)


if __name__ == "__main__":
    main()
