"""From a recipe to one of the same run that fits on a laptop, with every key that changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import CHAR_TOKENIZER, Tree, join_path
from nemo_rl_mcore.config.model import ModelConfig
from nemo_rl_mcore.config.offline import GivenRowsConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.driver.saved_run import shown_value
from nemo_rl_mcore.recipe.rules.kernels import OF_ENGINE
from nemo_rl_mcore.recipe.shipped import SHIPPED
from nemo_rl_mcore.tools.rehearse.batches import batch_keys
from nemo_rl_mcore.tools.rehearse.layouts import Layout, layers_of, stage_keys
from nemo_rl_mcore.tools.rehearse.lengths import length_keys
from nemo_rl_mcore.tools.rehearse.rows import data_keys

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


def shrunk(config: RunConfig, layouts: list[Layout], number: int, folder: Path) -> Small:
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
        put(small.tree, "env.rewards", {"variety": "nemo_rl_mcore.tools.rehearse.signal:variety"})
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
    config: RunConfig, layouts: list[Layout], layout: Layout, folder: Path
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


def _machine(config: RunConfig, layout: Layout) -> Tree:
    keys: Tree = {"num_nodes": 1, "gpus_per_node": 0, "cpu_workers_per_node": layout.ranks}
    keys |= {"max_trainer_restarts": 0, "elastic": "none"}
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
        "refit_bucket_bytes": None,
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
    return {f"{name}.{key}": value for key, value in keys.items()} | {"warm_start": None, "eval": None}


def _models(config: RunConfig, layers: int, longest: int, folder: Path) -> Iterator[Tree]:
    policy = config.policy
    weights: Tree = {"model_name": None, "hf_config_overrides": None, "init_checkpoint": None}
    yield {f"policy.{key}": value for key, value in weights.items()}
    yield {"policy.model": _model(policy.model, config, layers, longest)}
    if not _has_tokenizer(config):
        yield {"policy.tokenizer.name": str(TOKENIZER)}
    teacher = config.models.get("teacher")
    if teacher is not None:
        yield {f"teacher.{key}": value for key, value in weights.items()} | {"teacher.warm_start": None}
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
