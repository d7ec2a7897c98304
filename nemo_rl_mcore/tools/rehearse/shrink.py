"""From a recipe to one of the same run that fits on a laptop, with every key that changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.algorithm import GivenRowsConfig, RolloutConfig
from nemo_rl_mcore.config.base import CHAR_TOKENIZER, Tree, join_path
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.driver.run_folder import shown_value
from nemo_rl_mcore.recipe.rules.model import OF_ENGINE
from nemo_rl_mcore.recipe.shipped import SHIPPED
from nemo_rl_mcore.tools.rehearse.data import LONGEST, data_keys, is_here
from nemo_rl_mcore.tools.rehearse.layouts import Sharing, layers_of, stage_keys

STEPS = 2
"""Of a rehearsal: one before the save that it resumes from, and one after it."""
TOKENIZER = SHIPPED / "quickstart/tokenizer"
"""Takes the place of one that is not on this machine."""
_VOCABULARY = 384
"""Rows of the embedding, for that one; divisible by what may share it."""
_ENDS = [*range(0, _VOCABULARY, 4)]
"""Tokens that end an answer where a recipe leaves out those that do not end, as nearly all of random weights."""
_HEADS, _HEAD = 4, 8
_EXPERTS = 4
_WINDOW = 3


@dataclass(frozen=True)
class Small:
    """A shrunk recipe: its tree, and why keys are not those of the recipe, by their path."""

    tree: Tree
    why: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Shrink:
    """A key that a rehearsal changes."""

    path: str
    was: object
    now: object
    why: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: {shown_value(self.was)} -> {shown_value(self.now)}"
        return f"{text} ({self.why})" if self.why else text


def shrunk(config: RunConfig, layouts: list[Sharing], number: int, folder: Path) -> Small:
    """Return the recipe in one of its layouts; folder: for its files, those of made rows among them."""
    layout = layouts[number]
    small = Small(copy.deepcopy(config.plain()))
    where = f"{layout}, on {layout.ranks} ranks"
    small.why.update({f"policy.megatron_cfg.{key}": where for key in layout.keys})
    small.why["policy.generation.stop_token_ids"] = "answers of random weights would not end, and be left out"
    for change in _changes(config, layouts, layout, folder):
        for path, value in change.items():
            put(small.tree, path, value)
    if config.env.nemo_gym is not None:
        put(small.tree, "env.nemo_gym", None)
        put(small.tree, "env.endpoint", None)
        put(small.tree, f"{config.algorithm}.max_rollout_turns", 1)
        small.why["env.nemo_gym"] = "NeMo Gym's servers are not started: each sample is one answer"
    if config.env.nemo_gym is not None or config.env.math is not None:
        put(small.tree, "env.math", None)
        put(small.tree, "env.rewards", {"variety": "nemo_rl_mcore.tools.rehearse.data:variety"})
        small.why["env.rewards"] = "answers of random weights earn nothing else, and nothing would be trained"
    return small


def put(tree: Tree, path: str, value: object) -> None:
    """Set a key of a recipe, and the sections above it."""
    *above, last = path.split(".")
    for name in above:
        inner = tree.get(name)
        below = cast("Tree", inner) if isinstance(inner, dict) else Tree()
        tree[name] = below
        tree = below
    tree[last] = value


def shrinks(config: RunConfig, small: RunConfig, why: Mapping[str, str]) -> list[Shrink]:
    """Return every key of the recipe that has another value, but for folders; a section that is left out is one."""
    before, after = config.plain(), small.plain()
    changed = [one for one in _changed(before, after, "") if not one.path.startswith(_OF_FOLDERS)]
    return [replace(one, why=_why(why, one.path)) for one in sorted(changed, key=lambda one: one.path)]


_OF_FOLDERS = ("logger.", "checkpointing.")


def _changed(before: Tree, after: Tree, prefix: str) -> Iterator[Shrink]:
    for key in {**before, **after}:
        was, now, path = before.get(key), after.get(key), join_path(prefix, key)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _changed(cast("Tree", was), cast("Tree", now), path)
        elif was != now:
            yield Shrink(path, _shown(was), _shown(now))


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return "(a section)"
    return f"({len(cast('list[object]', value))} sections)" if isinstance(value, list) and value else value


def _why(why: Mapping[str, str], path: str) -> str:
    """Return what is said of a key, or of the section around it."""
    said = [key for key in why if path == key or path.startswith(f"{key}.")]
    return why[max(said, key=len)] if said else ""


def _changes(
    config: RunConfig, layouts: list[Sharing], layout: Sharing, folder: Path
) -> Iterator[Mapping[str, object]]:
    yield _machine(config, layout)
    yield {f"policy.megatron_cfg.{key}": value for key, value in layout.keys.items()}
    yield {f"policy.megatron_cfg.{key}": value for key, value in stage_keys(config, layout).items()}
    yield _on_cpu(config)
    yield _engine(config)
    lengths = length_keys(config)
    longest = cast("int", lengths["policy.max_total_sequence_length"])
    yield lengths
    yield batch_keys(config, layout, longest)
    yield _loop(config)
    yield data_keys(config, folder)
    yield from _models(config, layers_of(config, layouts), longest, folder)
    yield _records(config, folder)


def _machine(config: RunConfig, layout: Sharing) -> Tree:
    keys: Tree = {"num_nodes": 1, "gpus_per_node": 0, "cpu_workers_per_node": layout.ranks}
    keys |= {"max_trainer_restarts": 0}
    return {f"cluster.{key}": value for key, value in keys.items()}


def _on_cpu(config: RunConfig) -> Tree:
    """Have what needs a GPU, or says the same twice, as a CPU can have it; float32 is what can be compared."""
    megatron = "policy.megatron_cfg"
    keys: Tree = {
        "policy.precision": "float32",
        "policy.offload": "none",
        f"{megatron}.transformer_impl": "auto",
        f"{megatron}.pipeline_dtype": None,
        f"{megatron}.overlap_moe_expert_parallel_comm": False,
        f"{megatron}.gradient_accumulation_fusion": "auto",
        f"{megatron}.recompute_modules": _parts_on_cpu(config),
        f"{megatron}.optimizer.bf16": None,
    }
    if "value" in config.models:
        keys["value.optimizer.bf16"] = None
    chunk = config.policy.megatron_cfg.fused_linear_logprobs_chunk_size
    if chunk is not None:
        keys[f"{megatron}.fused_linear_logprobs_chunk_size"] = min(chunk, 16)
    return keys


def _parts_on_cpu(config: RunConfig) -> list[str] | None:
    """Return the parts that are computed again, without those that only Transformer Engine can."""
    parts = config.policy.megatron_cfg.recompute_modules
    return None if parts is None else [part for part in parts if part not in OF_ENGINE]


def _engine(config: RunConfig) -> Tree:
    """Have the embedded engine: one of its own for each of vLLM's, two at most, or on the ranks where it was there."""
    generation = config.policy.generation
    keys: Tree = {
        "backend": "embedded",
        "vllm_kwargs": None,
        "refit_transport": None,
        "vllm_cfg": {},
        "colocated": {"enabled": generation.decodes_on_ranks},
    }
    if not generation.decodes_on_ranks:
        keys["embedded_cfg"] = {"engines": min(2, engines_of(config))}
    if not _has_tokenizer(config):
        keys["stop_token_ids"] = _ENDS if getattr(config.loop, "overlong_filtering", False) else None
    if generation.top_k is not None:
        keys["top_k"] = min(generation.top_k, 8)
    return {f"policy.generation.{key}": value for key, value in keys.items()}


def engines_of(config: RunConfig) -> int:
    """Return how many engines of its own a recipe has."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.backend == "embedded":
        return generation.embedded_cfg.engines
    if cluster.on_cpu:
        return generation.vllm_cfg.cpu_engines
    of_engines = generation.colocated.resources
    gpus = (
        cluster.world_size
        if generation.colocated.enabled
        else (of_engines.gpus_per_node or cluster.gpus_per_node) * (of_engines.num_nodes or 1)
    )
    return max(1, gpus // generation.vllm_cfg.processes)


def _loop(config: RunConfig) -> Tree:
    """Have two steps, and after them a validation where the recipe has any."""
    loop, name = config.loop, config.algorithm
    keys: Tree = {"max_num_steps": STEPS, "val_period": STEPS if loop.validates else 0}
    keys |= {"val_at_start": False, "val_at_end": False, "val_batch_size": min(4, loop.val_batch_size)}
    keys["max_val_samples"] = 4 if loop.max_val_samples is None else min(4, loop.max_val_samples)
    if isinstance(loop, GivenRowsConfig):
        keys |= {"val_batches": 1, "val_global_batch_size": 4, "val_micro_batch_size": 2}
    for key, most in (
        ("val_num_generations_per_prompt", 2),
        ("max_rollout_turns", 3),
        ("ppo_epochs", 2),
        ("critic_warmup_steps", 0),
        ("topk_logits_k", 8),
    ):
        if (given := getattr(loop, key, None)) is not None:
            keys[key] = min(most, given)
    return {f"{name}.{key}": value for key, value in keys.items()} | {"eval": None}


def _models(config: RunConfig, layers: int, longest: int, folder: Path) -> Iterator[Tree]:
    policy = config.policy
    weights: Tree = {"model_name": None, "hf_config_overrides": None, "init_checkpoint": None}
    yield {f"policy.{key}": value for key, value in weights.items()}
    yield {"policy.model": _model(policy.model, config, layers, longest)}
    if not _has_tokenizer(config):
        yield {"policy.tokenizer.name": str(TOKENIZER)}
    teacher = config.models.get("teacher")
    if teacher is not None:
        yield {f"teacher.{key}": value for key, value in weights.items()}
        yield {"teacher.model": None, "teacher.model_name": str(teacher_folder(folder))}


def teacher_folder(folder: Path) -> Path:
    """Return where the weights of a made teacher are."""
    return folder / "teacher"


def _has_tokenizer(config: RunConfig) -> bool:
    name = config.policy.tokenizer.name
    return name == CHAR_TOKENIZER or Path(name).is_dir()


def _model(model: ModelConfig, config: RunConfig, layers: int, longest: int) -> Tree:
    """Return the same architecture in small: what it has it keeps, at another size."""
    grouped = model.query_groups < model.num_attention_heads
    sizes: Tree = {
        "num_layers": layers,
        "hidden_size": _HEADS * _HEAD,
        "num_attention_heads": _HEADS,
        "num_query_groups": 2 if grouped else None,
        "kv_channels": _own_heads(model),
        "ffn_hidden_size": 64,
        "vocab_size": model.vocab_size if _has_tokenizer(config) else _VOCABULARY,
        "max_position_embeddings": longest,
        "init_method_std": 0.1,
    }
    if model.num_moe_experts is not None:
        sizes |= {
            "num_moe_experts": _EXPERTS,
            "moe_router_topk": min(2, model.moe_router_topk),
            "moe_ffn_hidden_size": 32,
            "moe_latent_size": model.moe_latent_size and _HEAD,
            "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size and 32,
        }
    if model.moe_layer_freq is not None:
        sizes["moe_layer_freq"] = [0] + [1] * (layers - 1)
    if model.moe_router_num_groups is not None:
        sizes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    if model.multi_latent_attention:
        sizes |= {"num_query_groups": None, "kv_channels": None, "kv_lora_rank": 2 * _HEAD}
        sizes |= {"q_lora_rank": model.q_lora_rank and 3 * _HEAD, "qk_head_dim": _HEAD, "v_head_dim": _HEAD}
        sizes["qk_pos_emb_head_dim"] = _HEAD // 2
    if model.mtp_num_layers:
        sizes["mtp_num_layers"] = 1
    if model.sliding_window is not None:
        sizes |= _windows(model.sliding_window, model.window_attn_skip_freq, layers)
    if model.hybrid_layer_pattern is not None:
        sizes |= _hybrid(model, model.hybrid_layer_pattern, layers)
    return model.model_dump(mode="json") | sizes


def _windows(size: int, windowed: tuple[int, ...] | None, layers: int) -> Tree:
    """Return windows that are shorter than answers, in the same turns with layers without."""
    kinds = None if windowed is None else [*dict.fromkeys(windowed)]
    return {
        "sliding_window": min(size, _WINDOW),
        "window_attn_skip_freq": None
        if kinds is None
        else [kinds[layer % len(kinds)] for layer in range(layers)],
    }


def _hybrid(model: ModelConfig, pattern: str, layers: int) -> Tree:
    """Return the kinds of layers in the order in which the pattern first has them, again and again."""
    kinds = [*dict.fromkeys(pattern)]
    sizes: Tree = {"hybrid_layer_pattern": "".join(kinds[layer % len(kinds)] for layer in range(layers))}
    if model.has_mamba:
        groups = min(2, model.mamba_num_groups)
        sizes |= {"mamba_num_heads": _HEADS, "mamba_head_dim": _HEAD}
        sizes |= {"mamba_state_dim": _HEAD, "mamba_num_groups": groups}
    return sizes


def _own_heads(model: ModelConfig) -> int | None:
    """Heads that are not a share of the hidden size stay so."""
    if model.kv_channels is None:
        return None
    shares = model.kv_channels * model.num_attention_heads == model.hidden_size
    return _HEAD if shares else 2 * _HEAD


def _records(config: RunConfig, folder: Path) -> Tree:
    """Write all of it into the folder, and nothing anywhere else; a checkpoint after each step."""
    quiet = ("wandb_enabled", "mlflow_enabled", "tensorboard_enabled")
    return {
        **{f"logger.{key}": False for key in quiet},
        "logger.log_dir": str(folder / "run"),
        "logger.num_val_samples_to_print": 0,
        "logger.html_report_enabled": False,
        "checkpointing": {
            "enabled": True,
            "checkpoint_dir": str(folder / "run/checkpoints"),
            "save_period": 1,
        },
    }


def rollout_steps(config: RunConfig) -> int:
    """Return the optimizer steps of one pass over a rollout; 1 where there is none."""
    if not isinstance(config.loop, RolloutConfig):
        return 1
    return max(1, config.loop.samples_per_step // config.policy.train_global_batch_size)


_ROWS = 4
"""Of an optimizer step, on each data-parallel rank."""
_STEPS = 4
"""Optimizer steps of a rollout at most."""


def batch_keys(config: RunConfig, layout: Sharing, longest: int) -> Tree:
    """Return the keys of batches; longest: tokens of a row."""
    policy, loop = config.policy, config.loop
    keys: Tree = {
        "policy.train_micro_batch_size": min(2, policy.train_micro_batch_size),
        "policy.logprob_batch_size": min(2, policy.logprob_batch_size),
        "policy.generation_batch_size": policy.generation_batch_size and min(4, policy.generation_batch_size),
    }
    if value := getattr(config, "value", None):
        keys["value.train_micro_batch_size"] = value.train_micro_batch_size and min(
            2, value.train_micro_batch_size
        )
    keys |= _budgets(config, longest)
    if isinstance(loop, RolloutConfig):
        return keys | _of_rollouts(config, loop, layout)
    answers = getattr(loop, "num_generations_per_prompt", None)
    more: Tree = {"policy.train_global_batch_size": _ROWS * layout.data}
    if answers:
        more[f"{config.algorithm}.num_generations_per_prompt"] = min(4, answers)
    return keys | more | _asynchrony(config, _ROWS * layout.data)


def _of_rollouts(config: RunConfig, loop: RolloutConfig, layout: Sharing) -> Tree:
    steps = max(1, loop.samples_per_step // config.policy.train_global_batch_size)
    steps = steps if steps <= _STEPS else 2
    answers = next(size for size in (4, 2, 1) if loop.num_generations_per_prompt >= size)
    prompts = steps * layout.data * (_ROWS // answers)
    streams = config.streams and prompts == 1
    prompts *= 2 if streams else 1
    keys: Tree = {
        f"{config.algorithm}.num_prompts_per_step": prompts,
        f"{config.algorithm}.num_generations_per_prompt": answers,
        "policy.train_global_batch_size": prompts * answers // steps,
    }
    if loop.use_dynamic_sampling:
        keys[f"{config.algorithm}.batch_multiplier"] = float(round(max(1.0, loop.batch_multiplier)))
    return keys | _asynchrony(config, prompts)


def _asynchrony(config: RunConfig, prompts: int) -> Tree:
    section = config.asynchrony
    if not section.enabled:
        return {}
    keys: Tree = {
        "min_groups_for_streaming_train": max(1, prompts // 2) if config.streams else None,
        "max_inflight_prompts": section.max_inflight_prompts and min(prompts, section.max_inflight_prompts),
        "max_trajectory_age_steps": min(2, section.max_trajectory_age_steps),
    }
    return {f"{config.asynchrony_key}.{key}": value for key, value in keys.items()}


def _budgets(config: RunConfig, longest: int) -> Tree:
    """Scale token budgets with the longest row; they hold two at least, which may be a pair."""
    policy, keys = config.policy, Tree()
    for name in ("sequence_packing", "dynamic_batching"):
        section = getattr(policy, name)
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            given = getattr(section, key)
            rows = given and given // policy.max_total_sequence_length
            keys[f"policy.{name}.{key}"] = given and longest * max(2, min(4, rows))
        keys[f"policy.{name}.sequence_length_round"] = min(16, section.sequence_length_round)
    return keys


_NEW = 8
"""Tokens of a response."""
_AROUND = 96
"""Tokens that a chat template writes, at most."""
_OBSERVED = 16
"""Tokens of what an environment says between two turns."""
_TURNS = 3
_LONGEST_OWN = 512
"""Tokens of a row of the recipe's own data, which is left out where it is longer."""


def length_keys(config: RunConfig) -> Tree:
    """Return the keys of lengths."""
    keys: Tree = {
        "policy.max_total_sequence_length": _total(config),
        "policy.generation.max_new_tokens": min(_NEW, config.policy.generation.max_new_tokens),
    }
    if config.data.max_input_seq_length is not None and not config.data.embedded:
        keys["data.max_input_seq_length"] = None
    if config.data.from_files:
        keys["data.overlong"] = "drop"
    if isinstance(config.loop, RolloutConfig) and config.loop.reward_shaping.max_response_length:
        shaping = f"{config.algorithm}.reward_shaping"
        keys |= {f"{shaping}.max_response_length": _NEW, f"{shaping}.overlong_buffer_length": _NEW // 2}
    return keys


def _total(config: RunConfig) -> int:
    policy = config.policy
    turns = min(_TURNS, config.max_rollout_turns)
    response = turns * (_NEW + _OBSERVED) if turns > 1 else _NEW
    if config.data.from_files and all(map(is_here, config.train_sources.values())):
        own = min(_LONGEST_OWN, policy.max_total_sequence_length)
        return _rounded(own)
    prompt = config.data.prompt_length if config.data.embedded else LONGEST
    answers = LONGEST if config.row_kind is not RowKind.PROMPTS else 0
    return _rounded(prompt + answers + _texts(config) + response)


def _rounded(tokens: int) -> int:
    return -(-tokens // 64) * 64


def _texts(config: RunConfig) -> int:
    """Return how many tokens stand around a prompt at most: no character of a text is more than two."""
    data = config.data
    shown: list[SourceDefaults] = [*config.train_sources.values(), *config.validation_sources.values()]
    if data.default is not None:
        shown.append(data.default)
    around = max((sum(2 * size for size in _sizes(one)) for one in shown), default=0)
    return around + (_AROUND if data.apply_chat_template else 0)


def _sizes(source: SourceDefaults) -> Iterator[int]:
    for name in (source.prompt_file, source.system_prompt_file):
        if name is not None and Path(name).is_file():
            yield len(Path(name).read_text(encoding="utf-8"))
