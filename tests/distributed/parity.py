"""`train` against the split step, over every layout and option: the cases, what each rank runs, the full product.

  python tests/distributed/parity.py            # every combination, about half an hour on two cores
  python tests/distributed/parity.py --layout ep2 dp2

The test beside this file runs a pairwise selection: every pair of values of two options meets in some case.
"""

from __future__ import annotations

import argparse
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import tiny
from tolerances import SPLIT_STEP

from nemo_rl_mcore.losses import NLLLossFn

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.1}
# Ranks, keys of the model, keys of Megatron.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "tp2": (2, {}, TP2),
    "tp2-sp": (2, {}, TP2 | {"sequence_parallel": True}),
    "pp2": (2, {}, PP2),
    "pp2-vpp2": (2, {"num_layers": 4}, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {}, {"context_parallel_size": 2, "fused_linear_logprobs_context_parallel": True}),
    "tp2-pp2": (4, {}, TP2 | PP2),
    "ep2": (2, EXPERTS, {"expert_model_parallel_size": 2}),
}
LOSSES = ("token level", "gspo", "nll")
FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "loss": LOSSES,
    "tied": (False, True),
    "fused": (False, True),
    "distributed_optimizer": (False, True),
    "overlap_grad_reduce": (False, True),
}
# Rows of this rank in each chunk; those of chunk EMPTY, its second row, have no token to train on.
SPLITS = ((8,), (3, 5), (1, 1, 3, 1, 2))
EMPTY = 1

Case = dict[str, Any]


def pairwise() -> list[Case]:
    """A small selection of the product in which each pair of values occurs, found greedily."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    missing = {pair for case in every for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = max(every, key=lambda case: len(missing & _pairs(case)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[Any]:
    return set(combinations(case.items(), 2))


def name_of(case: Case) -> str:
    """The case in words."""
    options = [
        name if value is True else f"no {name}" for name, value in case.items() if isinstance(value, bool)
    ]
    return ", ".join([case["layout"], case["loss"], *options])


def _config(case: Case) -> Any:
    _, model, megatron = LAYOUTS[case["layout"]]
    optimizer = {"lr": 1e-2, "weight_decay": 0.0, "use_distributed_optimizer": case["distributed_optimizer"]}
    return tiny.policy_config(
        model={**model, "tie_word_embeddings": case["tied"]},
        megatron={
            **megatron,
            "optimizer": optimizer,
            "use_fused_linear_logprobs": case["fused"],
            "distributed_data_parallel_config": {
                "overlap_grad_reduce": case["overlap_grad_reduce"],
                "bucket_size": 3000,
            },
        },
        # A row a microbatch: `train` and every split then add the same numbers in the same order.
        train_micro_batch_size=1,
        train_global_batch_size=16,
    )


def _loss(name: str) -> Any:
    if name == "nll":
        return NLLLossFn()
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    return tiny.grpo_loss(**(gspo if name == "gspo" else {}))


def _batch(seed: int) -> Any:
    """Eight rows for this rank."""
    from nemo_rl_mcore.rank.megatron import parallel_groups

    rows = 8 * parallel_groups.group("data").size()
    batch = tiny.shard(tiny.grpo_batch(rows=rows, seed=seed))
    batch["token_mask"] = batch["token_mask"].clone()
    batch["token_mask"][EMPTY] = 0.0
    return batch


def _split_step(worker: Any, batch: Any, loss_fn: Any, rows: tuple[int, ...], gbs: int) -> dict[str, Any]:
    """A streamed step with a log-probability pass and a swap of the reference policy between the chunks."""
    worker.begin_train_step(loss_fn, gbs=gbs)
    start = 0
    for number, count in enumerate(rows):
        worker.train_microbatch(batch.slice(start, start + count))
        start += count
        if number % 2 == 0:
            worker.get_logprobs(data=batch)
            worker.get_reference_policy_logprobs(data=batch)
    return worker.finish_train_step()


def _three_steps(case: Case, rows: tuple[int, ...] | None) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Parameters before and after three steps and their results: by `train`, or streamed in chunks of some rows.

    The worker ends with the call, and the threads of its groups with it.
    """
    from nemo_rl_mcore.rank.megatron import parallel_groups

    worker, loss_fn = tiny.worker(_config(case)), _loss(case["loss"])
    gbs = 8 * parallel_groups.group("data").size()
    start = tiny.parameters(worker)
    if rows is None:
        results = [worker.train(_batch(seed), loss_fn, gbs=gbs) for seed in range(3)]
    else:
        results = [_split_step(worker, _batch(seed), loss_fn, rows, gbs) for seed in range(3)]
    return start, tiny.parameters(worker), results


def differences(case: Case) -> dict[str, Any]:
    """On one rank: three steps by `train` and by every split; the largest relative differences between them."""
    start, end, results = _three_steps(case, None)
    found: dict[str, Any] = {
        "moved": tiny.largest_difference(start, end),
        "updated": all(result["update_successful"] for result in results),
        "balance": [result.get("moe_metrics") for result in results],
    }
    for rows in SPLITS:
        _, streamed_end, steps = _three_steps(case, rows)
        found[f"split {rows}"] = tiny.largest_difference(end, streamed_end)
        found[f"keys {rows}"] = [set(step) ^ set(result) for step, result in zip(steps, results, strict=True)]
        found[f"norm {rows}"] = max(
            abs(float(step["grad_norm"] / result["grad_norm"]) - 1)
            for step, result in zip(steps, results, strict=True)
        )
    return found


def main() -> int:
    """Run the full product; 1 if any case is not exact."""
    from rank_pool import Ranks

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    layouts, failed, processes = parser.parse_args().layout, 0, Ranks()
    for layout in layouts:
        cases = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
        for case in (case for case in cases if case["layout"] == layout):
            ranks = processes(LAYOUTS[layout][0]).run(differences, case)
            largest = max(rank[f"split {rows}"] for rank in ranks for rows in SPLITS)
            exact = largest <= SPLIT_STEP and all(rank["updated"] and rank["moved"] > 1e-3 for rank in ranks)
            failed += not exact
            print(f"{name_of(case)}: {largest:.1e}{'' if exact else ' FAILED'}", flush=True)
    processes.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
