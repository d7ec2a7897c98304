"""Configuration of generation: engine and sampling."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from nemo_rl_mcore.config.base import (
    Float,
    IntTuple,
    NonNegativeInt,
    PositiveInt,
    Rule,
    StrictModel,
    StrTuple,
    SwitchedOn,
)
from nemo_rl_mcore.config.custom_code import Arguments

_SECTION = "policy.generation."
_OF_VLLM = ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager")
_OF_A_LAUNCH = ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port")
_OF_REFIT = ("max_logprobs", "logprobs_mode", "load_format", "skip_tokenizer_init")
_OF_WORKERS = ("worker_extension_cls", "worker_cls", "disable_log_stats")
_SET_HERE: Mapping[str, str] = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": "policy.generation.vllm_cfg.precision",
    **{key: f"policy.generation.vllm_cfg.{key}" for key in _OF_VLLM},
    "max_model_len": "policy.max_total_sequence_length",
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    "quantization": "policy.generation.vllm_cfg.precision",
    "quantization_config": "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
    "kv_cache_dtype": "policy.generation.vllm_cfg.kv_cache_dtype",
    "enable_sleep_mode": "policy.generation.colocated.enabled",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "seed": "seed",
    **dict.fromkeys((*_OF_A_LAUNCH, *_OF_REFIT, *_OF_WORKERS), ""),
}
"""Engine arguments that this package sets, and the key that controls each, if any."""
_OTHER_ANSWERS = (
    *("hf_overrides", "hf_config_path", "rope_scaling", "rope_theta", "override_generation_config"),
    *("generation_config", "logits_processors", "logits_processor_pattern", "calculate_kv_scales"),
    *("speculative_config", "speculative_model", "enable_lora", "lora_modules", "disable_sliding_window"),
    *("sliding_window", "quantization_param_path", "revision", "trust_remote_code"),
)
"""Engine arguments that change the sampled distribution, or add weights that a refit does not send."""
_OTHER_LAYOUTS = ("data_parallel_size", "decode_context_parallel_size", "enable_eplb")
"""Engine arguments that spread an engine over more devices than it has."""
NOT_PASSED_ON = frozenset((*_SET_HERE, *_OTHER_ANSWERS, *_OTHER_LAYOUTS))
"""Engine arguments that a recipe may not set."""


def argument_rules(given: Mapping[str, object] | None) -> Iterator[Rule[Any]]:
    """Yield rules against arguments that are set elsewhere, or would change the answers that training expects."""
    for name in given or {}:
        path, source = f"vllm_kwargs.{name}", _SET_HERE.get(name)
        if source is not None:
            related = (source.removeprefix(_SECTION),) if source.startswith(_SECTION) else ()
            fix = f"set {source}" if source else "remove it"
            yield Rule("not-allowed", path, True, related, fix, says="is set by this package")
        elif name in _OTHER_ANSWERS:
            yield Rule("not-supported", path, True, why="it changes the distribution that is sampled")
        elif name in _OTHER_LAYOUTS:
            why = (
                "it spreads an engine over devices that it is not given; vllm_cfg has the sizes of its layout"
            )
            yield Rule("not-supported", path, True, why=why)


class VllmConfig(StrictModel):
    """The vLLM engines; read only if policy.generation.backend is vllm."""

    async_engine: bool = False
    """Answer requests individually as they arrive, so that weights can change while requests are in flight."""
    precision: Literal["float32", "bfloat16", "fp8", "mxfp8"] | None = None
    """Number format of weights and activations; null means policy.precision. With fp8, vLLM quantizes layers' weights
    during loading, with a scale per block of 128 x 128, and activations during computation; mxfp8 has a scale per 32
    numbers. All other tensors are then bfloat16."""
    quantization_ignored_layer_kws: StrTuple | None = None
    """Parts of layer names, such as layers.0.; matching layers stay bfloat16 with fp8 or mxfp8. Null means none."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Number format of the key-value cache, with vLLM's own scales; auto means the activations' format."""
    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs that share each layer of an engine; an engine may span several machines."""
    pipeline_parallel_size: PositiveInt = 1
    """Number of pipeline stages in an engine."""
    expert_parallel_size: PositiveInt = 1
    """Number of GPUs among which experts are divided whole: tensor_parallel_size, or 1 to split each expert instead."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.6
    """Fraction of a GPU's memory for weights, activations and key-value cache; not read on CPUs."""
    enforce_eager: bool = False
    """Never capture CUDA graphs; on CPUs nothing is captured or compiled anyway."""

    @property
    def processes(self) -> int:
        """Return the number of processes in an engine; each has its own GPU, unless it runs on CPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def number_format(self, of_training: str) -> str:
        """Return the number format in which the engine computes unquantized layers."""
        return "bfloat16" if self.quantizes else self.precision or of_training

    @property
    def quantizes(self) -> bool:
        """True if the engine quantizes the weights that it receives."""
        return self.precision in ("fp8", "mxfp8")

    rules = (
        Rule(
            "has-no-effect",
            "quantization_ignored_layer_kws",
            lambda own: own.quantization_ignored_layer_kws and not own.quantizes,
            ("precision",),
        ),
    )


class ColocatedResourcesConfig(StrictModel):
    """GPUs for separate engines, in addition to the training ranks' GPUs in the section cluster."""

    gpus_per_node: PositiveInt | None = None
    """Number of the engines' GPUs on each machine; null is for embedded engines only, one GPU each on one machine."""
    num_nodes: PositiveInt | None = None
    """Number of machines; null means one."""


class ColocatedConfig(SwitchedOn):
    """Sharing of devices: vLLM engines sleep while the ranks train; embedded generation runs in the ranks themselves.

    With enabled: false, engines have their own devices. vLLM engines on CPUs are always separate processes. On shared
    GPUs, policy.offload selects the memory that ranks release while engines generate.
    """

    resources: ColocatedResourcesConfig = ColocatedResourcesConfig()
    """GPUs dedicated to the engines; only with enabled: false."""

    rules = (
        Rule(
            "incompatible",
            "resources",
            lambda own: own.enabled and (own.resources.gpus_per_node or own.resources.num_nodes),
            ("enabled",),
            "remove it, or set enabled: false",
            "engines that share the ranks' GPUs have none of their own",
        ),
    )


class SamplingFiltersConfig(StrictModel):
    """Filters on the tokens that may be sampled."""

    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose total probability is at least this; 1 keeps all tokens."""
    top_k: PositiveInt | None = None
    """Sample from this number of most probable tokens; null keeps all tokens."""


class LogprobSampling(NamedTuple):
    """The distribution that a log-probability belongs to: the softmax at the temperature, after the filters."""

    temperature: float
    top_k: int | None = None
    top_p: float = 1.0


class GenerationConfig(SamplingFiltersConfig):
    """The engine, and the distribution from which responses are sampled.

    Engines and GRPO's and PPO's training compute log-probabilities after top_p and top_k.
    """

    backend: Literal["embedded", "vllm"] = "embedded"
    """The engine: `embedded` decodes with the training model or a copy of it (see colocated), `vllm` with a copy."""
    engines: PositiveInt = 1
    """Separate engines, each with the whole model and a share of the samples; for vllm, only on CPUs (ours)."""
    max_restarts: NonNegativeInt = 0
    """Maximum restarts of dead or hanging engines in a run, over all engines (ours)."""
    max_new_tokens: PositiveInt
    """Maximum tokens in a response, end-of-sequence included."""
    fit_to_sequence: bool = False
    """Allow a response all tokens left in policy.max_total_sequence_length after its prompt; false reserves
    max_new_tokens for each response and limits prompts to the rest (ours)."""
    temperature: Annotated[Float, Field(ge=0.01)] = 1.0
    """Divisor of the logits, in sampling and in all log-probabilities of sampled answers.

    Given answers (SFT, offline DPO, distillation off policy) have temperature 1.
    """
    stop_token_ids: IntTuple | None = None
    """Token ids that end a response, besides those in the tokenizer's and the model's files; null means no others."""
    stop_strings: StrTuple | None = None
    """Texts that end a response and remain in it; null means none."""
    vllm_cfg: VllmConfig = VllmConfig()
    """The vLLM engines."""
    vllm_kwargs: Arguments | None = None
    """Additional vLLM engine arguments that do not change answers, such as compilation_config; null means none.

    By default an engine decodes up to 256 sequences at a time (max_num_seqs); its key-value cache takes the memory
    that gpu_memory_utilization leaves or, on CPUs, holds 64 sequences (kv_cache_memory_bytes)."""
    colocated: ColocatedConfig = ColocatedConfig()
    """Sharing of devices between engines and training ranks."""
    refit_transport: Literal["shared_memory", "ray", "cuda_ipc", "nccl"] | None = None
    """Transport of weights to engines; null chooses shared_memory or ray on CPUs, cuda_ipc or nccl on GPUs."""
    verify_refit: bool = True
    """Compare the engines' weights with the trainer's bit by bit after every refit (ours).

    If false, only check that every tensor arrived and every weight was written.
    """
    compare_at_start: bool = True
    """Compare separate engines' log-probabilities with training's when a run starts or resumes (ours).

    The comparison covers the whole vocabulary after a few prompts; a difference that the number format does not explain
    ends the run.
    """
    mismatch_threshold: Annotated[Float, Field(gt=1)] | None = None
    """A response is mismatched if the mean of exp|generation - training| over its log-probabilities exceeds this; 1 is
    perfect agreement, and null only reports the means (ours)."""
    mismatch_action: Literal["warn", "mask", "stop"] = "warn"
    """Handling of mismatched responses: warn, mask them in the loss, or stop the run before training on them (ours). In
    asynchronous runs, `mask` also applies to responses from older weights, as in NeMo RL, and so to their age."""

    @property
    def logprob_sampling(self) -> LogprobSampling:
        return LogprobSampling(self.temperature, self.top_k, self.top_p)

    @property
    def decodes_on_ranks(self) -> bool:
        """True if the training ranks generate answers themselves, instead of separate engines."""
        return self.backend == "embedded" and self.colocated.enabled

    @property
    def takes_turns(self) -> bool:
        """True if separate engines take turns with the ranks on the same devices."""
        return self.backend == "vllm" and self.colocated.enabled

    rules = (
        lambda own: argument_rules(own.vllm_kwargs),
        Rule(
            "not-allowed",
            "stop_strings",
            lambda own: "" in (own.stop_strings or ()),
            fix="remove it",
            says="an empty text would end every response at once",
        ),
    )
