"""One rank of a combination of the meeting matrix: the workers of its models, which live from call to call.

A run gives each model processes of its own. Here its models share those of the pool, and with them the groups of the
layout, by which all models of a run are cut; the driver's calls come one after the other either way.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch

from nemo_rl_mcore.config import GRPOMasterConfig, MegatronConfig
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.algorithms import algorithm, mismatch
from nemo_rl_mcore.driver.rollouts.ledger import Group, GroupState, InOrder, Ledger, Room
from nemo_rl_mcore.driver.rollouts.transcript import WEIGHT_VERSIONS
from nemo_rl_mcore.losses import LossFunction
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker

_workers: dict[str, MegatronPolicyWorker] = {}
_mistakes = ExitStack()
_sizes: tuple[int | None, ...] | None = None
"""Those of the layout whose groups there are."""


class _Pickler(pickle.Pickler):
    """Sends tensors as arrays, as `driver.actors.supervised` does: else the driver would import Megatron."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


def packed(value: object) -> bytes:
    """A value on its way between driver and rank, which `pickle.loads` reads."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def build(name: str, arguments: bytes) -> None:
    """Build the worker of a model; groups of the same layout are taken over, and the random state starts over."""
    global _sizes
    import tiny
    from megatron.core import parallel_state

    from nemo_rl_mcore.rank.megatron import parallel_groups

    config, options = pickle.loads(arguments)
    sizes = _layout(config.megatron_cfg)
    if sizes != _sizes or not parallel_state.model_parallel_is_initialized():
        tiny.leave()
        parallel_groups.initialize(config.megatron_cfg, options["seed"], config.call_timeout_s)
        _sizes = sizes
    with patch.object(parallel_groups, "initialize", _seed_again):
        _workers[name] = MegatronPolicyWorker(config, **options)


def _layout(config: MegatronConfig) -> tuple[int | None, ...]:
    return (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
        config.context_parallel_size,
        config.expert_model_parallel_size,
    )


def _seed_again(config: MegatronConfig, seed: int, _timeout_s: float) -> None:
    from nemo_rl_mcore.rank.megatron import parallel_groups

    parallel_groups._seed_everything(seed, spread_experts=config.expert_model_parallel_size > 1)


def call(name: str, method: str, arguments: bytes) -> bytes:
    """Call a method of a model's worker."""
    return packed(getattr(_workers[name], method)(**pickle.loads(arguments)))


def call_own(name: str, method: str, arguments: list[bytes]) -> bytes:
    """Call a method of a model's worker with this rank's own arguments, of those of all ranks."""
    return call(name, method, arguments[int(os.environ["RANK"])])


def drop(name: str) -> None:
    """End a model; the groups stay for the next one of this layout."""
    _workers.pop(name, None)


def leave() -> None:
    """End every model; the pool then ends the groups as well."""
    for name in list(_workers):
        drop(name)


def whole_parameters(name: str) -> dict[str, Any]:
    """The parameters of a model that this rank holds alone."""
    import tiny

    return {key: value.float().numpy() for key, value in tiny.parameters(_workers[name]).items()}


def differences(name: str, whole: dict[str, Any]) -> dict[str, float]:
    """The largest difference of this rank's part of each parameter from the whole parameter that is given."""
    import tiny
    from megatron.core import parallel_state

    worker, rank = _workers[name], parallel_state.get_tensor_model_parallel_rank()
    found: dict[str, float] = {}
    for key, value in worker.backend.chunks[0].named_parameters():
        of_all = f"0.{tiny.global_name(key, worker.policy)}"
        wanted = tiny.shard_of(torch.from_numpy(whole[of_all]), value, rank, key, worker.policy.model)
        found[of_all] = float((value.detach().float() - wanted).abs().max())
    return found


# Mistakes that the matrix must catch.


def make_mistake(name: str) -> None:
    """Make a mistake in this rank from now on."""
    _mistakes.enter_context(MISTAKES[name]())


def mend() -> None:
    """Make no mistake any more."""
    _mistakes.close()


def rows_sorted_singly() -> AbstractContextManager[Any]:
    """Cuts that sort and pack rows by themselves, whichever sample they belong to."""

    def samples(self: BatchedDataDict, _rows_per_sample: int = 1) -> list[range]:
        return [range(row, row + 1) for row in range(self.size)]

    return patch.object(BatchedDataDict, "samples", samples)


def schedule_counts_rows() -> AbstractContextManager[Any]:
    """A schedule that a step of pairs advances by twice its samples."""
    from nemo_rl_mcore.rank.megatron.train_backend import MegatronTrainBackend

    right = MegatronTrainBackend.optimizer_step
    return patch.object(
        MegatronTrainBackend, "optimizer_step", lambda self, samples: right(self, 2 * samples)
    )


# Of the driver, about groups that are answered ahead.


def correction_dropped_ahead() -> AbstractContextManager[Any]:
    """A loss that corrects nothing where groups may be older than the weights."""
    right = algorithm.policy_loss

    def loss_of(config: GRPOMasterConfig) -> LossFunction:
        key = "use_importance_sampling_correction"
        given = config.loss_fn.model_copy(update={key: getattr(config.loss_fn, key) and not config.max_age})
        return right(config.model_copy(update={"loss_fn": given}))

    return patch.object(algorithm, "policy_loss", loss_of)


def previous_logprobs_of_those_that_drew() -> AbstractContextManager[Any]:
    """The log-probabilities of the weights that drew a group, in place of those that train."""
    right = mismatch.add_logprobs

    def add(batch: BatchedDataDict, *others: Any, previous: bool = True) -> None:
        right(batch, *others, previous=previous)
        if previous and WEIGHT_VERSIONS in batch:
            batch["prev_logprobs"] = batch["generation_logprobs"]

    return patch.object(mismatch, "add_logprobs", add)


def noise_of_the_open_step() -> AbstractContextManager[Any]:
    """Groups that are asked for with the number of the step that trains meanwhile, not of the one that drew them."""
    from meeting_runs import RecordedEngines  # which imports this file

    right = RecordedEngines.respond

    async def respond(
        self: RecordedEngines, data: BatchedDataDict, *, step: int, ticket: str
    ) -> BatchedDataDict:
        return await right(self, data, step=self._version + 1, ticket=ticket)

    return patch.object(RecordedEngines, "respond", respond)


def newest_groups_first() -> AbstractContextManager[Any]:
    """A step that takes of the groups in its reach those that were drawn last."""

    def taken(_self: InOrder, groups: Sequence[Group], room: Room) -> list[Group]:
        return [one for one in reversed(groups) if one.state is GroupState.READY][: room.groups]

    return patch.object(InOrder, "taken", taken)


def first_group_trains_again() -> AbstractContextManager[Any]:
    """A step after which its first group is ready once more, in the place of the last one that waits."""
    right = Ledger.finish

    def finish(self: Ledger) -> None:
        first = self._groups[self._chunks[0][0]]
        right(self)
        if self._groups:
            first.state = GroupState.READY
            self._groups.popitem()
            self._groups = {first.position: first} | self._groups

    return patch.object(Ledger, "finish", finish)


MISTAKES = {
    made.__name__: made
    for made in (
        rows_sorted_singly,
        schedule_counts_rows,
        correction_dropped_ahead,
        previous_logprobs_of_those_that_drew,
        noise_of_the_open_step,
        newest_groups_first,
        first_group_trains_again,
    )
}
