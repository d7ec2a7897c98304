"""Losses that Megatron's layers add in their own backward pass: expert load balancing and multi-token prediction.

Such a loss is not part of the loss function: its layer adds the gradient in its own backward pass, times a process-wide
scale. The train step later divides every gradient by the step's count N of tokens (or of sequences, for a
sequence-level loss), which is not known yet. The result must be the coefficient times the auxiliary loss's mean, as in
Megatron's own training, for every loss type and every split into microbatches and chunks.

With `calculate_per_token_loss`, which leaves the division to us, Megatron adds for a microbatch m

    router:      coefficient * aux_mj * n_mj * tp     on each of the tp ranks j that share a sequence; n_mj are the
                                                      tokens that Megatron counts there (see `_counts_all_ranks`),
                                                      and aux_m is the sum of the parts aux_mj
    prediction:  factor / layers * ce_m * t_m         ce_m the mean cross-entropy of a layer, t_m the tokens to train on

Both expect a main loss that is a sum over the same tokens. Ours is a sum over d_m tokens to train on, or sequences, the
microbatch's part of N. So each backward pass of a microbatch begins by setting the scales

    router:      d_m / (n_mj * tp)
    prediction:  d_m / t_m

The division by N, the sum of all d_m, then leaves the coefficient times the mean of aux_m (or ce_m) over microbatches,
each weighted by its part d_m / N of the loss. N itself is not needed: more chunks may follow.

Shapes: B rows, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, set_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from nemo_rl_mcore.data.microbatch import Microbatch
from nemo_rl_mcore.losses.base import LossFunction, LossType, valid_counts
from nemo_rl_mcore.rank import accelerator
from nemo_rl_mcore.rank.megatron import parallel_groups
from nemo_rl_mcore.rank.megatron.batching import own_columns
from nemo_rl_mcore.rank.megatron.model_class import language_models, modules_of
from nemo_rl_mcore.rank.megatron.passes import next_tokens, tokens_to_train

Output = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AuxiliaryTerms:
    """Scales of one microbatch's auxiliary losses; shows_padding: true if its padding mask is passed to routers.

    recorded: factor on the recorded load-balancing loss, to leave out rows without a token.
    """

    router: float
    prediction: float
    shows_padding: bool
    recorded: float


class _Tracker(MoEMetricsTracker):
    """Records load-balancing losses times `factor`, the running microbatch's `AuxiliaryTerms.recorded`."""

    factor = 1.0

    def record(self, name: str, value: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().record(name, value * self.factor, *args, **kwargs)


class AuxiliaryLosses:
    def __init__(self, config: TransformerConfig, chunks: Sequence[torch.nn.Module]):
        self._config = config
        self._balances = (
            bool(config.num_moe_experts)
            and config.moe_router_load_balancing_type != "none"
            and config.moe_aux_loss_coeff != 0
        )
        self._recomputes_routers = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
        )
        self._microbatches = self._balanced_microbatches = self._trained_microbatches = 0
        self._tracker = _Tracker()
        # bool [tokens of a router], of the running microbatch
        self._router_padding: torch.Tensor | None = None

        def uncount_padding(router: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            # Removes padding from the counts that update the experts' bias; upstream's own update fails on a mask.
            if self._router_padding is not None and torch.is_grad_enabled():
                _probs, routing_map = output
                router.local_tokens_per_expert -= routing_map[self._router_padding].sum(0)

        routers = modules_of(TopKRouter, chunks)
        self._own_expert_layers = len(routers)
        self._expert_layers: float | None = None  # of the whole model; computed on first use
        if config.moe_router_enable_expert_bias:
            for router in routers:
                router.register_forward_hook(uncount_padding)

    def terms(self, microbatch: Microbatch, loss_fn: LossFunction) -> AuxiliaryTerms | None:
        """Return the scales for a training microbatch on the CPU; None for a model without such losses."""
        config = self._config
        if not (self._balances or config.mtp_num_layers or config.moe_router_enable_expert_bias):
            return None
        sequences, tokens = (float(count) for count in valid_counts(microbatch.rows))
        part = tokens if loss_fn.loss_type is LossType.TOKEN_LEVEL else sequences
        predicted = float(tokens_to_train(microbatch.rows, loss_fn.rows_per_sample).sum())
        real = ~microbatch.whole.padding
        # Without a real token the load-balancing loss would be 0/0; its scale is 0 anyway.
        shows_padding = self._balances and bool(real.any())
        # Megatron multiplies this rank's part of a load-balancing loss by this number of tokens.
        own_padding = own_columns(config, microbatch.padding)
        routed = own_padding.numel()
        if shows_padding:
            routed = int(real.sum()) if self._counts_all_ranks else int((~own_padding).sum())
        routed *= parallel_groups.group("tensor_context").size()
        self._microbatches += 1
        self._trained_microbatches += predicted > 0
        self._balanced_microbatches += shows_padding
        recorded = float(shows_padding)
        if shows_padding and config.moe_router_load_balancing_type == "seq_aux_loss":
            # TopKRouter's mean over sequences includes rows without a token.
            recorded = float(real.any(1).double().mean())
            part *= recorded
        return AuxiliaryTerms(
            router=part / routed if routed else 0.0,
            prediction=part / predicted if predicted else 0.0,
            shows_padding=shows_padding,
            recorded=recorded,
        )

    def model_inputs(
        self,
        terms: AuxiliaryTerms,
        microbatch: Microbatch,
        next_token_mask_BS: torch.Tensor,
        model: torch.nn.Module,
    ) -> dict[str, torch.Tensor]:
        """Return the model's keywords for a training microbatch: labels, loss mask and padding mask."""
        inputs: dict[str, torch.Tensor] = {}
        if self._config.mtp_num_layers:
            # Position i predicts token i+1; process_mtp_loss (transformer/multi_token_prediction.py) shifts both once
            # more for each prediction layer.
            inputs["labels"] = microbatch.to_model(next_tokens(microbatch.rows))
            inputs["loss_mask"] = next_token_mask_BS.float()
        padding_BS = microbatch.padding
        if terms.shows_padding:
            # The first chunk splits the mask along with the sequence; the others expect it split.
            first = get_attr_wrapped_model(model, "pre_process")
            inputs["padding_mask"] = padding_BS if first else own_columns(self._config, padding_BS)
        self._router_padding = own_columns(self._config, padding_BS).t().flatten()
        self._tracker.factor = terms.recorded
        return inputs

    def follow(self, terms: AuxiliaryTerms | None, output: Output) -> Output:
        """Return a model chunk's output, whose gradient sets the scales before its layers' backward pass.

        In a pipeline other microbatches have run forward in between, and Megatron's own call at the end of a forward
        pass (pipeline_parallel/schedules.py, forward_step_calc_loss) would leave the last microbatch's scale.
        """
        if terms is None:
            return output
        router_padding = self._router_padding

        def begin_backward(gradient: torch.Tensor) -> None:
            # New tensors each time: set_loss_scale keeps the first tensor it gets, and copies later ones into it
            # (transformer/moe/moe_utils.py, transformer/multi_token_prediction.py).
            MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), terms.router, device=gradient.device))
            MTPLossAutoScaler.set_loss_scale(torch.full((1,), terms.prediction, device=gradient.device))
            if self._recomputes_routers:
                # Routers count and record again when their layer is recomputed.
                self._router_padding, self._tracker.factor = router_padding, terms.recorded

        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)
        return output

    def reset(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._microbatches = self._balanced_microbatches = self._trained_microbatches = 0
        self._router_padding = None
        # Replaced, not zeroed: its sizes are those of the process's first model.
        self._tracker = _Tracker()
        set_moe_metrics_tracker(self._tracker)
        MTPLossLoggingHelper.tracker.clear()
        reset_model_temporary_tensors(self._config, [*chunks])

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (moe_metrics, mtp_metrics) since the last reset; a second call returns nothing.

        The load-balancing loss is the mean over layers and microbatches with a token, without its coefficient; a
        prediction layer's cross-entropy is the mean over the microbatches that train it.
        """
        if not self._microbatches:
            return {}, {}
        stages = parallel_groups.group("pipeline")
        balance: dict[str, float] = {}
        for name, entry in self._tracker.metrics.items() if self._balances else ():
            total = entry.values.sum().double().reshape(1)
            # Ranks that share a sequence each have a part of the loss.
            for ranks in (stages, parallel_groups.group("tensor_context")):
                dist.all_reduce(total, group=ranks)
            (mean,) = self._mean_over_data_parallel(total, self._balanced_microbatches)
            if self._expert_layers is None:
                layers = torch.tensor([self._own_expert_layers], dtype=torch.double, device=total.device)
                dist.all_reduce(layers, group=stages)
                self._expert_layers = layers.item()
            balance[name] = mean / self._expert_layers
        predictions: dict[str, float] = {}
        if self._config.mtp_num_layers:
            means = None
            if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
                total = MTPLossLoggingHelper.tracker["loss_values"].double()
                means = self._mean_over_data_parallel(total, self._trained_microbatches)
            means = parallel_groups.broadcast_from_last_stage(means)
            predictions = {f"mtp_{layer} loss": mean for layer, mean in enumerate(means, start=1)}
        self._microbatches = self._balanced_microbatches = self._trained_microbatches = 0
        return balance, predictions

    def _mean_over_data_parallel(self, total: torch.Tensor, microbatches: int) -> list[float]:
        packed = torch.cat([total, total.new_tensor([microbatches])])
        packed = parallel_groups.gather_over_data_parallel_ranks(packed).sum(0)
        *sums, count = packed.tolist()
        return [value / max(count, 1.0) for value in sums]

    @cached_property
    def _counts_all_ranks(self) -> bool:
        """True if Megatron, given a padding mask, counts the tokens of all ranks of a sequence as this rank's.

        In some versions get_tokens_per_expert_and_token_count (transformer/moe/moe_utils.py) sums over the ranks in
        place, before it reads the local count.
        """
        one_token = torch.ones(1, 1, dtype=torch.bool, device=accelerator.device())
        _, local, _ = get_tokens_per_expert_and_token_count(
            one_token, cast(Any, parallel_groups.group("tensor_context")), topk=1, with_padding_mask=True
        )
        return float(local) > 1


@contextmanager
def without_prediction_layers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Disable multi-token prediction layers inside the block, since only training uses them.

    GPTModel.forward would run them in every pass, with full logits. A last stage that shares its embedding with another
    stage keeps them: there these layers' embedding is the output weight.
    """
    models: list[Any] = [model for model in language_models(modules) if model.config.mtp_num_layers]
    models = [model for model in models if model.mtp_process]
    if any(model.share_embeddings_and_output_weights and not model.pre_process for model in models):
        models = []
    layers = [model.config.mtp_num_layers for model in models]
    try:
        for model in models:
            model.mtp_process, model.config.mtp_num_layers = False, None
        yield
    finally:
        for model, number in zip(models, layers, strict=True):
            model.mtp_process, model.config.mtp_num_layers = True, number
