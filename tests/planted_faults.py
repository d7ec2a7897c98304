"""A loss as it is, whose import makes a mistake in the process that imports it: ranks do so when they first train."""

import os
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_rl_mcore.losses import ClippedPGLossFn
from nemo_rl_mcore.megatron import backend as megatron_backend
from nemo_rl_mcore.megatron.hf_weights import export


class Faulty(ClippedPGLossFn):
    """The loss that it stands for."""


def schedule_counts_twice() -> None:
    step = OptimizerParamScheduler.step

    def twice(self: Any, increment: int) -> None:
        step(self, 2 * increment)

    OptimizerParamScheduler.step = twice


def optimizer_state_is_not_saved() -> None:
    save = megatron_backend.checkpoint.save_policy

    def forgetful(backend: Any, *rest: Any) -> None:
        moments = [*_moments(backend.optimizer)]
        kept = [moment.clone() for moment in moments]
        for moment in moments:
            moment.zero_()
        save(backend, *rest)
        for moment, value in zip(moments, kept, strict=True):
            moment.copy_(value)

    megatron_backend.checkpoint.save_policy = forgetful


def _moments(optimizer: Any) -> Any:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in one.optimizer.state.values():
            yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)


def shards_are_swapped_in_export() -> None:
    whole = export._all_shards  # pyright: ignore[reportPrivateUsage]

    def swapped(own: torch.Tensor, *rest: Any, **options: Any) -> list[torch.Tensor]:
        return whole(own, *rest, **options)[::-1]

    export._all_shards = swapped  # pyright: ignore[reportPrivateUsage]


FAULTS = {
    one.__name__: one
    for one in (schedule_counts_twice, optimizer_state_is_not_saved, shards_are_swapped_in_export)
}
FAULTS[os.environ["PLANTED_FAULT"]]()
