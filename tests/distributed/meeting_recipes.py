"""The factors of the meeting matrix and the recipe of a combination: an exemplar, shrunk, with a value of each factor.

The algorithms come from the configuration: every class of recipes with its exemplar, every variant under
examples/configs/recipes/variants, and every switch that makes another algorithm of one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_rl_mcore.config import RunConfig
from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check import preflight

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
MEGATRON = "policy.megatron_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
KL = "reference_policy_kl_penalty"

Case = dict[str, Any]
Overrides = dict[str, Any]


@dataclass(frozen=True)
class Algorithm:
    """A recipe of the examples, the overrides that make it the variant meant, and the key of its KL penalty."""

    recipe: Path
    overrides: Overrides
    kl_key: str

    @cached_property
    def shipped(self) -> RunConfig:
        """The recipe without overrides."""
        return load_config(self.recipe)


SWITCHES: dict[str, dict[str, Overrides]] = {
    "dpo": {"dpo offline": {"dpo.num_generations_per_prompt": None, "dpo.sft_loss_weight": 0.5}},
    "distillation": {
        "distillation off policy": {
            "distillation.on_policy": False,
            "distillation.num_prompts_per_step": 16,
            "distillation.num_generations_per_prompt": 1,
        },
        "distillation with rewards": {"loss_fn.rl_weight": 0.5, f"loss_fn.rl.{KL}": 0.0},
    },
}
"""By the algorithm of the exemplar: what its keys make of it besides."""
KL_KEYS = {"dpo": f"dpo.{KL}", "distillation": f"loss_fn.rl.{KL}"}


def _algorithms() -> dict[str, Algorithm]:
    found: dict[str, Algorithm] = {}
    for kind in RUN_CONFIGS:
        recipe = min(EXAMPLES.glob(f"{kind}*_cpu.yaml"), key=lambda path: (len(path.name), path.name))
        key = KL_KEYS.get(kind, f"loss_fn.{KL}")
        found[kind] = Algorithm(recipe, {}, key)
        found |= {name: Algorithm(recipe, own, key) for name, own in SWITCHES.get(kind, {}).items()}
    for recipe in sorted((EXAMPLES / "recipes" / "variants").glob("*.yaml")):
        found[recipe.stem.removesuffix("_cpu")] = Algorithm(recipe, {}, f"loss_fn.{KL}")
    return found


ALGORITHMS = _algorithms()
LOSSES_OF_THEIR_OWN = ("sft", "dpo", "dpo offline", "distillation", "distillation off policy")
"""Algorithms without a policy gradient."""
EXPERTS = {
    "policy.model.num_moe_experts": 4,
    "policy.model.moe_router_topk": 2,
    "policy.model.moe_ffn_hidden_size": 24,
}
TENSOR, PIPELINE = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
CONTEXT = f"{MEGATRON}.context_parallel_size"
# Ranks and keys.
LAYOUTS: dict[str, tuple[int, Overrides]] = {
    "one": (1, {}),
    "one with experts": (1, EXPERTS),
    "dp2": (2, {}),
    "tp2 sp": (2, {TENSOR: 2, f"{MEGATRON}.sequence_parallel": True}),
    "pp2": (2, {PIPELINE: 2, f"{MEGATRON}.num_layers_in_first_pipeline_stage": 1}),
    "ep2": (2, EXPERTS | {f"{MEGATRON}.expert_model_parallel_size": 2}),
    "cp2": (2, {CONTEXT: 2}),
    "dp2 pp2": (4, {PIPELINE: 2, f"{MEGATRON}.num_layers_in_first_pipeline_stage": 1}),
}
_ROUTED: Overrides = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
# The keys of a model, and those besides where the layout has experts. Latent attention and sinks come with experts.
MODELS: dict[str, tuple[Overrides, Overrides]] = {
    # Two tensor-parallel ranks share the query group; norms are of the family with experts, which engines can load.
    "gpt": ({"num_query_groups": 1}, {"qk_layernorm": True}),
    "hybrid": ({"num_query_groups": 1}, {"qk_layernorm": True}),
    "mamba": (
        {
            "activation_func": "squared_relu", "hybrid_layer_pattern": "M*-",
            "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_state_dim": 6, "mamba_num_groups": 2,
        },
        {"hybrid_layer_pattern": "ME*"} | _ROUTED,
    ),
    "latent attention": (
        {
            "qk_layernorm": True, "num_query_groups": None, "q_lora_rank": 12,
            "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6,
            "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1],
        } | _ROUTED,
        {},
    ),
    "sinks": (
        {
            "softmax_type": "learnable", "sliding_window": 5,
            "add_bias_linear": True, "activation_func": "quick_gelu",
            "activation_func_clamp_value": 2.0,
            "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
        },
        {},
    ),
}  # fmt: skip
EXPERT_LAYOUTS = [name for name, (_, keys) in LAYOUTS.items() if EXPERTS.keys() <= keys.keys()]

RESPONSE, PROMPT = 6, 6
SECTIONS = {"dynamic": "policy.dynamic_batching", "packed": "policy.sequence_packing"}
FUSED, FUSED_PACKED = f"{MEGATRON}.use_fused_linear_logprobs", f"{MEGATRON}.fused_linear_logprobs_packed"
FUSED_SHARED = f"{MEGATRON}.fused_linear_logprobs_context_parallel"

# The keys of the section; a recipe of its own says how many optimizer steps there are, and what is corrected.
ASYNCHRONY: dict[str, Overrides] = {
    "none": {},
    "in step": {"max_trajectory_age_steps": 0},
    "ahead": {"max_trajectory_age_steps": 1},
    "as completed": {"max_trajectory_age_steps": 2, "order": "as_completed"},
    "in chunks": {"max_trajectory_age_steps": 1, "min_groups_for_streaming_train": 1},
}
STALL_S = 300.0
CALLS = 3
"""Of an agent at most."""

# The first value of each is the plain one, which a combination has unless a pair asks for another.
FACTORS: dict[str, tuple[Any, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "batching": ("fixed", "dynamic", "packed"),
    "fused": ("unfused", "fused", "fused allowed"),  # the last with the keys for packed rows, and shared ones
    "layout": ("one", "dp2", "tp2 sp", "pp2", "ep2", "cp2", "dp2 pp2"),
    "temperature": (1.0, 0.7),
    "kl": (False, True),
    "distributed optimizer": (False, True),
    "offload": ("none", "grads_optimizer"),
    "overlap": (False, True),
    "state": ("fresh", "resumed", "foreign"),
    # Optimizer steps over the answers of a step; where there is one, its pass can give the previous log-probabilities.
    "updates": ("two", "one", "one pass"),
    "correction": (False, True),  # importance sampling, from the weights that drew to those that train
    "asynchrony": tuple(ASYNCHRONY),
    "player": ("engine", "agents"),  # the latter's sessions are one to three rows
    "model": tuple(MODELS),
    "recomputed": ("nothing", "full", "selective"),
    "adapters": (False, True),
    "filters": (False, True),
}
# What changes the mathematics; the plain sibling of a combination shares it.
MATHEMATICS = (
    "algorithm",
    "temperature",
    "kl",
    "updates",
    "correction",
    "player",
    "model",
    "adapters",
    "filters",
)


def plain_sibling(case: Case) -> Case:
    """The same mathematics in fixed batches, unfused, on one rank, with a plain optimizer, from the first step.

    Its steps answer their own prompts: the recorded answers are the same whenever they are asked for.
    """
    layout = "one with experts" if case["layout"] in EXPERT_LAYOUTS else "one"
    plain = {name: values[0] for name, values in FACTORS.items()}
    shared = {name: case[name] for name in MATHEMATICS}
    if not isinstance(ALGORITHMS[case["algorithm"]].shipped.loop, RolloutConfig):
        shared["updates"] = plain["updates"]
    elif case["updates"] == "one pass":
        shared["updates"] = "one"
    if case["model"] == "hybrid":  # of the same layers
        shared["model"] = "gpt"
    return plain | shared | {"layout": layout}


def name_of(case: Case) -> str:
    """The combination in words."""
    said = {
        "temperature": f"t {case['temperature']}",
        "kl": "kl" if case["kl"] else "no kl",
        "distributed optimizer": "distributed" if case["distributed optimizer"] else "plain",
        "offload": "kept" if case["offload"] == "none" else "offloaded",
        "overlap": "overlapped" if case["overlap"] else "in turn",
        "updates": {"two": "two updates", "one": "one update"}.get(case["updates"], "one pass"),
        "correction": "corrected" if case["correction"] else "as drawn",
        "asynchrony": "synchronous" if case["asynchrony"] == "none" else case["asynchrony"],
        "player": "played by agents" if case["player"] == "agents" else "answered",
        "model": f"{case['model']} model",
        "recomputed": f"{case['recomputed']} recomputed",
        "adapters": "adapters" if case["adapters"] else "all weights",
        "filters": "filtered" if case["filters"] else "all tokens",
    }
    return ", ".join(str(said.get(name, value)) for name, value in case.items())


@dataclass(frozen=True)
class Material:
    """What a run reads: files of rows, and the weights that policy and teacher start from."""

    folder: Path

    def write_rows(self) -> None:
        """64 rows to train on and 8 held out, of uneven lengths; each is a prompt, an answer and a worse answer."""
        rows = [_row(number) for number in range(72)]
        for name, part in (("train", rows[:64]), ("held_out", rows[64:])):
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (self.folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def overrides(self, case: Case) -> Overrides:
        """The keys that name the files and the weights."""
        keys: Overrides = {"data.dataset_name": "jsonl", "data.max_input_seq_length": PROMPT}
        for name, file in (("train", "train"), ("validation", "held_out")):
            keys[f"data.{name}.data_path"] = str(self.folder / f"{file}.jsonl")
        weights = self.weights(case)
        if ALGORITHMS[case["algorithm"]].shipped.algorithm == "distillation":
            keys |= {"teacher.init_checkpoint": str(weights / "step_2")}
        return keys | {"policy.init_checkpoint": str(weights / "step_1")}

    def weights(self, case: Case) -> Path:
        """The folder of checkpoints of the run whose weights a combination starts from."""
        experts = "experts" if case["layout"] in EXPERT_LAYOUTS else "dense"
        return self.folder / f"{plain_sibling(case)['model']} {experts}"


def _row(number: int) -> dict[str, str]:
    # Prompts of 3 to 6 tokens, answers of 2 to 6 with the end.
    prompt = f"{number:0{2 + number % 4}d}>"
    answer = str(number * 7919 + 10**5)[-(1 + number % 5) :]
    worse = str(number * 104729 + 10**5)[-(1 + (number * 3 + 1) % 5) :]
    worse = worse if worse != answer else "+" + worse[1:]
    return {"input": prompt, "output": answer, "prompt": prompt, "chosen": answer, "rejected": worse}


def load(case: Case, material: Material, folder: Path, **more: Any) -> RunConfig:
    """The configuration of a combination, as `check` and the run's command load it; raises ConfigError.

    folder: where its checkpoints are, if it has any. more: further overrides, dots as double underscores.
    """
    algorithm = ALGORITHMS[case["algorithm"]]
    further = {key.replace("__", "."): value for key, value in more.items()}
    overrides = _shrunk(algorithm.shipped) | algorithm.overrides | material.overrides(case)
    overrides |= {"logger.log_dir": str(folder / "log")}
    overrides |= _values(case, algorithm) | _state(case, folder) | further
    config = load_config(algorithm.recipe, as_text(overrides))
    preflight(config, elsewhere=True)
    return config


def as_text(overrides: Overrides) -> list[str]:
    """Overrides as they are given on a command line."""
    return [f"{key}={_text(value)}" for key, value in overrides.items()]


def _text(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def _shrunk(shipped: RunConfig) -> Overrides:
    """A model of three layers, a handful of rows, and numbers in which a difference shows."""
    name, loop = shipped.algorithm, shipped.loop
    keys: Overrides = {
        f"{name}.max_num_steps": 2, f"{name}.val_period": 0, f"{name}.val_at_end": True,
        f"{name}.max_val_samples": 4, f"{name}.val_batch_size": 4,
        "policy.model.num_layers": 3, "policy.model.hidden_size": 32, "policy.model.ffn_hidden_size": 64,
        "policy.model.num_attention_heads": 4, "policy.model.init_method_std": 0.1,
        "policy.max_total_sequence_length": PROMPT + RESPONSE, "policy.generation.max_new_tokens": RESPONSE,
        "policy.train_global_batch_size": 4, "policy.train_micro_batch_size": 1, "policy.logprob_batch_size": 4,
        f"{MEGATRON}.scheduler.lr_decay_style": "linear", f"{MEGATRON}.scheduler.lr_decay_iters": 20,
    }  # fmt: skip
    if isinstance(loop, RolloutConfig):
        answers = min(loop.num_generations_per_prompt, 4)
        prompts = 16 // answers
        keys |= {
            f"{name}.num_prompts_per_step": prompts, f"{name}.num_generations_per_prompt": answers,
            "policy.train_micro_batch_size": 2,
        }  # fmt: skip
    for section in (OPTIMIZER, *(["value.optimizer"] if name == "ppo" else [])):
        # A large epsilon: else Adam would blow the rounding of tiny gradients up to whole steps.
        keys |= {f"{section}.lr": 1e-2, f"{section}.min_lr": 1e-3, f"{section}.adam_eps": 1e-3}
    if name == "ppo":
        keys |= {"value.scheduler.lr_decay_style": "linear", "value.scheduler.lr_decay_iters": 20}
    return keys


def _values(case: Case, algorithm: Algorithm) -> Overrides:
    ranks, keys = LAYOUTS[case["layout"]]
    values = keys | {
        "cluster.cpu_workers_per_node": ranks,
        FUSED: case["fused"] != "unfused",
        FUSED_PACKED: case["fused"] == "fused allowed",
        FUSED_SHARED: case["fused"] == "fused allowed" and CONTEXT in keys,
        "policy.generation.temperature": case["temperature"],
        "policy.generation.top_k": 24 if case["filters"] else None,
        "policy.generation.top_p": 0.9 if case["filters"] else 1.0,
        "policy.offload": case["offload"],
        f"{MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce": case["overlap"],
        f"{MEGATRON}.model_class": "hybrid" if case["model"] in ("hybrid", "mamba") else "gpt",
        f"{OPTIMIZER}.use_distributed_optimizer": case["distributed optimizer"],
        f"{MEGATRON}.activation_checkpointing": case["recomputed"] != "nothing",
        # Factors that the plain sibling has, too.
        f"{OPTIMIZER}.decay_norms_and_biases": case["kl"],
        f"{MEGATRON}.freeze": _frozen(case) if case["correction"] and not case["adapters"] else [],
        # B is drawn too: with a B of 0 an A has no gradient in the first step.
        f"{MEGATRON}.peft.enabled": case["adapters"],
        f"{MEGATRON}.peft.lora_B_init_method": "normal" if case["adapters"] else "zero",
        f"{MEGATRON}.peft.alpha": 4.0 if case["adapters"] else 32.0,
    }
    values |= _model(case)
    if case["layout"] in EXPERT_LAYOUTS:
        values[f"{MEGATRON}.freeze_moe_router"] = case["kl"]
    if case["recomputed"] == "selective":
        values[f"{MEGATRON}.recompute_granularity"] = "selective"
    if algorithm.shipped.algorithm in ("grpo", "ppo"):
        values["policy.recompute_prev_logprobs"] = "auto" if case["updates"] == "one pass" else "always"
    if algorithm.shipped.algorithm == "ppo":
        values["value.optimizer.use_distributed_optimizer"] = case["distributed optimizer"]
    if case["batching"] != "fixed":
        section = SECTIONS[case["batching"]]
        sizes = {"train_mb_tokens": 2 * (PROMPT + RESPONSE), "logprob_mb_tokens": 30}
        values |= {f"{section}.{key}": value for key, value in ({"enabled": True} | sizes).items()}
    if isinstance(algorithm.shipped.loop, RolloutConfig):
        values["policy.train_global_batch_size"] = 8 if case["updates"] == "two" else 16
    if case["player"] == "agents":
        turns = f"{algorithm.shipped.algorithm}.max_rollout_turns"
        values |= {"env.endpoint.command": ["an-agent"], "env.endpoint.timeout_s": 60, turns: CALLS}
    return values | _kl(case, algorithm) | _correction(case, algorithm) | _asynchrony(case, algorithm)


def _model(case: Case) -> Overrides:
    keys, with_experts = MODELS[case["model"]]
    own = keys | (with_experts if case["layout"] in EXPERT_LAYOUTS else {})
    return {f"policy.model.{key}": value for key, value in own.items()}


def _frozen(case: Case) -> list[str]:
    if case["model"] == "mamba":
        return ["backbone.embeddings.weight", "backbone.layers.0.*"]
    return ["model.embed_tokens.weight", "model.layers.0.*"]


def _correction(case: Case, algorithm: Algorithm) -> Overrides:
    return {correction_key(algorithm): True} if case["correction"] else {}


def _asynchrony(case: Case, algorithm: Algorithm) -> Overrides:
    if case["asynchrony"] == "none":
        return {}
    keys = ASYNCHRONY[case["asynchrony"]] | {"enabled": True, "stall_timeout_s": STALL_S}
    section = asynchrony_key(algorithm)
    engines: Overrides = {"policy.generation.colocated.enabled": False}
    return engines | {f"{section}.{key}": value for key, value in keys.items()}


def correction_key(algorithm: Algorithm) -> str:
    """The path of the switch of importance sampling; of a loss that has none, as others would name it."""
    return f"{algorithm.kl_key.rpartition('.')[0]}.use_importance_sampling_correction"


def asynchrony_key(algorithm: Algorithm) -> str:
    """The path of the section of asynchronous rollouts; of an algorithm that has none, as others would name it."""
    name = algorithm.shipped.algorithm
    return f"{name}.async_{name}"


def _kl(case: Case, algorithm: Algorithm) -> Overrides:
    if case["kl"]:
        return {algorithm.kl_key: 0.1}
    # Where there is no such term, or the key is not the algorithm's, nothing is to be turned off.
    absent = case["algorithm"] in ("sft", "distillation", "distillation off policy")
    return {} if absent else {algorithm.kl_key: 0.0}


def _state(case: Case, folder: Path) -> Overrides:
    if case["state"] == "fresh":
        return {"checkpointing.enabled": False}
    return {
        "checkpointing.enabled": True,
        "checkpointing.checkpoint_dir": str(folder),
        "checkpointing.save_period": 1,
    }
