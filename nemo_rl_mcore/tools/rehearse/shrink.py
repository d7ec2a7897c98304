"""Shrinks a recipe to a run of the same kind that fits on a laptop, and lists the keys that change.

Each parallel dimension that the recipe uses has size two in one of the layouts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import cast

import yaml

from nemo_rl_mcore.config.algorithm import GivenRowsConfig, RolloutConfig
from nemo_rl_mcore.config.base import CHAR_TOKENIZER, Tree, join_path, value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.environment import AnswerConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig, SourceDefaults
from nemo_rl_mcore.driver.run_folder import shown_value
from nemo_rl_mcore.recipe.rules.model import OF_ENGINE
from nemo_rl_mcore.recipe.shipped import SHIPPED
from nemo_rl_mcore.tools.migrate.draft import put

STEPS = 2
"""Steps of a rehearsal: one before the checkpoint that it resumes from, one after."""
TOKENIZER = SHIPPED / "quickstart/tokenizer"
"""Replaces a tokenizer that is not on this machine."""
TEACHER = "teacher"
"""Folder of the teacher's random weights."""
RANKS = (4, 8)
"""Allowed numbers of ranks."""


# Layouts


@dataclass(frozen=True)
class Sharing:
    """A layout: the size of each parallel dimension. virtual: chunks of a pipeline stage, or None."""

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
    """Return the fewest layouts on `ranks` ranks in which each parallel dimension of the recipe has size two.

    Data parallelism, if the recipe has it, takes the ranks that are left.
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
        # Data-parallel ranks share experts if no other ranks can.
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
    """A shrunk recipe; why: reasons for changed keys, by path."""

    tree: Tree
    why: dict[str, str] = field(default_factory=dict[str, str])


_ALWAYS: Tree = yaml.safe_load(Path(__file__).with_name("small.yaml").read_text(encoding="utf-8"))


def shrunk(config: RunConfig, layouts: list[Sharing], number: int, folder: Path) -> Small:
    """Return the recipe in one of its layouts; folder: for its files, including synthetic rows."""
    layout, small = layouts[number], Small(copy.deepcopy(config.plain()))
    lengths = length_keys(config)
    longest = cast("int", lengths["policy.max_total_sequence_length"])
    changes = _ALWAYS | layout_keys(config, layout) | lengths | batch_keys(config, layout, longest)
    changes |= loop_keys(config) | data_keys(config, folder)
    tokenizer = config.policy.tokenizer.name
    own_tokenizer = tokenizer == CHAR_TOKENIZER or Path(tokenizer).is_dir()
    vocabulary = config.policy.model.vocab_size if own_tokenizer else _VOCABULARY
    changes["policy.model"] = _small_model(config, layouts, longest, vocabulary)
    changes["logger.log_dir"] = str(folder / "run")
    saving = {"enabled": True, "checkpoint_dir": str(folder / "run/checkpoints"), "save_period": 1}
    changes |= {"checkpointing": saving, "policy.megatron_cfg.peft.pretrained_adapter": None}
    if not own_tokenizer:
        changes["policy.tokenizer.name"] = str(TOKENIZER)
        filtered = getattr(config.loop, "overlong_filtering", False)
        changes["policy.generation.stop_token_ids"] = _ENDS if filtered else None
    if config.models.get("teacher") is not None:
        left_out = ("model", "hf_config_overrides", "init_checkpoint")
        changes |= {f"teacher.{key}": None for key in left_out}
        changes["teacher.model_name"] = str(folder / TEACHER)
    small.why.update(
        {f"policy.megatron_cfg.{key}": f"{layout}, on {layout.ranks} ranks" for key in layout.keys}
    )
    small.why["policy.generation.stop_token_ids"] = (
        "a random model's answers would not end, and would be left out"
    )
    if config.env.nemo_gym is not None:
        changes |= {"env.nemo_gym": None, "env.endpoint": None, f"{config.algorithm}.max_rollout_turns": 1}
        small.why["env.nemo_gym"] = "NeMo Gym's servers do not start: each sample is one answer"
    if config.env.nemo_gym is not None or config.env.math is not None:
        rewards = {"variety": "nemo_rl_mcore.tools.rehearse.shrink:variety"}
        changes |= {"env.math": None, "env.rewards": rewards}
        small.why["env.rewards"] = "a random model would earn no reward, and nothing would be trained"
    for path, value in changes.items():
        put(small.tree, path, copy.deepcopy(value))
    return small


def layout_keys(config: RunConfig, layout: Sharing) -> Tree:
    """Return the layout's keys; separate engines stay as many as there were, but at most two."""
    megatron, generation = config.policy.megatron_cfg, config.policy.generation
    # Where the recipe sets the layers of the first and last stage, they have one and two.
    own = megatron.own_stages if layout.pipeline > 1 else {}
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    parts, chunk = megatron.recompute_modules, megatron.fused_linear_logprobs_chunk_size
    keys: Tree = {**layout.keys, first: 1 if first in own else None, last: 2 if last in own else None}
    keys["recompute_modules"] = None if parts is None else [part for part in parts if part not in OF_ENGINE]
    if chunk is not None:
        keys["fused_linear_logprobs_chunk_size"] = min(chunk, 16)
    found: Tree = {f"policy.megatron_cfg.{key}": value for key, value in keys.items()}
    found["cluster.cpu_workers_per_node"] = layout.ranks
    found["policy.generation.colocated"] = {"enabled": generation.decodes_on_ranks}
    if not generation.decodes_on_ranks:
        found["policy.generation.engines"] = min(2, engines_of(config))
    if generation.top_k is not None:
        found["policy.generation.top_k"] = min(generation.top_k, 8)
    return found


def engines_of(config: RunConfig) -> int:
    generation, cluster = config.policy.generation, config.cluster
    if generation.backend == "embedded" or cluster.on_cpu:
        return generation.engines
    beside, gpus = generation.colocated.resources, cluster.world_size
    if not generation.colocated.enabled:
        gpus = (beside.gpus_per_node or cluster.gpus_per_node) * (beside.num_nodes or 1)
    return max(1, gpus // generation.vllm_cfg.processes)


_AT_MOST = {
    "val_num_generations_per_prompt": 2,
    "max_rollout_turns": 3,
    "ppo_epochs": 2,
    "critic_warmup_steps": 0,
    "topk_logits_k": 8,
}


def loop_keys(config: RunConfig) -> Tree:
    """Return the loop's keys: two steps, then a validation if the recipe has any."""
    loop = config.loop
    keys: Tree = {"max_num_steps": STEPS, "val_period": STEPS if loop.validates else 0}
    keys |= {"val_at_start": False, "val_at_end": False, "val_batch_size": min(4, loop.val_batch_size)}
    keys["max_val_samples"] = 4 if loop.max_val_samples is None else min(4, loop.max_val_samples)
    if isinstance(loop, GivenRowsConfig):
        keys |= {"val_batches": 1, "val_global_batch_size": 4}
    for key, most in _AT_MOST.items():
        if (given := getattr(loop, key, None)) is not None:
            keys[key] = min(most, given)
    return {f"{config.algorithm}.{key}": value for key, value in keys.items()}


# Models

_VOCABULARY = 384
"""Vocabulary of our tokenizer, padded to a multiple of the ranks that may share it."""
_ENDS = [*range(0, _VOCABULARY, 4)]
"""Tokens that end an answer, for recipes that filter unfinished ones: nearly all of a random model's would be."""
_HEADS, _HEAD = 4, 8
_EXPERTS = 4
_WINDOW = 3


def _query_groups(policy: PolicyConfig) -> int | None:
    """Return one group where tensor-parallel ranks share groups, two where heads do, None for one per head."""
    if policy.megatron_cfg.tensor_model_parallel_size > policy.model.shape.query_groups:
        return 1
    return 2 if policy.model.shape.query_groups < policy.model.num_attention_heads else None


def _small_model(config: RunConfig, layouts: list[Sharing], longest: int, vocabulary: int) -> Tree:
    """Return the same architecture with other sizes.

    It has the fewest layers, at least two, that every layout divides; a hybrid has at least one of each kind.
    """
    model, megatron = config.policy.model, config.policy.megatron_cfg
    pattern = model.hybrid_layer_pattern
    chunks = max(layout.pipeline * (layout.virtual or 1) for layout in layouts)
    fewest = max(2, len({*(pattern or "")}), chunks)
    layers = 3 if megatron.own_stages else -(-fewest // chunks) * chunks
    # Heads whose widths do not add up to the hidden size must not do so here either.
    are_share = (model.kv_channels or 0) * model.num_attention_heads == model.hidden_size
    own_heads = _HEAD if are_share else 2 * _HEAD
    sizes: Tree = {
        "num_layers": layers,
        "hidden_size": _HEADS * _HEAD,
        "num_attention_heads": _HEADS,
        "num_query_groups": _query_groups(config.policy),
        "kv_channels": model.kv_channels and own_heads,
        "ffn_hidden_size": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        "init_method_std": 0.1,
    }
    if model.num_moe_experts is not None:
        sizes |= {"num_moe_experts": _EXPERTS, "moe_router_topk": min(2, model.moe_router_topk)}
        sizes |= {"moe_ffn_hidden_size": 32, "moe_latent_size": model.moe_latent_size and _HEAD}
        shared = "moe_shared_expert_intermediate_size"
        sizes[shared] = model.moe_shared_expert_intermediate_size and 32
    if model.moe_layer_freq is not None:
        sizes["moe_layer_freq"] = [0] + [1] * (layers - 1)
    if model.moe_router_num_groups is not None:
        sizes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    if model.kv_lora_rank is not None:
        sizes |= {"num_query_groups": None, "kv_channels": None, "kv_lora_rank": 2 * _HEAD}
        sizes |= {"q_lora_rank": model.q_lora_rank and 3 * _HEAD, "qk_head_dim": _HEAD, "v_head_dim": _HEAD}
        sizes["qk_pos_emb_head_dim"] = _HEAD // 2
    if model.mtp_num_layers:
        sizes["mtp_num_layers"] = 1
    if model.linear_attention_freq is not None:  # a layer of each kind
        sizes |= {"linear_attention_freq": 2, "linear_num_key_heads": _HEADS}
        sizes |= {
            "linear_num_value_heads": _HEADS
            * min(2, model.linear_num_value_heads // model.linear_num_key_heads)
        }
        sizes |= {"linear_key_head_dim": _HEAD, "linear_value_head_dim": _HEAD}
    if model.sliding_window is not None:  # shorter than answers
        sizes["sliding_window"] = min(model.sliding_window, _WINDOW)
    if pattern is not None:
        sizes["hybrid_layer_pattern"] = "".join(islice(cycle(dict.fromkeys(pattern)), layers))
    if pattern is not None and model.shape.has_mamba:
        sizes |= {"mamba_num_heads": _HEADS, "mamba_head_dim": _HEAD, "mamba_state_dim": _HEAD}
        sizes["mamba_num_groups"] = min(2, model.mamba_num_groups)
    return model.model_dump(mode="json") | sizes


# Batches and lengths

_ROWS = 4
"""Rows of an optimizer step on each data-parallel rank."""
_STEPS = 4
"""Most optimizer steps of a rollout."""


def rollout_steps(config: RunConfig) -> int:
    """Return the optimizer steps of one pass over a rollout; 1 for a recipe without rollouts."""
    if not isinstance(config.loop, RolloutConfig):
        return 1
    return max(1, config.samples_per_step // config.policy.train_global_batch_size)


def batch_keys(config: RunConfig, layout: Sharing, longest: int) -> Tree:
    """Return the batch keys; longest: tokens of a row. Token budgets hold at least two rows, for a pair."""
    policy, loop, value = config.policy, config.loop, getattr(config, "value", None)
    micro, asked = policy.train_micro_batch_size, policy.generation_batch_size
    keys: Tree = {"policy.train_micro_batch_size": min(2, micro)}
    keys["policy.logprob_batch_size"] = min(2, policy.logprob_batch_size)
    keys["policy.generation_batch_size"] = asked and min(4, asked)
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
    given = getattr(loop, "num_generations_per_prompt", None)
    answers = given and min(4, given)
    if isinstance(loop, RolloutConfig):
        steps = rollout_steps(config)
        steps = steps if steps <= _STEPS else 2
        answers = next(size for size in (4, 2, 1) if loop.num_generations_per_prompt >= size)
        prompts = steps * layout.data * (_ROWS // answers)
        prompts *= 2 if config.streams and prompts == 1 else 1
        batch = prompts * answers // steps
        keys[f"{config.algorithm}.num_prompts_per_step"] = prompts
        if loop.use_dynamic_sampling:
            keys[f"{config.algorithm}.batch_multiplier"] = float(round(max(1.0, loop.batch_multiplier)))
    keys["policy.train_global_batch_size"] = batch
    if answers:
        keys[f"{config.algorithm}.num_generations_per_prompt"] = answers
    if (asynchrony := config.asynchrony).enabled:
        path, most = config.key("asynchrony"), asynchrony.max_inflight_prompts
        streamed = max(1, prompts // 2) if config.streams else None
        keys[f"{path}.min_groups_for_streaming_train"] = streamed
        keys[f"{path}.max_inflight_prompts"] = most and min(prompts, most)
        keys[f"{path}.max_trajectory_age_steps"] = min(2, asynchrony.max_trajectory_age_steps)
    return keys


_NEW = 8
"""Most tokens of a response."""
_AROUND = 96
"""Most tokens that a chat template adds."""
_OBSERVED = 16
"""Most tokens of an observation between two turns."""
_TURNS = 3
_LONGEST_OWN = 512
"""Most tokens of a row of the recipe's own data; longer rows are left out."""


def length_keys(config: RunConfig) -> Tree:
    data, policy = config.data, config.policy
    if data.dataset_name == "files" and all(map(is_here, config.train_sources.values())):
        total = min(_LONGEST_OWN, policy.max_total_sequence_length)
    else:
        turns = min(_TURNS, config.max_rollout_turns)
        total = turns * (_NEW + _OBSERVED) if turns > 1 else _NEW
        total += data.task.prompt_length if data.embedded else LONGEST
        total += LONGEST if config.row_kind is not RowKind.PROMPTS else 0
        total += _AROUND if data.apply_chat_template else 0
        shown: list[SourceDefaults] = [*config.train_sources.values(), *config.validation_sources.values()]
        around = 0  # tokens of the longest prompt text: at most two per character
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
    if data.dataset_name == "files":
        keys["data.overlong"] = "drop"
    if isinstance(config.loop, RolloutConfig) and config.loop.reward_shaping.max_response_length:
        shaping = f"{config.algorithm}.reward_shaping"
        keys |= {f"{shaping}.max_response_length": _NEW, f"{shaping}.overlong_buffer_length": _NEW // 2}
    return keys


# Data

ROWS = 64
"""Synthetic rows per source; all prompts differ."""
_HELD_OUT = 0.25
"""Least share of rows held out, if a source holds any out: enough for a batch."""
LONGEST = 24
"""Most characters of a synthetic prompt."""
_KEPT = (
    *("prompt_file", "system_prompt_file", "env_name", "input_key", "output_key", "columns", "answer"),
    *("chat_key", "tool_key", "prompt_key", "chosen_key", "rejected_key", "ties", "split_validation_size"),
    "weight",
)
"""Keys of a source that define how a row is read, not where it lies."""


def is_here(source: SourceConfig) -> bool:
    """Return True if all of a source's rows lie on this machine."""
    paths = [Path(path) for path in source.paths]
    found = (path.exists() or ("*" in path.name and any(path.parent.glob(path.name))) for path in paths)
    return bool(paths) and all(found)


def made_source(source: SourceConfig, kind: RowKind, file: Path, first: int = 0) -> Tree:
    """Write synthetic rows, and return a source section that reads them; first: number of the first row."""
    lines = list[str]()
    how = source.answer if isinstance(source.answer, AnswerConfig) else None
    columns = [source.output_key, source.answer if isinstance(source.answer, str) else None]
    for number in range(first, first + ROWS):
        asked, found = f"{number} + {number * 7 % 10} = ?", str(number + number * 7 % 10)
        row: Tree = dict.fromkeys(source.columns, f"{number}")
        if kind is RowKind.PAIRS:
            put(row, source.prompt_key, asked)
            put(row, source.chosen_key, found)
            put(row, source.rejected_key, f"no{'!' * (number % 3)}")
        else:
            put(row, source.input_key, asked)
            stated = f"So \\boxed{{{found}}}" if how is not None and how.boxed else found
            if how is not None and how.after is not None:
                stated = f"It is so. {how.after} {found}"
            for key in columns:
                if key is not None:
                    put(row, key, stated)
        lines.append(f"{json.dumps(row)}\n")
    file.write_text("".join(lines), encoding="utf-8")
    written = source.model_dump(mode="json")
    kept = {key: written[key] for key in _KEPT}
    if source.split_validation_size:
        kept["split_validation_size"] = max(_HELD_OUT, source.split_validation_size)
    if how is not None and how.regex is not None:
        kept["answer"] = None  # a synthetic answer needs no extraction
    return {**kept, "data_path": str(file)}


def variety(responses: Sequence[str]) -> list[float]:
    """Reward each response with a number between 0 and 1 that depends on all its characters."""
    return [sum(ord(character) % 7 for character in text) / (6 * max(1, len(text))) for text in responses]


def data_keys(config: RunConfig, folder: Path) -> Tree:
    """Return the data keys; synthetic rows are written into the folder."""
    if config.data.dataset_name != "files":
        return {}
    written, trained, validated = config.plain(), list[Tree](), list[Tree]()
    for path, source in (config.train_sources | config.validation_sources).items():
        trains = path in config.train_sources
        if is_here(source):
            section = dict(cast("Tree", value_at(written, path)))
        else:
            first = 0 if trains else ROWS
            section = made_source(source, config.row_kind, folder / f"{path}.jsonl", first)
        replaced = source.env_name in ("math", "nemo_gym")
        section |= {"repeat": min(2, source.repeat), "env_name": "rewards" if replaced else source.env_name}
        if not trains:
            section.pop("weight", None)
        (trained if trains else validated).append(section)
    return {
        "data.train": trained if isinstance(config.data.train, tuple) else trained[0],
        "data.validation": validated or None,
    }


# Changes


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
    """Return every key whose value changes, except folders; a section that is left out counts as one key.

    why: reasons by key or by section.
    """
    found: list[Shrink] = []

    def compare(before: Tree, after: Tree, prefix: str) -> None:
        for key in {**before, **after}:
            was, now, path = before.get(key), after.get(key), join_path(prefix, key)
            if isinstance(was, dict) and isinstance(now, dict):
                compare(cast("Tree", was), cast("Tree", now), path)
            elif was != now and not path.startswith(("logger.", "checkpointing.")):
                reasons = [key for key in why if f"{path}.".startswith(f"{key}.")]
                reason = why[max(reasons, key=len)] if reasons else ""
                found.append(Shrink(path, _shown(was), _shown(now), reason))

    compare(config.plain(), small.plain(), "")
    return sorted(found, key=lambda one: one.path)


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return "(a section)"
    return f"({len(cast('list[object]', value))} sections)" if isinstance(value, list) and value else value
