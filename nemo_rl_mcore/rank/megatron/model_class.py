"""A policy's model class, named only here, and a critic's head.

From megatron-core 0.19 on, GPTModel is deprecated in favour of HybridModel (Megatron-LM issue 6071), which has no
`output_processor` (pull request 7008) before `hybrid_model` adds it. Both have the same inputs and weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.errors import RefusedError
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron.layer_specs import decoder_spec, prediction_spec

if TYPE_CHECKING:
    from nemo_rl_mcore.rank.megatron.hybrid_model import HybridLanguageModel

    LanguageModel = GPTModel | HybridLanguageModel
else:
    LanguageModel = LanguageModule


def language_model(
    policy: PolicyConfig, config: TransformerConfig, *, vp_stage: int | None, **keywords: Any
) -> LanguageModel:
    """Build a stage of the model; RefusedError, on every stage, if the installed Megatron cannot build it."""
    megatron = policy.megatron_cfg
    if policy.model_class == "gpt":
        return GPTModel(
            config,
            decoder_spec(megatron, config, vp_stage),
            mtp_block_spec=prediction_spec(megatron, config, vp_stage),
            vp_stage=vp_stage,
            **keywords,
        )
    try:
        from nemo_rl_mcore.rank.megatron.hybrid_model import hybrid_model
    except ImportError as error:
        raise RefusedError(
            f"policy.megatron_cfg.model_class: {megatron.model_class}: megatron-core {megatron_version} has no "
            "HybridModel; install megatron-core 0.19, or set policy.megatron_cfg.model_class: gpt",
            code="missing-package",
        ) from error
    return hybrid_model(policy, config, vp_stage=vp_stage, **keywords)


def modules_of[Kind: torch.nn.Module](kind: type[Kind], modules: Iterable[torch.nn.Module]) -> list[Kind]:
    """Return the modules of this class, at any depth."""
    return [part for module in modules for part in module.modules() if isinstance(part, kind)]


def language_models(modules: Iterable[torch.nn.Module]) -> list[LanguageModel]:
    return cast("list[LanguageModel]", modules_of(LanguageModule, modules))


VALUE_HEAD = "value_head"
"""The head's name in the model."""


class ValueHead(torch.nn.Module):
    """A linear map to one number, fp32 also in a 16-bit model, and initially zero.

    Each tensor-parallel rank has a copy; a mark on the weight makes `finalize_model_grads` sum the copies' gradients.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(config.hidden_size, device=accelerator.device()))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=accelerator.device()))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return the values fp32 [S, B]; hidden states [S, B, H], or [S/tp, B, H] under sequence parallelism."""
        values_SB = hidden_SBH.float() @ self.weight + self.bias
        if not self._sequence_parallel:
            return values_SB
        # Every rank computes the same loss of the same values, so the backward pass keeps its own part.
        return gather_from_sequence_parallel_region(values_SB, tensor_parallel_output_grad=False)


def give_value_head(model: LanguageModel) -> None:
    """Add the head to a last stage, and exclude the output weight from training.

    A last stage without prediction layers drops its copy of a shared embedding, which nothing would train or gather.
    """
    apart = model.pre_process is not model.post_process and not model.config.mtp_num_layers
    if model.share_embeddings_and_output_weights and apart:
        shared = cast(Any, model)
        if model.pre_process:
            # `finalize_model_grads` would sum its gradient and the copy's.
            shared.share_embeddings_and_output_weights = False
        else:
            shared.output_layer.weight = None
            # The model would look for the copy in a checkpoint (models/common/language_module).
            shared.tie_embeddings_and_output_weights_state_dict = lambda *_: None
    if not model.post_process:
        return
    model.add_module(VALUE_HEAD, ValueHead(model.config))
    if not model.share_embeddings_and_output_weights:
        for parameter in model.output_layer.parameters():
            parameter.requires_grad = False
