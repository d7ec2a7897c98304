"""NeMo RL's keys of a policy that nothing reads here; a critic and a teacher are judged by them too."""

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

_ARCHITECTURE = "remove it and describe the architecture in policy.model"
_NO_VAL_SAMPLING = "remove it; validation has no sampling settings of its own"
_ENVIRONMENT = "set the variables in the environment of the command"
_KEPT_ON_GPU = "activations stay on the GPU; activation_checkpointing spares them"
_DISPATCH = "tokens reach their experts by an all-to-all"
_FUSION = "it costs speed; models here gate their feed-forward layers, and none squares a ReLU"
_DENSE = AnyUnless("policy.model.num_moe_experts")
_NO_MTP = AnyUnless("policy.model.mtp_num_layers")
_NO_DTENSOR = AnyUnless("policy.dtensor_cfg.enabled")

_MEGATRON: dict[str, Judgement] = {
    "converter_type": UNREAD,  # names a Hugging Face converter; config.json says what is read
    "model_overrides": refused(None, {}, remedy=_ARCHITECTURE),
    "checkpoint.ckpt_assume_constant_structure": UNREAD,  # a plan is made for each save
    "force_reconvert_from_hf": UNREAD,
    "empty_unused_memory_level": UNREAD,  # when the CUDA cache is emptied
    "clear_memory_caches_before_refit": UNREAD,
    "fine_grained_activation_offloading": told(False, None, cost=_KEPT_ON_GPU),
    "offload_modules": told(
        None, [], AnyUnless("policy.megatron_cfg.fine_grained_activation_offloading"), cost=_KEPT_ON_GPU
    ),
    "cuda_graph_impl": told(None, "none", cost="it costs speed; training captures no CUDA graphs"),
    "cuda_graph_modules": UNREAD,  # read with the graphs only, as is the next one
    "cuda_graph_warmup_steps": UNREAD,
    "overlap_p2p_comm": told(None, cost="the interleaved schedule gets the settings it needs"),
    "batch_p2p_comm": told(None, cost="the interleaved schedule gets the settings it needs"),
    "use_fused_weighted_squared_relu": told(False, None, cost=_FUSION),
    "defer_fp32_logits": told(
        False, None, cost="it costs memory; use_fused_linear_logprobs: true spares more of it"
    ),
    "attention_backend": told(None, "auto", cost="Transformer Engine chooses its kernel"),
    "use_gloo_process_groups": UNREAD,  # groups follow the device
    "env_vars": told(None, {}, cost=_ENVIRONMENT),
    "fp8_cfg": refused(OFF, remedy="set policy.megatron_cfg.fp8_cfg.enabled: false"),
    "peft": refused(OFF, remedy="set policy.megatron_cfg.peft.enabled: false"),
    "freeze_config": refused(None, {}, remedy="remove it; all weights are trained"),
    "mtp_num_layers": refused(None, 0, remedy="remove it and set policy.model.mtp_num_layers"),
    "mtp_loss_scaling_factor": refused(
        _NO_MTP, remedy="remove it and set policy.model.mtp_loss_scaling_factor"
    ),
    "mtp_use_repeated_layer": refused(_NO_MTP, False, remedy="set it to false"),
    "mtp_detach_heads": refused(_NO_MTP, False, remedy="set it to false"),
    "moe_router_enable_expert_bias": refused(
        _DENSE, SameAs("policy.model.moe_router_enable_expert_bias"), remedy="remove it; the weights say it"
    ),
    "moe_grouped_gemm": UNREAD,
    "moe_per_layer_logging": told(_DENSE, False, cost="moe_metrics are means over the layers"),
    "track_moe_metrics": UNREAD,
    "moe_enable_deepep": told(_DENSE, False, cost=_DISPATCH),
    "moe_token_dispatcher_type": told(_DENSE, "alltoall", cost=_DISPATCH),
    "moe_flex_dispatcher_backend": UNREAD,  # read with the dispatcher flex only, as is the next one
    "moe_hybridep_num_sms": UNREAD,
    "moe_shared_expert_overlap": told(_DENSE, False, cost="it costs speed"),
    "scheduler.override_opt_param_scheduler": UNREAD,  # the schedule of the recipe rules after a resume, here always
    "optimizer.fp16": refused(
        False, remedy="set it to false; fp16 gradients overflow before the global token count divides them"
    ),
    "optimizer.params_dtype": UNREAD,  # policy.precision rules, there too: Megatron's optimizer takes the model's
    "optimizer.use_precision_aware_optimizer": told(
        False, cost="it costs memory; the optimizer's state is fp32"
    ),
    "optimizer.optimizer_cpu_offload": told(False, cost="it costs memory; the optimizer stays on the GPU"),
    "optimizer.optimizer_offload_fraction": UNREAD,  # read with the offload only, as is the next one
    "optimizer.overlap_cpu_optimizer_d2h_h2d": UNREAD,
    "distributed_data_parallel_config.average_in_collective": told(
        False, cost="gradients are summed, then divided once by the global count, which gives the same step"
    ),
    "distributed_data_parallel_config.use_custom_fsdp": told(
        False, cost="it costs memory; optimizer.use_distributed_optimizer: true shards the optimizer's state"
    ),
    "distributed_data_parallel_config.data_parallel_sharding_strategy": UNREAD,
}

_VLLM: dict[str, Judgement] = {
    "enable_expert_parallel": refused(False, None, remedy="set it to false"),
    "logprobs_mode": refused(
        "processed_logprobs", None, remedy="remove it; log-probabilities are those that are drawn from"
    ),
    "load_format": UNREAD,  # weights come by refit
    "skip_tokenizer_init": UNREAD,  # one is loaded for stop_strings alone
    "use_tqdm": UNREAD,  # the panel shows the progress
    "use_deep_gemm": told(False, None, cost="vLLM chooses its kernels; VLLM_USE_DEEP_GEMM says which"),
    "hf_overrides": refused(None, {}, remedy=_ARCHITECTURE),
    "cap_max_tokens_to_context": UNREAD,  # prompt and response always have room
    "distributed_executor_backend": told(None, cost="an engine's processes are vLLM's own"),
    "enable_prefix_caching": told(None, cost="vLLM's default holds; the cache is emptied at each refit"),
    "env_vars": told(None, {}, cost=_ENVIRONMENT),
    "limit_mm_per_prompt": UNREAD,  # prompts are text
    "reset_encoder_cache_after_weight_update": UNREAD,
    "expose_http_server": refused(False, None, remedy="set it to false"),
    "http_server_serving_chat_kwargs": UNREAD,  # read with that server only, as are the others of its kind
    "reasoning_parser_plugin": UNREAD,
    "http_refit_api_key_env_var": refused(None, remedy=OFF_OR_REMOVED),
    "http_refit_server_port": refused(None, remedy=OFF_OR_REMOVED),
    "zmq_refit_server_port": refused(None, remedy=OFF_OR_REMOVED),
    "enable_vllm_metrics_logger": told(False, None, cost="metrics of vLLM's inside are not recorded"),
    "vllm_metrics_logger_interval": UNREAD,
}

_GENERATION: dict[str, Judgement] = {
    "mcore_generation_config": UNREAD,
    "sglang_cfg": UNREAD,  # of other engines, as are the next ones; their layout is read where one is the engine
    "trtllm_cfg": UNREAD,
    "trtllm_kwargs": UNREAD,
    "refit_cfg": UNREAD,
    "real_quant_export_cpu_offload": UNREAD,
    "quant_cfg": refused(None, remedy="set it to null; the engine computes in vllm_cfg.precision"),
    "real_quant": refused(False, None, remedy="set it to false"),
    "real_quant_ignore": UNREAD,
    "bad_words": refused(
        None, [], remedy="remove it; the log-probabilities of training know of no words that are left out"
    ),
    "port_range_low": UNREAD,
    "port_range_high": UNREAD,
    "val_temperature": refused(None, SameAs("temperature"), remedy=_NO_VAL_SAMPLING),
    "val_top_p": refused(None, SameAs("top_p"), remedy=_NO_VAL_SAMPLING),
    "val_top_k": refused(None, SameAs("top_k"), remedy=_NO_VAL_SAMPLING),
}

_POLICY: dict[str, Judgement] = {
    "tokenizer.use_fastokens": told(False, cost="it costs speed"),
    "is_vlm": refused(False, None, remedy="set it to false; models see text alone"),
    "quant_cfg": refused(None, remedy="set it to null; models are trained in policy.precision"),
    "disable_modelopt_layer_spec": UNREAD,
    "logprob_chunk_size": told(
        None,
        cost="it costs memory; policy.megatron_cfg.use_fused_linear_logprobs: true computes in chunks",
    ),
    "offload_optimizer_for_logprob": told(False, cost="policy.offload: grads_optimizer does so"),
    "refit_buffer_size_gb": told(None, cost="policy.generation.refit_bucket_bytes sizes the buffers"),
    "make_sequence_length_divisible_by": UNREAD,  # rows are padded to what the layout needs
    "dtensor_cfg": refused(
        OFF, remedy="set policy.dtensor_cfg.enabled: false and use policy.megatron_cfg, the only backend"
    ),
    "optimizer": refused(None, _NO_DTENSOR, remedy="set it to null and use policy.megatron_cfg.optimizer"),
    "scheduler": refused(None, _NO_DTENSOR, remedy="set it to null and use policy.megatron_cfg.scheduler"),
    "draft": refused(OFF, remedy="set policy.draft.enabled: false"),
    "router_replay": refused(OFF, remedy="set policy.router_replay.enabled: false"),
    "sequence_packing.microbatch_order": UNREAD,  # sums do not depend on it
    "sequence_packing.fuse_loss": UNREAD,  # the loss of a packed row is one call
}

OF_POLICY: dict[str, Judgement] = {
    f"policy.{section}{key}": judgement
    for section, judgements in (
        ("", _POLICY),
        ("megatron_cfg.", _MEGATRON),
        ("generation.vllm_cfg.", _VLLM),
        ("generation.", _GENERATION),
    )
    for key, judgement in judgements.items()
}
