"""Steps between a model that is built, its weights in it, and one that Megatron wraps for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nemo_rl_mcore.config import PolicyConfig, Role
from nemo_rl_mcore.models.frozen import frozen_of
from nemo_rl_mcore.rank.megatron.hf_weights.placement import local_parameters, this_place
from nemo_rl_mcore.rank.megatron.model_class import LanguageModel, biased_routers
from nemo_rl_mcore.rank.megatron.value_head import give_value_head
from nemo_rl_mcore.rank.policy_backend import BackendOptions

Transform = Callable[[Sequence[LanguageModel]], None]
"""Changes the model of this rank, a part for each virtual pipeline stage, in place.

Parameters that it adds are no weights of the family's table: they are not exported or sent to engines, and checkpoints
and the optimizer find them by name. Those that it takes out of training are read in `models.frozen` by
whoever plans memory.
"""


def transforms(policy: PolicyConfig, options: BackendOptions) -> list[Transform]:
    """Return the steps of a model, in order: those that go by the table of weights come before new parameters."""
    steps: list[Transform] = []
    if options.trained and frozen_of(policy):
        steps.append(partial(freeze_weights, policy))
    if options.role is Role.VALUE:
        steps.append(_give_value_heads)
    return steps


def _give_value_heads(models: Sequence[LanguageModel]) -> None:
    for model in models:
        give_value_head(model)


def freeze_weights(policy: PolicyConfig, models: Sequence[LanguageModel]) -> None:
    """Take weights out of training: they get neither a buffer for gradients nor optimizer state.

    What is trained below them still has gradients through them.
    """
    frozen = frozen_of(policy)
    routers = {id(bias): router for router, bias in biased_routers(models)}
    for weight, parameter in local_parameters(models, policy.model, this_place()):
        if weight not in frozen:
            continue
        if (router := routers.get(id(parameter))) is None:
            parameter.requires_grad = False
        else:
            router.frozen_expert_bias = True
    for model in models:
        if model.pre_process and not any(part.requires_grad for part in model.embedding.parameters()):
            model.embedding.register_forward_hook(_as_if_trained)


def _as_if_trained(_module: torch.nn.Module, _inputs: Any, hidden_SBH: torch.Tensor) -> torch.Tensor:
    """Let a graph begin at a frozen embedding: recomputation would leave out layers whose input needs no gradient."""
    return hidden_SBH.requires_grad_() if torch.is_grad_enabled() else hidden_SBH
