"""NeMo RL keys that this package knows and does not implement.

One table: an entry says which values are neutral (they change nothing), and what to do about any other one.
Neutral keys are dropped before the strict models see the recipe, others are refused; so a recipe moves over
with few edits, and nothing it asks for is lost silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from nemo_rl_mcore.config.base import Problem, join_path

Tree = dict[str, object]

ANY = object()
"""Neutral value of keys that only a part of NeMo RL reads which is refused elsewhere, or off."""
OFF = object()
"""Neutral value of sections: null, `enabled: false`, or without that key and with nothing set."""
ON = object()
"""Neutral value of sections that state what always holds: anything but `enabled: false`."""


@dataclass(frozen=True)
class SameAs:
    """Neutral value of a key that repeats its neighbour."""

    neighbour: str


@dataclass(frozen=True)
class AnyWithout:
    """Any value is neutral while this key of policy.model is null or left out."""

    key: str


@dataclass(frozen=True)
class Unsupported:
    """A known key: its neutral values, and what to do about another one."""

    neutral: tuple[object, ...]
    remedy: str

    def accepts(self, value: object, section: Tree, recipe: Tree) -> bool:
        """Whether the value changes nothing, given the section it stands in and the whole recipe."""
        return any(_is_neutral(value, neutral, section, recipe) for neutral in self.neutral)


def _is_neutral(value: object, neutral: object, section: Tree, recipe: Tree) -> bool:
    if neutral is ANY:
        return True
    if isinstance(neutral, AnyWithout):
        return _at(recipe, "policy", "model", neutral.key) is None
    if neutral is OFF or neutral is ON:
        switch = _switch(value)
        return switch is not True if neutral is OFF else switch is not False
    if isinstance(neutral, SameAs):
        return neutral.neighbour in section and value == section[neutral.neighbour]
    return type(value) is type(neutral) and value == neutral


def _at(tree: object, *path: str) -> object:
    """The value at a path, or null where the path ends early."""
    for key in path:
        tree = cast("Tree", tree).get(key) if isinstance(tree, dict) else None
    return tree


def _switch(section: object) -> bool | None:
    """Whether a section is on (true), off (false), or says neither (null)."""
    if not isinstance(section, Mapping):
        return None if section is None else True
    values = cast("Mapping[str, object]", section)
    if "enabled" in values:
        return bool(values["enabled"])
    return True if any(values.values()) else None


def _only(*neutral: object, remedy: str) -> Unsupported:
    return Unsupported(neutral, remedy)


_UNREAD = _only(ANY, remedy="")
_ARCHITECTURE = "remove it and describe the architecture in policy.model"
_OTHER_SINKS = "set it to false; use tensorboard_enabled or wandb_enabled"
_ENVIRONMENT = "remove it and set the variables in the environment of the command"
_REMOVE_NULL = "set it to null, or remove it"
_DERIVED = "remove it; the interleaved schedule gets the settings it needs"
_NO_VAL_SAMPLING = "remove it; validation has no sampling settings of its own"
_NO_FP8 = "set it to its neutral value; the engine computes in vllm_cfg.precision"
_DENSE = AnyWithout("num_moe_experts")
_NO_MTP = AnyWithout("mtp_num_layers")
_SOURCES = ("data.default", "data.train", "data.validation")
"""Two of their keys do nothing: a hash of the prompt says which rows are held out, and a run has one environment."""
_EPOCHS = "remove it; grpo.max_num_steps ends the run"
_IN_ORDER = (
    "set it to in_order; groups train in the order in which their prompts are drawn, and none becomes too old"
)
_NO_WATCH = "remove it; policy.generation has the deadlines and restarts of engines"

UNSUPPORTED: dict[str, Unsupported] = {
    # grpo
    "grpo.max_rollout_turns": _only(1, remedy="set it to 1; a rollout has one turn"),
    "grpo.val_start_at": _only(-1, 0, remedy="set it to -1; grpo.val_period rules from the first step"),
    "grpo.val_num_generations_per_prompt": _only(1, remedy="set it to 1"),
    "grpo.stop_at_validation_metric": _only(None, remedy=_EPOCHS),
    "grpo.stop_at_validation_threshold": _only(None, remedy=_EPOCHS),
    "grpo.advantage_clip_low": _only(None, remedy=_REMOVE_NULL),
    "grpo.advantage_clip_high": _only(None, remedy=_REMOVE_NULL),
    "grpo.seq_logprob_error_threshold": _only(
        None,
        remedy="set it to null; policy.generation.mismatch: {threshold: ..., action: mask} does this",
    ),
    "grpo.invalid_tool_call_advantage": _only(None, remedy=_REMOVE_NULL),
    "grpo.malformed_thinking_advantage": _only(None, remedy=_REMOVE_NULL),
    "grpo.calculate_advantages_on_gpu": _only(False, remedy="set it to false; they are computed on CPU"),
    "grpo.skip_reference_policy_logprobs_calculation": _only(
        False,
        remedy="remove it; a reference policy exists only where loss_fn.reference_policy_kl_penalty is not 0",
    ),
    "grpo.reward_shaping.stop_properly_penalty_coef": _only(None, remedy=_REMOVE_NULL),
    "reward_penalties": _only(OFF, remedy="remove it"),
    # loss_fn
    "loss_fn.positive_example_nll_weight": _only(0.0, 0, remedy="set it to 0"),
    # asynchronous runs; async_rl has other keys that are read, see translated.py
    "ppo.async_grpo": _only(
        OFF,
        remedy="set ppo.async_grpo.enabled: false; a critic and whitened advantages take whole steps",
    ),
    "dpo.async_grpo": _only(
        OFF, remedy="set dpo.async_grpo.enabled: false; pairs are given, or sampled by the weights that train"
    ),
    "sft.async_grpo": _only(OFF, remedy="set sft.async_grpo.enabled: false; answers are given"),
    "distillation.async_grpo": _only(
        OFF, remedy="set distillation.async_grpo.enabled: false; the teacher reads whole steps"
    ),
    "async_rl.sampler.name": _only("in_order", remedy=_IN_ORDER),
    "async_rl.generation_timeout_s": _only(
        None, remedy="remove it and set grpo.async_grpo.rollout_timeout_s; a group has one turn"
    ),
    "async_rl.env_timeout_s": _only(None, remedy="remove it; answers are scored at once"),
    "async_rl.rollout_failure": _only(
        None, {}, remedy="remove it and set grpo.async_grpo.max_generation_failures"
    ),
    "async_rl.watchdog": _only(None, {}, remedy="remove it and set grpo.async_grpo.stall_timeout_s"),
    "async_rl.stall_watchdog": _only(None, {}, remedy="remove it and set grpo.async_grpo.stall_timeout_s"),
    "async_rl.fleet_health": _only(OFF, remedy=_NO_WATCH),
    "async_rl.generation_fleet_health": _only(OFF, remedy=_NO_WATCH),
    "async_rl.policy_router": _only(OFF, remedy="remove it; engines have no HTTP server"),
    "async_rl.diagnostics": _only(False, remedy="set it to false"),
    # policy
    "policy.tokenizer.chat_template_kwargs": _only(
        None, {}, remedy="set it to null; templates get no variables"
    ),
    "policy.tokenizer.use_fastokens": _only(False, remedy="set it to false"),
    "policy.hf_config_overrides": _only(None, {}, remedy=_ARCHITECTURE),
    "policy.logprob_chunk_size": _only(
        None, remedy="set it to null and use policy.megatron_cfg.use_fused_linear_logprobs: true"
    ),
    "policy.offload_optimizer_for_logprob": _only(False, remedy="set it to false"),
    "policy.make_sequence_length_divisible_by": _UNREAD,  # rows are padded to what the layout needs
    "policy.dtensor_cfg": _only(
        OFF, remedy="set policy.dtensor_cfg.enabled: false and use policy.megatron_cfg, the only backend"
    ),
    "policy.optimizer": _only(None, remedy="set it to null and use policy.megatron_cfg.optimizer"),
    "policy.scheduler": _only(None, remedy="set it to null and use policy.megatron_cfg.scheduler"),
    "policy.draft": _only(OFF, remedy="set policy.draft.enabled: false"),
    "policy.sequence_packing.microbatch_order": _UNREAD,  # sums do not depend on it
    # policy.megatron_cfg
    "policy.megatron_cfg.converter_type": _UNREAD,  # names a Hugging Face converter; no weights are loaded
    "policy.megatron_cfg.model_overrides": _only(None, {}, remedy=_ARCHITECTURE),
    "policy.megatron_cfg.checkpoint": _UNREAD,  # how Megatron saves; checkpoints are written at once, and whole
    "policy.megatron_cfg.force_reconvert_from_hf": _UNREAD,
    "policy.megatron_cfg.empty_unused_memory_level": _UNREAD,  # when the CUDA cache is emptied
    "policy.megatron_cfg.recompute_granularity": _only("full", None, remedy="set it to full"),
    "policy.megatron_cfg.recompute_modules": _only(None, [], remedy=_REMOVE_NULL),
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": _only(None, remedy=_REMOVE_NULL),
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": _only(None, remedy=_REMOVE_NULL),
    "policy.megatron_cfg.overlap_p2p_comm": _only(None, remedy=_DERIVED),
    "policy.megatron_cfg.batch_p2p_comm": _only(None, remedy=_DERIVED),
    "policy.megatron_cfg.bias_activation_fusion": _only(False, remedy="set it to false"),
    "policy.megatron_cfg.gradient_accumulation_fusion": _only(False, remedy="set it to false"),
    "policy.megatron_cfg.use_fused_weighted_squared_relu": _only(False, remedy="set it to false"),
    "policy.megatron_cfg.defer_fp32_logits": _only(
        False, None, remedy="set it to false and use policy.megatron_cfg.use_fused_linear_logprobs: true"
    ),
    "policy.megatron_cfg.attention_backend": _only(None, "auto", remedy=_REMOVE_NULL),
    "policy.megatron_cfg.use_gloo_process_groups": _UNREAD,  # groups follow the device
    "policy.megatron_cfg.env_vars": _only(None, {}, remedy=_ENVIRONMENT),
    "policy.megatron_cfg.fp8_cfg": _only(OFF, remedy="set policy.megatron_cfg.fp8_cfg.enabled: false"),
    "policy.megatron_cfg.peft": _only(OFF, remedy="set policy.megatron_cfg.peft.enabled: false"),
    "policy.megatron_cfg.mtp_num_layers": _only(
        None, 0, remedy="remove it and set policy.model.mtp_num_layers"
    ),
    "policy.megatron_cfg.mtp_loss_scaling_factor": _only(
        _NO_MTP, remedy="remove it and set policy.model.mtp_loss_scaling_factor"
    ),
    "policy.megatron_cfg.mtp_use_repeated_layer": _only(_NO_MTP, False, remedy="set it to false"),
    "policy.megatron_cfg.mtp_detach_heads": _only(_NO_MTP, False, remedy="set it to false"),
    "policy.megatron_cfg.freeze_moe_router": _only(
        _DENSE, False, remedy="set it to false; routers are trained"
    ),
    "policy.megatron_cfg.moe_router_dtype": _only(
        _DENSE, None, remedy="remove it and set policy.model.moe_router_dtype"
    ),
    "policy.megatron_cfg.moe_router_load_balancing_type": _only(
        _DENSE, remedy="remove it and set policy.model.moe_router_load_balancing_type"
    ),
    "policy.megatron_cfg.moe_router_bias_update_rate": _only(
        _DENSE, remedy="remove it and set policy.model.moe_router_bias_update_rate"
    ),
    "policy.megatron_cfg.moe_permute_fusion": _only(_DENSE, False, remedy="set it to false"),
    "policy.megatron_cfg.moe_per_layer_logging": _only(
        _DENSE, False, remedy="set it to false; moe_metrics are means over the layers"
    ),
    "policy.megatron_cfg.moe_enable_deepep": _only(_DENSE, False, remedy="set it to false"),
    "policy.megatron_cfg.moe_token_dispatcher_type": _only(_DENSE, "alltoall", remedy="set it to alltoall"),
    "policy.megatron_cfg.moe_shared_expert_overlap": _only(_DENSE, False, remedy="set it to false"),
    "policy.megatron_cfg.optimizer.fp16": _only(
        False, remedy="set it to false; fp16 gradients overflow before the global token count divides them"
    ),
    "policy.megatron_cfg.optimizer.params_dtype": _only(
        "float32", remedy="remove it; policy.precision rules, and main parameters are fp32"
    ),
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer": _only(
        False, remedy="set it to false; optimizer state is fp32"
    ),
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": _only(False, remedy="set it to false"),
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": _UNREAD,  # read with the offload only
    "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective": _only(
        False, remedy="set it to false; gradients are summed, then divided once by the global count"
    ),
    "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": _only(
        False, remedy="set it to false; use optimizer.use_distributed_optimizer: true"
    ),
    "policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy": _UNREAD,
    # policy.generation
    "policy.generation.vllm_cfg.pipeline_parallel_size": _only(1, remedy="set it to 1"),
    "policy.generation.vllm_cfg.expert_parallel_size": _only(1, remedy="set it to 1"),
    "policy.generation.vllm_cfg.kv_cache_dtype": _only("auto", None, remedy="set it to auto"),
    "policy.generation.vllm_cfg.load_format": _UNREAD,  # weights come by refit
    "policy.generation.vllm_cfg.skip_tokenizer_init": _UNREAD,  # one is loaded for stop_strings alone
    "policy.generation.vllm_cfg.use_deep_gemm": _only(False, remedy=_NO_FP8),
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": _only(0, remedy=_NO_FP8),
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": _only(0, remedy=_NO_FP8),
    "policy.generation.vllm_cfg.hf_overrides": _only(None, {}, remedy=_ARCHITECTURE),
    "policy.generation.vllm_cfg.expose_http_server": _only(False, None, remedy="set it to false"),
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": _only(False, None, remedy="set it to false"),
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval": _UNREAD,  # read with the logger only
    "policy.generation.vllm_kwargs": _only(None, {}, remedy="remove it; vllm_cfg has the supported settings"),
    "policy.generation.mcore_generation_config": _UNREAD,
    "policy.generation.refit_cfg": _UNREAD,
    "policy.generation.real_quant_export_cpu_offload": _UNREAD,
    "policy.generation.port_range_low": _UNREAD,
    "policy.generation.port_range_high": _UNREAD,
    "policy.generation.val_temperature": _only(None, SameAs("temperature"), remedy=_NO_VAL_SAMPLING),
    "policy.generation.val_top_p": _only(None, SameAs("top_p"), remedy=_NO_VAL_SAMPLING),
    "policy.generation.val_top_k": _only(None, SameAs("top_k"), remedy=_NO_VAL_SAMPLING),
    # data
    **{f"{source}.{key}": _UNREAD for source in _SOURCES for key in ("seed", "env_name")},
    "data.prompt_file": _only(None, remedy="remove it, and set data.default.prompt_file"),
    "data.system_prompt_file": _only(None, remedy="remove it, and set data.default.system_prompt_file"),
    "data.shuffle": _only(True, remedy="set it to true; prompts are drawn at random"),
    "data.num_workers": _UNREAD,  # prompts are in memory
    "data.use_multiple_dataloader": _only(False, remedy="set it to false"),
    # env
    "env.math.num_workers": _UNREAD,  # answers are scored where the loop runs
    "env.math.math_verify_impl": _only("hf_math_verify", remedy="set it to hf_math_verify"),
    # checkpointing
    "checkpointing.model_save_format": _UNREAD,  # of another backend; `nemo-rl-mcore export` writes safetensors
    "checkpointing.save_consolidated": _UNREAD,
    "checkpointing.save_optimizer": _only(True, remedy="set it to true; a run resumes with its optimizer"),
    # logger
    "logger.mlflow_enabled": _only(False, remedy=_OTHER_SINKS),
    "logger.swanlab_enabled": _only(False, remedy=_OTHER_SINKS),
    "logger.monitor_gpus": _only(False, remedy="set it to false"),
    "logger.mlflow": _UNREAD,
    "logger.swanlab": _UNREAD,
    "logger.gpu_monitoring": _UNREAD,
    "logger.tensorboard": _only(None, {}, remedy="set it to {}; events go to logger.log_dir"),
    "logger.wandb.log_nemo_gym_full_result_tables": _only(False, remedy="set it to false"),
    # cluster
    "cluster.master_port_range_low": _UNREAD,  # a free port is asked of the system
    "cluster.master_port_range_high": _UNREAD,
    "cluster.segment_size": _only(None, remedy=_REMOVE_NULL),
    # top level
    "data_plane": _only(OFF, remedy="set data_plane.enabled: false"),
    "on_policy_distillation": _only(OFF, remedy="set it to null"),
}


def screen(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Split a recipe into what is left for the strict models, and refusals of known but unsupported keys."""
    problems: list[Problem] = []
    return _screen(tree, "", tree, problems), problems


def _screen(tree: Tree, prefix: str, recipe: Tree, problems: list[Problem], written: str = "") -> Tree:
    """`prefix` leads to the section in the table, and `written` in the recipe: with the places of lists."""
    kept: Tree = {}
    for key, value in tree.items():
        path, place = join_path(prefix, str(key)), join_path(written, str(key))
        known = UNSUPPORTED.get(path)
        if known is not None:
            if not known.accepts(value, tree, recipe):
                problems.append(Problem(place, f"{_shown(value)} is not supported", known.remedy))
        elif isinstance(value, dict):
            kept[key] = _screen(cast("Tree", value), path, recipe, problems, place)
        elif isinstance(value, list):
            kept[key] = [
                _screen(cast("Tree", one), path, recipe, problems, join_path(place, str(number)))
                if isinstance(one, dict)
                else one
                for number, one in enumerate(cast("list[object]", value))
            ]
        else:
            kept[key] = value
    return kept


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        enabled = cast("Mapping[str, object]", value).get("enabled")
        return "enabled: true" if enabled else "this section"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
