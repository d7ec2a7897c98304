"""Configuration of generation: the engine and how it samples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl_mcore.config.base import (
    Float,
    IntTuple,
    NonNegativeInt,
    PositiveInt,
    Rule,
    StrictModel,
    StrTuple,
)
from nemo_rl_mcore.config.custom_code import Arguments

_SECTION = "policy.generation."
_SET_HERE: Mapping[str, str] = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": "policy.generation.vllm_cfg.precision",
    **{
        key: f"policy.generation.vllm_cfg.{key}"
        for key in (
            *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"),
            "enforce_eager",
        )
    },
    "max_model_len": "policy.max_total_sequence_length",
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"), ""
    ),
    "quantization": "policy.generation.vllm_cfg.precision",
    "quantization_config": "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
    "kv_cache_dtype": "policy.generation.vllm_cfg.kv_cache_dtype",
    "max_logprobs": "",
    "logprobs_mode": "",
    "load_format": "",
    "skip_tokenizer_init": "",
    "enable_sleep_mode": "policy.generation.colocated.enabled",
    "worker_extension_cls": "",
    "worker_cls": "",
    "disable_log_stats": "",
    "seed": "seed",
}
"""What an engine is built with, and the key that says it, if one does."""
_OTHER_ANSWERS = (
    *(
        "hf_overrides",
        "hf_config_path",
        "rope_scaling",
        "rope_theta",
        "override_generation_config",
    ),
    *(
        "generation_config",
        "logits_processors",
        "logits_processor_pattern",
        "calculate_kv_scales",
    ),
    *("speculative_config", "speculative_model", "enable_lora", "lora_modules", "disable_sliding_window"),
    *(
        "enable_return_routed_experts",
        "sliding_window",
        "quantization_param_path",
        "revision",
        "trust_remote_code",
    ),
)
"""What changes the distribution that is sampled, or has weights that no refit sends."""
_OTHER_LAYOUTS = ("data_parallel_size", "decode_context_parallel_size", "enable_eplb")
"""What spreads an engine over more devices than it is given."""


def argument_rules(given: Mapping[str, object] | None) -> Iterator[Rule[Any]]:
    """Yield rules of arguments that are set elsewhere, or would give other answers than training expects."""
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


def is_passed_on(name: str) -> bool:
    """Return whether vLLM gets an argument of that name as it is."""
    return name not in {*_SET_HERE, *_OTHER_ANSWERS, *_OTHER_LAYOUTS}


@dataclass(frozen=True)
class EngineTraits:
    """Capabilities of a kind of engine, and its name.

    noun: of one engine, for people. may_be_the_ranks: with colocated.enabled the training ranks answer, and no engine
    is started. sleeps: on GPUs that it shares with the ranks, it gives them its memory while they train.
    reports_before_filters: its log-probabilities are those before top_p and top_k, as training computes them.
    always_rereads: it recomputes its cache when weights change, whatever the recipe says. needs_family: it runs models
    of known Hugging Face families alone. package: the Python package that it needs.
    """

    noun: str
    may_be_the_ranks: bool = False
    sleeps: bool = False
    reports_before_filters: bool = False
    always_rereads: bool = False
    needs_family: bool = False
    package: str | None = None


class EngineConfig(StrictModel):
    """What the sections of all engines have in common."""

    traits: ClassVar[EngineTraits]

    @property
    def required_for_groups(self) -> str | None:
        """Return the key of this section that is to be true for groups to be answered one by one; None if they are."""
        return None

    def number_format(self, of_training: str) -> str | None:
        """Return the format in which code of its own computes; None where Megatron's does, in that of training."""
        return None


class EmbeddedConfig(EngineConfig):
    """The embedded engines: the ranks themselves or, with colocated.enabled: false, processes of their own."""

    traits = EngineTraits("embedded engine", may_be_the_ranks=True, reports_before_filters=True)


class VllmConfig(EngineConfig):
    """The vLLM engines; read when policy.generation.backend is vllm."""

    traits = EngineTraits("vLLM engine", sleeps=True, always_rereads=True, needs_family=True, package="vllm")

    async_engine: bool = False
    """Answer requests one by one as they come, so that weights can change while some are in flight."""
    precision: Literal["float32", "bfloat16", "fp8"] | None = None
    """Number format of weights and activations; null is policy.precision. With fp8 vLLM quantizes the layers' weights
    as it loads them, with a scale for each block of 128 x 128, and activations as it computes; all else is bfloat16."""
    is_mx: bool = False
    """With precision: fp8 a scale for each 32 numbers instead (MXFP8)."""
    quantization_ignored_layer_kws: StrTuple | None = None
    """With precision: fp8 layers whose names contain one of these texts, such as layers.0., stay bfloat16."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Number format of the key-value cache; auto is that of the activations. Its scales are vLLM's own."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that cut each layer of one engine; with the stages they may be those of several machines."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of one engine, each with its share of the layers."""
    expert_parallel_size: PositiveInt = 1
    """GPUs of a stage that share whole experts: 1 cuts each expert as other layers, or tensor_parallel_size."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.6
    """Share of a GPU's memory for weights, activations and key-value cache; not read on CPU."""
    enforce_eager: bool = False
    """Never capture CUDA graphs; nothing is captured or compiled on CPU."""

    @property
    def processes(self) -> int:
        """Return how many processes one engine has, each with a GPU where there are some."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def required_for_groups(self) -> str | None:
        """See `EngineConfig.required_for_groups`."""
        return None if self.async_engine else "vllm_cfg.async_engine"

    def number_format(self, of_training: str) -> str | None:
        """See `EngineConfig.number_format`."""
        return "bfloat16" if self.precision == "fp8" else self.precision or of_training

    @property
    def rounds(self) -> bool:
        """Return whether its answers are of other numbers than the weights that it is sent."""
        return self.precision == "fp8" or self.kv_cache_dtype != "auto"

    rules = tuple(
        Rule(
            "has-no-effect",
            key,
            lambda own, key=key: own.precision != "fp8" and getattr(own, key),
            ("precision",),
        )
        for key in ("is_mx", "quantization_ignored_layer_kws")
    )


class ColocatedResourcesConfig(StrictModel):
    """GPUs that engines of their own get, on top of those of the training ranks in the section cluster."""

    gpus_per_node: PositiveInt | None = None
    """GPUs on each machine."""
    num_nodes: PositiveInt | None = None
    """Machines; null is one."""


class ColocatedConfig(StrictModel):
    """Whether generation shares what the training ranks have: their GPUs (vllm), or the ranks themselves (embedded).

    vLLM engines on CPU are processes of their own either way. On shared GPUs the ranks' memory holds what it held while
    engines generate.
    """

    enabled: bool = True
    """vLLM engines sleep while the ranks train, embedded ones are the ranks; false makes engines beside the ranks."""
    resources: ColocatedResourcesConfig = ColocatedResourcesConfig()
    """The engines' own GPUs where enabled is false."""

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


class MismatchConfig(StrictModel):
    """What happens when training finds other log-probabilities for a response than the engine reported (ours).

    The measure of a response is the mean of exp|generation - training| over its tokens: 1 is perfect agreement.
    """

    threshold: Annotated[Float, Field(gt=1)] | None = None
    """Measure above which a response counts as mismatched; null only reports."""
    action: Literal["warn", "mask", "stop"] = "warn"
    """Say so, leave the response out of the loss, or end the run before it trains."""


class SamplingFiltersConfig(StrictModel):
    """Filters on the tokens that may be sampled."""

    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: PositiveInt | None = None
    """Sample from this many most probable tokens; null keeps all."""


class GenerationConfig(SamplingFiltersConfig):
    """Which engine writes the responses, and from which distribution.

    The log-probabilities that the embedded engine returns are those of the whole distribution at the temperature,
    before top_p and top_k filter it, so they agree with those that training computes.
    """

    backend: Literal["embedded", "vllm"] = "embedded"
    """The engine: `embedded` decodes on the training model itself, or on a copy (see colocated); `vllm` on a copy."""
    engines: PositiveInt = 1
    """Engines apart from the ranks, each with the whole model and a share of the samples; of vllm on CPU (ours)."""
    max_restarts: NonNegativeInt = 0
    """Times in a run that an engine which died or hangs is restarted, all engines together (ours)."""
    max_new_tokens: PositiveInt
    """Tokens of a response at most, end-of-sequence included."""
    fit_to_sequence: bool = False
    """A response has what its prompt leaves of policy.max_total_sequence_length, and no more; false reserves
    max_new_tokens for each, and prompts get the rest (ours)."""
    temperature: Annotated[Float, Field(ge=0.01)] = 1.0
    """Divides the logits, in sampling and in every log-probability of answers that were sampled so.

    Given answers (SFT, offline DPO, distillation off policy) are read at temperature 1.
    """
    stop_token_ids: IntTuple | None = None
    """Token ids that end a response besides those that the files of the tokenizer and of the model name."""
    stop_strings: StrTuple | None = None
    """Texts that end a response and belong to it."""
    vllm_cfg: VllmConfig = VllmConfig()
    """The vLLM engines."""
    vllm_kwargs: Arguments | None = None
    """Further arguments of vLLM's engines, such as compilation_config; none that gives other answers.

    Unless they say so, an engine decodes 256 sequences together (max_num_seqs), and its key-value cache is what
    gpu_memory_utilization leaves or, on CPU, has room for 64 sequences (kv_cache_memory_bytes)."""
    colocated: ColocatedConfig = ColocatedConfig()
    """Where the engines run."""
    refit_transport: Literal["shared_memory", "ray", "cuda_ipc", "nccl"] | None = None
    """How copies get weights; null is shared_memory on CPU (ray on several machines), on GPUs cuda_ipc or nccl."""
    verify_refit: bool = True
    """After every refit compare what the engines hold with the trainer's weights, bit by bit (ours).

    False only checks that every tensor arrived and every weight was written.
    """
    compare_at_start: bool = True
    """Compare engines apart from the ranks with training over the whole vocabulary when a run starts or resumes (ours).

    After a few of its prompts; a difference that the number format does not explain ends the run.
    """
    mismatch: MismatchConfig = MismatchConfig()
    """When the engine and training disagree."""

    @property
    def engine(self) -> EngineConfig:
        """Return the section of the engine that answers, which says what it can do."""
        return self.vllm_cfg if self.backend == "vllm" else EmbeddedConfig()

    @property
    def decodes_on_ranks(self) -> bool:
        """Return whether the training ranks answer themselves; otherwise engines do, to which weights are sent."""
        return self.engine.traits.may_be_the_ranks and self.colocated.enabled

    @property
    def takes_turns(self) -> bool:
        """Return whether engines of their own compute on the ranks' GPUs, in turn with them."""
        return self.colocated.enabled and not self.decodes_on_ranks

    rules = (
        lambda own: argument_rules(own.vllm_kwargs),
        Rule(
            "not-allowed",
            "stop_strings",
            lambda own: "" in (own.stop_strings or ()),
            fix="leave it out",
            says="an empty text would end every response at once",
        ),
    )
