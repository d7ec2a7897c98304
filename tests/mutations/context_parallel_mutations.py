"""Make the mistakes of context parallelism, one at a time, and show which check of the test suite catches each.

    .venv/bin/python tests/mutations/context_parallel_mutations.py

Prints a table as `train_step_mutations.py` does.
"""

import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nemo_rl_mcore.ops._groups import all_gather_rows

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations.harness import Check, Mutation, run_table


def _equal(answers: list[Any]) -> bool:
    return all(difference < 1e-5 for difference in answers)


ROWS, PACKED, EXPERTS = (
    Check("test_context_parallel", "against_data_parallel", (way, experts), _equal, ranks=2)
    for way, experts in (("rows-8", False), ("packing-29", False), ("rows-2", True))
)


def gradients_of_keys_and_values_twice() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import batching, layer_specs

    def twice(*args: Any, **kwargs: Any) -> Any:
        gathered = batching.gather_in_order(*args, **kwargs)
        if gathered.requires_grad:
            gathered.register_hook(lambda gradient: 2 * gradient)
        return gathered

    return patch.object(layer_specs, "gather_in_order", twice)


def gradients_of_whole_losses_summed() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import batching

    plain = batching.gather_in_order
    return patch.object(
        batching,
        "gather_in_order",
        lambda local, borders, **_: plain(local, borders, grad_of_every_rank_is_whole=False),
    )


def context_ranks_counted_as_data_parallel() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import parallel_groups

    return patch.object(
        parallel_groups,
        "gather_over_data_parallel_ranks",
        lambda numbers: all_gather_rows(numbers[None], parallel_groups.group("data_context")),
    )


def contiguous_slices() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import batching, layer_specs

    def contiguous(borders: tuple[int, ...], ranks: int) -> torch.Tensor:
        return torch.arange(borders[-1]).view(ranks, -1)

    return _both(
        patch.object(batching, "zigzag", contiguous), patch.object(layer_specs, "zigzag", contiguous)
    )


def borders_of_packed_samples_forgotten() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import layer_specs

    return patch.object(layer_specs, "bisect_right", lambda _borders, _position: 1)


def balance_counted_for_each_context_rank() -> AbstractContextManager[Any]:
    from nemo_rl_mcore.rank.megatron import parallel_groups

    plain = parallel_groups.group
    return patch.object(
        parallel_groups, "group", lambda kind: plain("tensor" if kind == "tensor_context" else kind)
    )


def rotary_positions_of_the_other_rank() -> AbstractContextManager[Any]:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    from nemo_rl_mcore.rank.megatron import batching

    def of_the_other(positions: Any, _dimension: int, _group: Any) -> Any:
        ranks = batching.parallel_groups.group("context")
        other = (ranks.rank() + 1) % ranks.size()
        return positions[batching.zigzag((0, len(positions)), ranks.size())[other]]

    return patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", of_the_other)


def _both(*patches: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for one in patches:
        stack.enter_context(one)
    return stack


MUTATIONS = (
    Mutation(gradients_of_keys_and_values_twice, (ROWS,)),
    Mutation(gradients_of_whole_losses_summed, (ROWS,)),
    Mutation(context_ranks_counted_as_data_parallel, (ROWS,)),
    Mutation(contiguous_slices, (ROWS,)),
    Mutation(borders_of_packed_samples_forgotten, (PACKED,)),
    Mutation(balance_counted_for_each_context_rank, (EXPERTS,)),
    Mutation(rotary_positions_of_the_other_rank, (ROWS,)),
)


if __name__ == "__main__":
    sys.exit(run_table(MUTATIONS))
