"""Requirements of losses and advantage estimators on the loop, and of a teacher on its student."""

from nemo_rl_mcore.config.base import Rule, Rules, either, value_at
from nemo_rl_mcore.config.master import DistillationMasterConfig, PPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig

_BATCH, _VOCABULARY = "policy.train_global_batch_size", "policy.model.vocab_size"
_ON_POLICY, _PENALTY = "gradient.force_on_policy_ratio", "gradient.use_kl_in_reward"
_BOUND, _TRUNCATION = (
    "gradient.truncated_importance_sampling_ratio",
    "gradient.truncated_importance_sampling_type",
)
_CORRECTION = "gradient.use_importance_sampling_correction"
_GATHER = "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather"


RUN_RULES: Rules[RunConfig] = (
    Rule(
        "incompatible",
        _ON_POLICY,
        # A batch that does not divide the samples is reported in batching, with a size that is valid here too.
        lambda run: (
            run.gradient is not None
            and run.gradient.force_on_policy_ratio
            and run.samples_per_step > run.policy.train_global_batch_size
            and run.samples_per_step % run.policy.train_global_batch_size == 0
        ),
        (_BATCH, "loop.num_prompts_per_step", "loop.num_generations_per_prompt"),
        lambda run: {_BATCH: run.samples_per_step, _ON_POLICY: False},
        "it needs one optimizer step per rollout",
    ),
    either(
        "incompatible",
        {_ON_POLICY: False, "ppo.ppo_epochs": 1},
        "it needs one optimizer step per rollout",
        where=lambda run: isinstance(run, PPOMasterConfig),
    ),
    Rule(
        "requires",
        _BOUND,
        lambda run: (
            run.gradient is not None
            and run.gradient.truncated_importance_sampling_type is None
            and (
                run.gradient.truncated_importance_sampling_ratio is not None
                or run.gradient.truncated_importance_sampling_ratio_min is not None
            )
        ),
        (_TRUNCATION, f"{_BOUND}_min"),
        lambda run: (
            "set the bounds to null, or truncated_importance_sampling_type: tis"
            + (
                ""
                if run.gradient is not None and run.gradient.use_importance_sampling_correction
                else f" with {run.key(_CORRECTION)}: true"
            )
        ),
        "bounds have no effect without truncation",
    ),
    Rule(
        "incompatible",
        _PENALTY,
        lambda run: (
            run.gradient is not None
            and run.gradient.use_kl_in_reward
            and run.algorithm != "ppo"
            and value_at(run, "loop.adv_estimator.name") in ("grpo", "gdpo")
            and value_at(run, "loop.adv_estimator.type") is None
        ),
        ("loop.adv_estimator.name",),
        {_PENALTY: False, "loop.adv_estimator.name": "reinforce_plus_plus"},
        "that estimator ignores the KL penalty",
    ),
    *(
        either(
            "not-supported",
            {reader: off, f"policy.generation.{key}": neutral},
            "it reads log-probabilities under the whole vocabulary",
            where=lambda run, reader=reader: value_at(run, reader),
        )
        for reader, off in (("loss_fn.rl_weight", 0.0), (_PENALTY, False))
        for key, neutral in (("top_p", 1.0), ("top_k", None))
    ),
    Rule(
        "too-large",
        "ppo.critic_warmup_steps",
        lambda run: isinstance(run, PPOMasterConfig) and run.ppo.critic_warmup_steps >= run.ppo.max_num_steps,
        ("ppo.max_num_steps",),
        why="the policy would never be trained",
    ),
    Rule(
        "has-no-effect",
        "policy.recompute_prev_logprobs",
        lambda run: run.policy.recompute_prev_logprobs == "always" and run.gradient is None,
        why="no loss uses a ratio to earlier weights",
    ),
    Rule(
        "too-large",
        "distillation.topk_logits_k",
        lambda run: (
            isinstance(run, DistillationMasterConfig)
            and (run.distillation.topk_logits_k or 0) > run.policy.model.vocab_size
        ),
        (_VOCABULARY,),
        "lower it; null is the whole vocabulary",
    ),
    Rule(
        "requires",
        "loss_fn.rl_weight",
        lambda run: (
            isinstance(run, DistillationMasterConfig)
            and run.loss_fn.rl_weight
            and not run.distillation.on_policy
        ),
        ("distillation.on_policy",),
        "set rl_weight: 0 and remove loss_fn.rl, or set distillation.on_policy: true",
        "it needs answers sampled by the student",
    ),
    Rule(
        "contradicts",
        "teacher.model.vocab_size",
        lambda run: (
            isinstance(run, DistillationMasterConfig)
            and run.teacher.model is not None
            and run.teacher.model.vocab_size != run.policy.model.vocab_size
        ),
        (_VOCABULARY,),
        lambda run: (
            "name a teacher with the policy's vocabulary" if run.policy.weights else "make the two equal"
        ),
        "teacher and student must have the same token ids",
    ),
    Rule(
        "incompatible",
        _GATHER,
        lambda run: (
            isinstance(run, DistillationMasterConfig)
            and run.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather
        ),
        fix={_GATHER: False},
        why="distillation always uses the output weight directly",
    ),
)
