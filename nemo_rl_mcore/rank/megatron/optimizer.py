"""Megatron's optimizer and its learning-rate and weight-decay schedule, as the config describes them."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from nemo_rl_mcore.config import PolicyConfig
from nemo_rl_mcore.rank.policy_backend import DTYPES


def build_optimizer(policy: PolicyConfig, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build the optimizer over this rank's chunks; fp32 main parameters under bf16, sharded if the config says so."""
    no_decay = not policy.megatron_cfg.optimizer.decay_norms_and_biases
    return get_megatron_optimizer(
        MegatronOptimizerConfig(**optimizer_settings(policy)),
        [*chunks],
        config_overrides=None if no_decay else {},  # None sets the decay of norms and biases to 0
    )


def optimizer_settings(policy: PolicyConfig) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig that are not its defaults."""
    optimizer = policy.megatron_cfg.optimizer
    return {
        "optimizer": optimizer.optimizer,
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "weight_decay": optimizer.weight_decay,
        "bf16": policy.precision == "bfloat16",
        "params_dtype": DTYPES[policy.precision],
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "sgd_momentum": optimizer.sgd_momentum,
        "use_distributed_optimizer": optimizer.use_distributed_optimizer,
        "overlap_param_gather": policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather,
        "clip_grad": policy.max_grad_norm,
    }


def build_scheduler(policy: PolicyConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the schedule, counted in samples: it advances by the global batch size at each applied optimizer step."""
    schedule, peak = policy.megatron_cfg.scheduler, policy.megatron_cfg.optimizer
    samples = policy.train_global_batch_size
    # OptimizerParamScheduler asserts warm-up < decay, and decay > 0; a constant schedule has neither end.
    decay_iters = schedule.lr_decay_iters or schedule.lr_warmup_iters + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=peak.lr,
        min_lr=peak.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * samples,
        lr_decay_steps=decay_iters * samples,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=decay_iters * samples,
        wd_incr_style=schedule.weight_decay_incr_style,
    )
