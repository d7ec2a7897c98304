"""From a recipe to one of the same run that fits on a laptop, with every key that changed.

What the recipe shares among ranks is shared in one of its layouts on a few ranks, among two each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import cast

from nemo_rl_mcore.config.algorithm import GivenRowsConfig, RolloutConfig
from nemo_rl_mcore.config.base import CHAR_TOKENIZER, Tree, join_path
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.driver.run_folder import shown_value
from nemo_rl_mcore.recipe.rules.model import OF_ENGINE
from nemo_rl_mcore.recipe.shipped import SHIPPED
from nemo_rl_mcore.tools.migrate.draft import put
from nemo_rl_mcore.tools.rehearse.data import LONGEST, data_keys, is_here

STEPS = 2
"""Of a rehearsal: one before the save that it resumes from, and one after it."""
TOKENIZER = SHIPPED / "quickstart/tokenizer"
"""Takes the place of one that is not on this machine."""
TEACHER = "teacher"
"""Folder of a made teacher's weights."""
RANKS = (4, 8)
"""Numbers of ranks that a rehearsal may have."""


# Layouts


@dataclass(frozen=True)
class Sharing:
    """Ranks, and how many of them share what; 1 where nobody does. virtual: chunks of a pipeline stage, or None."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    virtual: int | None = None

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        sizes = {"DP": self.data, "TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual or 1}
        sizes |= {"CP": self.context, "EP": self.expert}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] + ["SP"] * self.sequence
        return " ".join(words) or "one rank"

    @property
    def keys(self) -> dict[str, object]:
        return {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.sequence,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": 1,
        }


def layouts_of(config: RunConfig, ranks: int) -> list[Sharing]:
    """Return as few layouts of so many ranks as in which everything that the recipe shares is shared by two.

    Copies of the model, where the recipe has several, take the places that are left.
    """
    megatron = config.policy.megatron_cfg
    sizes = {
        "tensor": megatron.tensor_model_parallel_size,
        "pipeline": megatron.pipeline_model_parallel_size,
        "context": megatron.context_parallel_size,
    }
    left = [name for name, size in sizes.items() if size > 1]
    experts = megatron.expert_model_parallel_size > 1
    found: list[Sharing] = []
    while left or experts or not found:
        fits = left[: ranks.bit_length() - 1]
        left = left[len(fits) :]
        room = ranks // 2 ** len(fits)
        # Copies share experts where nothing else does.
        several = config.data_parallel_size > 1 or (experts and fits in ([], ["pipeline"]))
        data = 2 if room > 1 and several else 1
        in_a_stage = data * 2 ** len([name for name in fits if name != "pipeline"])
        here = experts and in_a_stage > 1
        experts = experts and not here
        virtual = "pipeline" in fits and (megatron.virtual_pipeline_model_parallel_size or 1) > 1
        found.append(
            Sharing(
                data=data,
                **dict.fromkeys(fits, 2),
                expert=2 if here else 1,
                sequence=megatron.sequence_parallel and "tensor" in fits,
                virtual=2 if virtual else None,
            )
        )
    return found


# The recipe


@dataclass(frozen=True)
class Small:
    """A shrunk recipe: its tree, and why keys are not those of the recipe, by their path."""

    tree: Tree
    why: dict[str, str] = field(default_factory=dict[str, str])


def shrunk(config: RunConfig, layouts: list[Sharing], number: int, folder: Path) -> Small:
    """Return the recipe in one of its layouts; folder: for its files, those of made rows among them."""
    layout, small = layouts[number], Small(copy.deepcopy(config.plain()))
    place, lengths = _place_keys(config, layout), length_keys(config)
    longest = cast("int", lengths["policy.max_total_sequence_length"])
    changes = place | _engine_keys(config) | lengths | batch_keys(config, layout, longest)
    changes |= _loop_keys(config, folder) | data_keys(config, folder)
    weights: Tree = {"model_name": None, "hf_config_overrides": None, "init_checkpoint": None}
    changes |= {f"policy.{key}": value for key, value in weights.items()}
    changes["policy.megatron_cfg.peft.pretrained_adapter"] = None
    changes["policy.model"] = _small_model(config, layouts, longest)
    if not _has_tokenizer(config):
        changes["policy.tokenizer.name"] = str(TOKENIZER)
    if config.models.get("teacher") is not None:
        changes |= {f"teacher.{key}": value for key, value in weights.items()}
        changes |= {"teacher.model": None, "teacher.model_name": str(folder / TEACHER)}
    small.why.update(
        {f"policy.megatron_cfg.{key}": f"{layout}, on {layout.ranks} ranks" for key in layout.keys}
    )
    small.why["policy.generation.stop_token_ids"] = "answers of random weights would not end, and be left out"
    if config.env.nemo_gym is not None:
        changes |= {"env.nemo_gym": None, "env.endpoint": None, f"{config.algorithm}.max_rollout_turns": 1}
        small.why["env.nemo_gym"] = "NeMo Gym's servers are not started: each sample is one answer"
    if config.env.nemo_gym is not None or config.env.math is not None:
        changes |= {
            "env.math": None,
            "env.rewards": {"variety": "nemo_rl_mcore.tools.rehearse.data:variety"},
        }
        small.why["env.rewards"] = "answers of random weights earn nothing else, and nothing would be trained"
    for path, value in changes.items():
        put(small.tree, path, value)
    return small


def _place_keys(config: RunConfig, layout: Sharing) -> Tree:
    """Have what needs a GPU, or says the same twice, as a CPU can have it; float32 is what can be compared."""
    megatron = config.policy.megatron_cfg
    # Of pipeline stages with layers of their own the first has one, the last two.
    own = megatron.own_stages if layout.pipeline > 1 else {}
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    parts, chunk = megatron.recompute_modules, megatron.fused_linear_logprobs_chunk_size
    keys: Tree = {
        **layout.keys,
        first: 1 if first in own else None,
        last: 2 if last in own else None,
        "transformer_impl": "auto",
        "overlap_moe_expert_parallel_comm": False,
        "recompute_modules": None if parts is None else [part for part in parts if part not in OF_ENGINE],
    }
    if chunk is not None:
        keys["fused_linear_logprobs_chunk_size"] = min(chunk, 16)
    return {
        "cluster.num_nodes": 1,
        "cluster.gpus_per_node": 0,
        "cluster.cpu_workers_per_node": layout.ranks,
        "cluster.max_trainer_restarts": 0,
        "policy.precision": "float32",
        "policy.offload": "none",
        **{f"policy.megatron_cfg.{key}": value for key, value in keys.items()},
    }


def _engine_keys(config: RunConfig) -> Tree:
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
        keys["engines"] = min(2, engines_of(config))
    if not _has_tokenizer(config):
        keys["stop_token_ids"] = _ENDS if getattr(config.loop, "overlong_filtering", False) else None
    if generation.top_k is not None:
        keys["top_k"] = min(generation.top_k, 8)
    return {f"policy.generation.{key}": value for key, value in keys.items()}


def engines_of(config: RunConfig) -> int:
    generation, cluster = config.policy.generation, config.cluster
    if generation.backend == "embedded" or cluster.on_cpu:
        return generation.engines
    beside, gpus = generation.colocated.resources, cluster.world_size
    if not generation.colocated.enabled:
        gpus = (beside.gpus_per_node or cluster.gpus_per_node) * (beside.num_nodes or 1)
    return max(1, gpus // generation.vllm_cfg.processes)


def _loop_keys(config: RunConfig, folder: Path) -> Tree:
    """Have two steps, and after them a validation where the recipe has any; write into the folder alone."""
    loop = config.loop
    keys: Tree = {"max_num_steps": STEPS, "val_period": STEPS if loop.validates else 0}
    keys |= {"val_at_start": False, "val_at_end": False, "val_batch_size": min(4, loop.val_batch_size)}
    keys["max_val_samples"] = 4 if loop.max_val_samples is None else min(4, loop.max_val_samples)
    if isinstance(loop, GivenRowsConfig):
        keys |= {"val_batches": 1, "val_global_batch_size": 4}
    for key, most in (
        ("val_num_generations_per_prompt", 2),
        ("max_rollout_turns", 3),
        ("ppo_epochs", 2),
        ("critic_warmup_steps", 0),
        ("topk_logits_k", 8),
    ):
        if (given := getattr(loop, key, None)) is not None:
            keys[key] = min(most, given)
    checkpoints: Tree = {"enabled": True, "checkpoint_dir": str(folder / "run/checkpoints"), "save_period": 1}
    return {f"{config.algorithm}.{key}": value for key, value in keys.items()} | {
        "eval": None,
        "logger.wandb_enabled": False,
        "logger.mlflow_enabled": False,
        "logger.tensorboard_enabled": False,
        "logger.log_dir": str(folder / "run"),
        "logger.num_val_samples_to_print": 0,
        "checkpointing": checkpoints,
    }


# Models

_VOCABULARY = 384
"""Rows of the embedding for our tokenizer; divisible by what may share it."""
_ENDS = [*range(0, _VOCABULARY, 4)]
"""Tokens that end an answer where a recipe leaves out those that do not end, as nearly all of random weights."""
_HEADS, _HEAD = 4, 8
_EXPERTS = 4
_WINDOW = 3


def _has_tokenizer(config: RunConfig) -> bool:
    name = config.policy.tokenizer.name
    return name == CHAR_TOKENIZER or Path(name).is_dir()


def _small_model(config: RunConfig, layouts: list[Sharing], longest: int) -> Tree:
    """Return the same architecture in small: what it has it keeps, at another size.

    Of layers it has the fewest, two at least, that every one of the layouts divides; of a hybrid one of each kind.
    """
    model, megatron = config.policy.model, config.policy.megatron_cfg
    pattern, windowed = model.hybrid_layer_pattern, model.window_attn_skip_freq
    chunks = max(layout.pipeline * (layout.virtual or 1) for layout in layouts)
    fewest = max(2, len({*(pattern or "")}), chunks)
    layers = 3 if megatron.own_stages else -(-fewest // chunks) * chunks
    own_heads = _HEAD  # heads that are not a share of the hidden size stay so
    if (model.kv_channels or 0) * model.num_attention_heads != model.hidden_size:
        own_heads = 2 * _HEAD
    sizes: Tree = {
        "num_layers": layers,
        "hidden_size": _HEADS * _HEAD,
        "num_attention_heads": _HEADS,
        "num_query_groups": 2 if model.query_groups < model.num_attention_heads else None,
        "kv_channels": model.kv_channels and own_heads,
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
    if model.sliding_window is not None:  # shorter than answers, in the same turns with layers without
        turns = None if windowed is None else _in_turns(windowed, layers)
        sizes |= {"sliding_window": min(model.sliding_window, _WINDOW), "window_attn_skip_freq": turns}
    if pattern is not None:
        sizes["hybrid_layer_pattern"] = "".join(_in_turns(pattern, layers))
    if pattern is not None and model.has_mamba:
        sizes |= {"mamba_num_heads": _HEADS, "mamba_head_dim": _HEAD, "mamba_state_dim": _HEAD}
        sizes["mamba_num_groups"] = min(2, model.mamba_num_groups)
    return model.model_dump(mode="json") | sizes


def _in_turns[Kind](kinds: Iterable[Kind], layers: int) -> list[Kind]:
    """Return the kinds of layers in the order in which they first come, again and again."""
    return [*islice(cycle(dict.fromkeys(kinds)), layers)]


# Batches and lengths

_ROWS = 4
"""Of an optimizer step, on each data-parallel rank."""
_STEPS = 4
"""Optimizer steps of a rollout at most."""


def rollout_steps(config: RunConfig) -> int:
    """Return the optimizer steps of one pass over a rollout; 1 where there is none."""
    if not isinstance(config.loop, RolloutConfig):
        return 1
    return max(1, config.loop.samples_per_step // config.policy.train_global_batch_size)


def batch_keys(config: RunConfig, layout: Sharing, longest: int) -> Tree:
    """Return the keys of batches; longest: tokens of a row. Token budgets hold two rows at least, maybe a pair."""
    policy, loop, value = config.policy, config.loop, getattr(config, "value", None)
    keys: Tree = {
        "policy.train_micro_batch_size": min(2, policy.train_micro_batch_size),
        "policy.logprob_batch_size": min(2, policy.logprob_batch_size),
        "policy.generation_batch_size": policy.generation_batch_size and min(4, policy.generation_batch_size),
    }
    if value:
        own = value.train_micro_batch_size
        keys["value.train_micro_batch_size"] = own and min(2, own)
    for name in ("sequence_packing", "dynamic_batching"):
        section = getattr(policy, name)
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            given = getattr(section, key)
            rows = given and given // policy.max_total_sequence_length
            keys[f"policy.{name}.{key}"] = given and longest * max(2, min(4, rows))
    prompts = batch = _ROWS * layout.data
    answers = getattr(loop, "num_generations_per_prompt", None)
    answers = answers and min(4, answers)
    if isinstance(loop, RolloutConfig):
        steps = rollout_steps(config)
        steps = steps if steps <= _STEPS else 2
        answers = next(size for size in (4, 2, 1) if loop.num_generations_per_prompt >= size)
        prompts = steps * layout.data * (_ROWS // answers)
        prompts *= 2 if config.streams and prompts == 1 else 1
        batch = prompts * answers // steps
        keys[f"{config.algorithm}.num_prompts_per_step"] = prompts
        if loop.use_dynamic_sampling:
            multiplier = float(round(max(1.0, loop.batch_multiplier)))
            keys[f"{config.algorithm}.batch_multiplier"] = multiplier
    keys["policy.train_global_batch_size"] = batch
    if answers:
        keys[f"{config.algorithm}.num_generations_per_prompt"] = answers
    if (asynchrony := config.asynchrony).enabled:
        path, most = config.asynchrony_key, asynchrony.max_inflight_prompts
        streamed = max(1, prompts // 2) if config.streams else None
        keys[f"{path}.min_groups_for_streaming_train"] = streamed
        keys[f"{path}.max_inflight_prompts"] = most and min(prompts, most)
        keys[f"{path}.max_trajectory_age_steps"] = min(2, asynchrony.max_trajectory_age_steps)
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
    data, policy = config.data, config.policy
    if data.from_files and all(map(is_here, config.train_sources.values())):
        total = min(_LONGEST_OWN, policy.max_total_sequence_length)
    else:
        turns = min(_TURNS, config.max_rollout_turns)
        total = turns * (_NEW + _OBSERVED) if turns > 1 else _NEW
        total += data.prompt_length if data.embedded else LONGEST
        total += LONGEST if config.row_kind is not RowKind.PROMPTS else 0
        total += _AROUND if data.apply_chat_template else 0
        shown: list[SourceDefaults] = [*config.train_sources.values(), *config.validation_sources.values()]
        around = 0  # a prompt, of one source: no character of a text is more than two tokens
        for source in [*shown, *filter(None, [data.default])]:
            names = filter(None, (source.prompt_file, source.system_prompt_file))
            texts = [Path(name).read_text(encoding="utf-8") for name in names if Path(name).is_file()]
            around = max(around, sum(2 * len(text) for text in texts))
        total += around
    keys: Tree = {
        "policy.max_total_sequence_length": -(-total // 64) * 64,
        "policy.generation.max_new_tokens": min(_NEW, policy.generation.max_new_tokens),
    }
    if data.max_input_seq_length is not None and not data.embedded:
        keys["data.max_input_seq_length"] = None
    if data.from_files:
        keys["data.overlong"] = "drop"
    if isinstance(config.loop, RolloutConfig) and config.loop.reward_shaping.max_response_length:
        shaping = f"{config.algorithm}.reward_shaping"
        keys |= {f"{shaping}.max_response_length": _NEW, f"{shaping}.overlong_buffer_length": _NEW // 2}
    return keys


# What changed


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


def shrinks(config: RunConfig, small: RunConfig, why: Mapping[str, str]) -> list[Shrink]:
    """Return every key of the recipe that has another value, but for folders; a section that is left out is one.

    why: what is said of keys, or of the sections around them.
    """
    found: list[Shrink] = []
    for one in sorted(_changed(config.plain(), small.plain(), ""), key=lambda one: one.path):
        if not one.path.startswith(("logger.", "checkpointing.")):
            said = [key for key in why if f"{one.path}.".startswith(f"{key}.")]
            found.append(replace(one, why=why[max(said, key=len)] if said else ""))
    return found


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
