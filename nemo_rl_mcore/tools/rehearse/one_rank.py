"""The same step on one rank in this process: from a checkpoint of the run, over the rows that its ranks were given."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from nemo_rl_mcore.config import ClusterConfig, PolicyConfig, Role
from nemo_rl_mcore.data import BatchedDataDict
from nemo_rl_mcore.driver.actors.one_process import InProcessRank, OneProcess
from nemo_rl_mcore.losses.base import LossFunction
from nemo_rl_mcore.rank.worker import MegatronPolicyWorker
from nemo_rl_mcore.tools.rehearse.runs import TrainCall

Tensors = Mapping[str, torch.Tensor]


class _Readable(MegatronPolicyWorker):
    """A rank whose weights can be read."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights: a policy's by their Hugging Face names, a critic's by Megatron's."""
        if self.role is Role.POLICY:
            return {name: tensor.detach().clone() for name, tensor in self.backend.full_tensors()}
        return {name: parameter.detach().clone() for name, parameter in self._parameters().items()}

    def states(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights, by Megatron's names, and of what the optimizer keeps of each."""
        from nemo_rl_mcore.rank.megatron.optimizer_state import states_of_weights

        parameters = self._parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        kept = {
            f"{kind} of {names[id(weight)]}": tensor
            for weight, kinds in states_of_weights(cast("Any", self.backend).optimizer)
            for kind, tensor in kinds.items()
        }
        return {name: tensor.detach().clone() for name, tensor in {**parameters, **kept}.items()}

    def _parameters(self) -> dict[str, torch.Tensor]:
        # Megatron takes seconds to import, and recipes are shrunk without it.
        from nemo_rl_mcore.rank.megatron.model_class import language_models
        from nemo_rl_mcore.rank.megatron.optimizer_state import gather_parameters

        chunks = cast("Any", self.backend).chunks
        gather_parameters(chunks)
        return {
            name: parameter
            for model in language_models(chunks)
            for name, parameter in model.named_parameters()
        }


class OneRank:
    """A model of a recipe on one rank; made by `one_rank`."""

    def __init__(self, policy: PolicyConfig, group: InProcessRank, name: str) -> None:
        self._policy, self._group, self._name = policy, group, name

    def load(self, checkpoint: Path) -> Tensors:
        """Set weights, optimizer and schedule to those of a folder step_N, and return the weights."""
        self._load(checkpoint)
        return self.tensors()

    def _load(self, checkpoint: Path) -> None:
        self._group.run_all("load_checkpoint", folder=str((checkpoint / self._name).absolute()))

    def tensors(self) -> Tensors:
        """Return all weights."""
        return self._group.run_all("tensors")[0]

    def states(self, checkpoint: Path) -> Tensors:
        """Set all to a folder step_N, and return its weights and what its optimizer keeps of them."""
        self._load(checkpoint)
        return self._group.run_all("states")[0]

    def digest(self) -> str:
        """Return the digest of all weights, as a refit has it."""
        return self._group.run_all("weights_digest")[0]

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        self._group.run_all("export_hf", folder=str(folder))

    def logprobs(self, rows: BatchedDataDict) -> torch.Tensor:
        """Return those of all tokens, fp32 [B, S]; see `MegatronPolicyWorker.get_logprobs`."""
        return self._group.run_all("get_logprobs", data=rows)[0]["logprobs"]

    def train(self, calls: Sequence[TrainCall], loss_fn: LossFunction | None = None) -> list[dict[str, Any]]:
        """Train as the run did, each call whole; loss_fn: in place of its own."""
        return [
            self._group.run_all(
                "train", data=call.whole, loss_fn=loss_fn or call.loss_fn, gbs=call.gbs, mbs=call.mbs
            )[0]
            for call in calls
        ]

    def train_split(self, calls: Sequence[TrainCall]) -> None:
        """Train on the same rows by the split step, in chunks of a sample first and of all others then."""
        for call in calls:
            for chunks in call.as_split_steps(self._policy):
                self._group.run_all("begin_train_step", loss_fn=call.loss_fn, gbs=call.gbs, mbs=call.mbs)
                for chunk in chunks:
                    self._group.run_all("train_microbatch", data=chunk)
                self._group.run_all("finish_train_step")


@contextmanager
def one_rank(
    policy: PolicyConfig,
    *,
    seed: int = 42,
    temperature: float = 1.0,
    trained: bool = True,
    role: Role = Role.POLICY,
) -> Generator[OneRank]:
    """Start a model on one rank in this process.

    temperature: divides the logits, as in the run. trained: whether it has an optimizer. role: whether it is a critic.
    """
    with OneProcess(ClusterConfig()) as place:
        options = {
            "seed": seed,
            "init_reference_model": False,
            "temperature": temperature,
            "trained": trained,
            "role": role,
        }
        group = InProcessRank(_Readable, place, (policy,), options, deadline_keys="policy", name="one")
        try:
            yield OneRank(policy, group, role.value)
        finally:
            group.shutdown()


def difference(left: Tensors, right: Tensors) -> float:
    """Return the largest difference of two models, relative to a weight's largest entry or to 1; inf for other names.

    A number that is not finite in one of them alone is infinitely far from the other's.
    """
    if left.keys() != right.keys():
        return float("inf")
    return max(_largest(left[name], right[name]) for name in left)


def _largest(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.shape != right.shape:
        return float("inf")
    found = (left.double() - right.double()).abs().max() / left.double().abs().max().clamp(min=1.0)
    return float(torch.nan_to_num(found, nan=float("inf")))
