"""NeMo RL's keys beside those of a policy that nothing reads here."""

from nemo_rl_mcore.recipe.foreign.judgement import (
    OFF,
    OFF_OR_REMOVED,
    UNREAD,
    AnyUnless,
    Judgement,
    SameAs,
    refused,
    told,
)

_OTHER_SINKS = "set it to false; use tensorboard_enabled, wandb_enabled or mlflow_enabled"
_STEPS_END_IT = (
    "remove it; max_num_steps ends the run, and checkpointing.metric_name keeps the best checkpoints"
)
_NO_GYM = "set it to null, or remove it; rewards of env.rewards may count what NeMo Gym flags there"
_NO_WATCH = "remove it; policy.generation has the deadlines and restarts of engines"
_ONE_LOADER = AnyUnless("data.use_multiple_dataloader")
_NO_KL = AnyUnless("loss_fn.reference_policy_kl_penalty")

_OF_ROLLOUTS: dict[str, Judgement] = {
    "val_start_at": refused(-1, 0, None, remedy="set it to -1; val_period rules from the first step"),
    "num_val_generations_per_prompt": refused(1, remedy="set it to 1"),
    "stop_at_validation_metric": refused(None, remedy=_STEPS_END_IT),
    "stop_at_validation_threshold": refused(None, remedy=_STEPS_END_IT),
    "seq_logprob_error_threshold": refused(
        None,
        remedy="set it to null; policy.generation.mismatch: {threshold: ..., action: mask} does this",
    ),
    "invalid_tool_call_advantage": refused(None, remedy=_NO_GYM),
    "malformed_thinking_advantage": refused(None, remedy=_NO_GYM),
    "calculate_advantages_on_gpu": told(False, cost="it costs speed; they are computed on CPU"),
    "skip_reference_policy_logprobs_calculation": refused(
        False,
        _NO_KL,
        remedy="remove it; a reference policy exists only where loss_fn.reference_policy_kl_penalty is not 0",
    ),
    "zero_variance_prompt_filtering": refused(
        False, None, remedy="set it to false; use_dynamic_sampling: true draws others in their place"
    ),
    "debug_payload_metrics": UNREAD,
    "deduplicate_multimodal_data": UNREAD,  # rows are text
    "reward_shaping.stop_properly_penalty_coef": refused(None, remedy=OFF_OR_REMOVED),
}
"""Keys of the loops that sample."""

_ONE_TURN = {
    "distillation.max_rollout_turns": refused(
        1, remedy="set it to 1; the student answers once, and the teacher reads whole answers"
    ),
}
_OF_PPO = {
    "ppo.async_ppo.warmup_generation_lead_steps": refused(
        None,
        SameAs("max_trajectory_age_steps"),
        remedy="set it to null; a group is sampled max_trajectory_age_steps ahead, also while the critic warms up",
    ),
    "ppo.async_ppo.drop_incomplete_targets_on_restore": refused(
        False, remedy="set it to false; what was not answered before a resume is asked for again"
    ),
}
_ASYNC_OF_GRPO = {
    # NeMo RL reads the section in GRPO alone, and says nothing where another algorithm has it.
    **{
        f"{name}.async_grpo": refused(
            OFF, remedy=f"remove it; asynchronous rollouts of this algorithm are {name}.async_{name}"
        )
        for name in ("ppo", "dpo", "distillation")
    },
    "sft.async_grpo": refused(OFF, remedy="remove it; answers are given"),
}

_LOOPS: dict[str, Judgement] = {
    **{
        f"{name}.{key}": judgement
        for name in ("grpo", "ppo", "distillation")
        for key, judgement in _OF_ROLLOUTS.items()
    },
    "sft.only_unmask_final": refused(
        False, remedy="set it to false; every answer of a conversation is imitated"
    ),
    **_OF_PPO,
    **_ASYNC_OF_GRPO,
    **_ONE_TURN,
    "reward_penalties": refused(OFF, remedy=_NO_GYM),
    "loss_fn.positive_example_nll_weight": refused(0.0, 0, remedy="set it to 0"),
    "loss_fn.zero_outside_topk": refused(False, remedy="set it to false"),
}

_ASYNC: dict[str, Judgement] = {
    # other keys of async_rl are read, see translated.py
    **{
        f"{name}.advantage_clip_{end}": refused(None, remedy=OFF_OR_REMOVED)
        for name in ("ppo", "distillation")
        for end in ("low", "high")
    },
    "async_rl.generation_timeout_s": refused(
        None, remedy="remove it and set grpo.async_grpo.rollout_timeout_s; a group has one turn"
    ),
    "async_rl.env_timeout_s": refused(None, remedy="remove it; answers are scored at once"),
    "async_rl.rollout_failure": refused(
        None, {}, remedy="remove it and set grpo.async_grpo.max_generation_failures"
    ),
    "async_rl.watchdog": refused(None, {}, remedy="remove it and set grpo.async_grpo.stall_timeout_s"),
    "async_rl.stall_watchdog": refused(None, {}, remedy="remove it and set grpo.async_grpo.stall_timeout_s"),
    "async_rl.fleet_health": refused(OFF, remedy=_NO_WATCH),
    "async_rl.generation_fleet_health": refused(OFF, remedy=_NO_WATCH),
    "async_rl.generation_router": refused(OFF, remedy="remove it; engines have no HTTP server"),
    "async_rl.policy_router": refused(OFF, remedy="remove it; engines have no HTTP server"),
    "async_rl.diagnostics": refused(False, remedy="set it to false"),
}

_DATA: dict[str, Judgement] = {
    **{
        f"data.{source}.{key}": UNREAD  # a hash of the prompt says which rows are held out; a run has one environment
        for source in ("default", "train", "validation")
        for key in (
            "seed",
            "env_name",
            "use_preserving_dataset",
        )  # rows of JSONL keep the fields that they have
    },
    **{
        f"data.{source}.{key}": refused(None, remedy=remedy)
        for source in ("train", "validation")
        for key, remedy in (
            ("system_key", "remove it, and write a system's message into the rows"),
            ("system_prompt", "remove it, and set system_prompt_file"),
        )
    },
    "data.num_prompts_per_dataloader": refused(_ONE_LOADER, remedy="remove it, and give the sources weights"),
    "data.custom_dataloader": refused(_ONE_LOADER, remedy="remove it, and give the sources weights"),
    "data.prompt_file": refused(None, remedy="remove it, and set data.default.prompt_file"),
    "data.system_prompt_file": refused(None, remedy="remove it, and set data.default.system_prompt_file"),
    "data.add_generation_prompt": refused(None, remedy="set data.imitated"),  # which a migration does
    "data.num_workers": UNREAD,  # prompts are in memory
    "data.use_multiple_dataloader": refused(False, remedy="set it to false"),
    "env.math.math_verify_impl": refused("hf_math_verify", remedy="set it to hf_math_verify"),
}

_BESIDE: dict[str, Judgement] = {
    "checkpointing.model_save_format": UNREAD,  # of another backend; `nemo-rl-mcore export` writes safetensors
    "checkpointing.save_consolidated": UNREAD,
    "checkpointing.save_optimizer": refused(True, remedy="set it to true; a run resumes with its optimizer"),
    "logger.swanlab_enabled": refused(False, remedy=_OTHER_SINKS),
    "logger.monitor_gpus": told(False, cost="the load of the GPUs is not recorded"),
    "logger.swanlab": UNREAD,
    "logger.gpu_monitoring": UNREAD,
    "logger.wandb.log_nemo_gym_full_result_tables": refused(False, remedy="set it to false"),
    "cluster.master_port_range_low": UNREAD,  # a free port is asked of the system
    "cluster.master_port_range_high": UNREAD,
    "cluster.segment_size": told(None, cost="machines are taken as Ray gives them, whatever their network"),
    "data_plane": told(OFF, cost="rows reach the ranks by Ray's object store"),
    "on_policy_distillation": refused(OFF, remedy="set it to null"),
}

OF_RUNS: dict[str, Judgement] = {**_LOOPS, **_ASYNC, **_DATA, **_BESIDE}
