"""Mistakes that a module with a loss makes in each process that imports it: the driver, and ranks as they train."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_rl_mcore.driver.algorithms.loop import Recovery
from nemo_rl_mcore.losses.base import Masks
from nemo_rl_mcore.rank.megatron import backend as megatron_backend
from nemo_rl_mcore.rank.megatron import layer_specs, parallel_groups
from nemo_rl_mcore.rank.megatron.hf_weights import export
from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend
from nemo_rl_mcore.rank.refit.sender import WeightSender
from nemo_rl_mcore.rank.train_step import TrainStep


def schedule_counts_twice() -> None:
    step = OptimizerParamScheduler.step

    def twice(self: Any, increment: int) -> None:
        step(self, 2 * increment)

    OptimizerParamScheduler.step = twice


def optimizer_state_is_not_saved() -> None:
    save = megatron_backend.checkpoint.save_policy

    def forgetful(saved: Any, *rest: Any) -> None:
        moments = [*_moments(saved.backend.optimizer)]
        kept = [moment.clone() for moment in moments]
        for moment in moments:
            moment.zero_()
        save(saved, *rest)
        for moment, value in zip(moments, kept, strict=True):
            moment.copy_(value)

    megatron_backend.checkpoint.save_policy = forgetful


def moments_are_not_saved_after_a_resume() -> None:
    load = megatron_backend.checkpoint.load_policy

    def then_forgetful(*args: Any, **options: Any) -> Any:
        optimizer_state_is_not_saved()
        return load(*args, **options)

    megatron_backend.checkpoint.load_policy = then_forgetful


def _moments(optimizer: Any) -> Any:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in one.optimizer.state.values():
            yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)


def shards_are_swapped_in_export() -> None:
    whole = export._all_shards  # pyright: ignore[reportPrivateUsage]

    def swapped(own: torch.Tensor, *rest: Any, **options: Any) -> list[torch.Tensor]:
        return whole(own, *rest, **options)[::-1]

    export._all_shards = swapped  # pyright: ignore[reportPrivateUsage]


def gradients_are_divided_by_the_ranks_once_more() -> None:
    scale = MegatronTrainBackend.scale_gradients

    def smaller(self: Any, factor: float) -> None:
        scale(self, factor / parallel_groups.group("data_context").size())

    MegatronTrainBackend.scale_gradients = smaller


def gradients_of_values_are_divided_by_the_ranks_once_more() -> None:
    gradients_are_divided_by_the_ranks_once_more()


def gradients_are_not_summed_over_context_ranks() -> None:
    gather = layer_specs.gather_in_order

    def keeps_its_own(local: torch.Tensor, borders: Any, **_: bool) -> torch.Tensor:
        return gather(local, borders, grad_of_every_rank_is_whole=True)

    layer_specs.gather_in_order = keeps_its_own


def masks_are_ignored() -> None:
    of = Masks.of.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def all_count(cls: type[Masks], data: Any, *rest: Any, **options: Any) -> Masks:
        masks = of(cls, data, *rest, **options)
        every = torch.ones_like(masks.tokens)
        return replace(masks, tokens=every, valid=every)

    Masks.of = classmethod(all_count)  # pyright: ignore[reportAttributeAccessIssue]


def refits_are_stale() -> None:
    send, last = WeightSender.send, list[Any]()

    def sends_the_last_once_more(self: Any, tensors: Any) -> Any:
        last.append([(name, tensor.detach().clone()) for name, tensor in tensors])
        return send(self, iter(last[max(0, len(last) - 2)]))

    WeightSender.send = sends_the_last_once_more


def experts_are_in_the_wrong_order_in_export() -> None:
    local = export.local_parameters

    def rotated(chunks: Any, model: Any) -> Any:
        found, group = [*local(chunks, model)], parallel_groups.group("expert")
        if group.size() == 1:
            return found
        by_weight = dict(found)
        each = model.num_moe_experts // group.size()
        first = group.rank() * each
        return [
            (weight, parameter)
            if weight.expert is None
            else (weight, by_weight[_beside(weight, first + (weight.expert - first + 1) % each, by_weight)])
            for weight, parameter in found
        ]

    export.local_parameters = rotated


def _beside(weight: Any, expert: int, others: Any) -> Any:
    """The same weight of another expert."""
    names = [name.replace(f".experts.{weight.expert}.", f".experts.{expert}.") for name in weight.names]
    return next(other for other in others if [*other.names] == names)


def new_ranks_do_not_read_the_checkpoint() -> None:
    bring_back = Recovery._bring_back  # pyright: ignore[reportPrivateUsage]

    def with_their_first_weights(self: Any) -> None:
        checkpoints = self.loop.checkpoints
        restore, checkpoints.restore = checkpoints.restore, lambda models: {}  # pyright: ignore[reportUnknownLambdaType]
        try:
            bring_back(self)
        finally:
            checkpoints.restore = restore

    Recovery._bring_back = with_their_first_weights  # pyright: ignore[reportPrivateUsage]


def other_ranks_train_on_their_first_chunk_again() -> None:
    microbatch = TrainStep.microbatch

    def stale(self: Any, data: Any, *rest: Any, **more: Any) -> None:
        first = vars(self._step).setdefault("first_chunk", data)
        alone = parallel_groups.group("data_context").rank() == 0
        microbatch(self, data if alone else first, *rest, **more)

    TrainStep.microbatch = stale


def another_rope_base_is_exported() -> None:
    of = export.hf_config_of

    def another(*args: Any, **options: Any) -> dict[str, Any]:
        config: dict[str, Any] = of(*args, **options)
        return config | {
            "rope_parameters": config["rope_parameters"] | {"rope_theta": 3.0},
            "rope_theta": 3.0,
        }

    export.hf_config_of = another


def plant(*names: str) -> None:
    for name in names:
        globals()[name]()
