"""The findings of `check` and `doctor`, and their layout in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from pathlib import Path

from pydantic import BaseModel
from rich.console import Group
from rich.text import Text

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import StrictModel, join_path
from nemo_rl_mcore.config.loss import DPOLossConfig
from nemo_rl_mcore.config.master import source_of_prev_logprobs
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.data.datasets import DigitTaskSource, Prompt
from nemo_rl_mcore.data.examples import read_texts
from nemo_rl_mcore.data.hub import local_folder
from nemo_rl_mcore.driver.output import visible
from nemo_rl_mcore.driver.run_folder import checkpoints_on_disk, leaves
from nemo_rl_mcore.errors import shortened, size_of
from nemo_rl_mcore.models.adapters import adapted_weights, count_adapters
from nemo_rl_mcore.models.memory import reference_place
from nemo_rl_mcore.recipe.interpolations import without_values
from nemo_rl_mcore.recipe.load import compute
from nemo_rl_mcore.recipe.rules.rollouts import remarks
from nemo_rl_mcore.recipe.sources import COMMAND_LINE, origins, read_recipe, taken_back
from nemo_rl_mcore.tools.check.data import FIRST_ROWS, ends_of, has_template
from nemo_rl_mcore.tools.check.plan import Plan

type _Pair = tuple[str, str]
"""A finding's name and text."""


class Status(StrEnum):
    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """A line about one subject.

    mend: the command that fixes it, or other advice. needed: no run works without it.
    """

    name: str
    found: str
    status: Status = Status.OK
    mend: str = ""
    needed: bool = False

    @property
    def stops(self) -> bool:
        return self.needed and self.status is not Status.OK


@dataclass(frozen=True)
class Section:
    title: str
    findings: Sequence[Finding]


_STYLES = {Status.MISSING: "yellow", Status.WRONG: "red", Status.UNKNOWN: "yellow"}


def render(sections: Iterable[Section]) -> Group:
    """Lay out sections; print them with soft_wrap, which breaks no key."""
    lines = list[Text]()
    for section in sections:
        lines.append(Text(section.title, style="bold"))
        width = max(22, *(len(finding.name) for finding in section.findings))
        for one in section.findings:
            line = Text(f"  {one.name:<{width}}  ")
            if one.status is not Status.OK:
                line.append(one.status, style=_STYLES[one.status]).append(": ")
            lines.append(line.append(one.found))
            if one.mend:
                lines.append(Text(f"  {'':<{width}}  mend: {one.mend}", style="bold" if one.needed else ""))
    return Group(*lines)


# A plan


def sections_of(plan: Plan, in_full: Iterable[Finding] = ()) -> Iterator[Section]:
    """Yield a plan's sections; in_full: the findings of `check --full`."""
    config, cluster = plan.config, plan.config.cluster
    megatron, data = config.policy.megatron_cfg, plan.data
    context, padding = megatron.context_parallel_size, ""
    if context > 1:
        more = (2 * context - 1) / 2  # if all lengths are equally likely
        padding = f", rows padded to multiples of {2 * context} tokens, on average by {more:g}"
    nodes = f"{cluster.num_nodes} node(s) x {cluster.workers_per_node}"
    copies = f"{cluster.world_size} / {megatron.model_parallel_size * context}"
    sequence = " with sequence parallelism" if megatron.sequence_parallel else ""
    layout = {
        "device": f"{'CPU (gloo)' if cluster.on_cpu else 'GPU (NCCL)'}, {plan.transformer_impl} layers",
        "ranks": f"{nodes} = {cluster.world_size}{', without Ray' if config.in_process else ''}",
        "tensor parallel": f"{megatron.tensor_model_parallel_size}{sequence}",
        "pipeline parallel": f"{megatron.pipeline_model_parallel_size}",
        "context parallel": f"{context}{padding}",
        "expert parallel": f"{megatron.expert_model_parallel_size}",
        "data parallel": f"{copies} = {config.data_parallel_size}",
        "generation": plan.engines.where,
    }
    run = list[_Pair]()
    if data is not None:
        steps = f"{data.rows} / {data.rows_per_step} = {data.rows / data.rows_per_step:g} steps"
        run.append(("rows", f"{data.rows} to train on, {data.held_out} held out"))
        run.append(("a pass over the rows", steps))
    if plan.fetched:
        run.append(("rows", f"{', '.join(plan.fetched)}: fetched and read when the run starts"))
    run += [
        ("steps", f"at most {plan.steps}" if plan.fetched else str(plan.steps)),
        ("reference policy", reference_place(config) or "none (its KL penalty is 0)"),
        ("log_dir", config.logger.log_dir),
        ("checkpoints", checkpoints_on_disk(config)),
        *(("not on this machine", str(problem)) for problem in plan.missing),
    ]
    fused = [("ok" if ok else "refused", setting) for setting, ok in plan.guardrails]
    if not megatron.use_fused_linear_logprobs:
        fused = [("use_fused_linear_logprobs", "off")]
    warnings = [(f"{number}.", str(one)) for number, one in enumerate(plan.warnings, start=1)]
    yield Section("What is trained", [*subject_of(plan)])
    for title, pairs in (
        ("Parallel layout", layout.items()),
        ("Batch arithmetic of a step", _batch(plan)),
        ("Asynchronous rollouts; a group is the answers to one prompt", _asynchronous(plan)),
        ("Run", run),
        ("Fused log-probabilities", fused),
        *_memory(plan),
    ):
        if there := [Finding(*pair) for pair in pairs]:
            yield Section(title, there)
    if found := [*in_full]:
        yield Section("Data, in full", found)
    if warnings:
        yield Section("Warnings", [Finding(*pair) for pair in warnings])


def subject_of(plan: Plan) -> Iterator[Finding]:
    """Yield models, data, environment, loss and optimizer; values from environment variables are not shown."""
    config = plan.config
    pairs = [("algorithm", f"{config.algorithm}{', asynchronous rollouts' if config.asynchronous else ''}")]
    for name, one in config.models.items():
        model, policy = one.policy.model, one.policy
        shape = f"{model.num_layers} layers x {model.hidden_size}, vocabulary {model.vocab_size}"
        weights = policy.init_checkpoint or policy.model_name or "random weights"
        pairs.append((name, f"{shape}, from {weights}"))
        if (peft := policy.megatron_cfg.peft).enabled:
            beside = len(adapted_weights(policy))
            pairs.append(("adapters", f"{beside}, of rank {peft.dim}: {count_adapters(policy):,} weights"))
    pairs.append(("tokenizer", config.policy.tokenizer.name))
    if ends := ends_of(config.policy):
        shown = ", ".join(f"{text!r} ({token})" for token, text in ends.items())
        pairs.append(("answers end with", shown))
    rows = plan.data.first if plan.data else ()
    for name, value in chain(pairs, _data(config, rows), _learning(config)):
        yield Finding(name, visible(without_values(value, config.references)))


def _data(config: RunConfig, rows: Sequence[Prompt]) -> Iterator[tuple[str, str]]:
    """Yield the sources, their first rows, and the use of a chat template."""
    data, tokenizer = config.data, config.policy.tokenizer
    if data.type is not None or data.dataset_name != "files":
        yield "data", data.type or str(data.dataset_name)
    for path, source in (config.train_sources | config.validation_sources).items():
        yield path, ", ".join(map(str, source.paths))
    if not rows and data.dataset_name != "files" and data.type is None:
        task = DigitTaskSource(data.dataset_name, data.num_digits, config.seed)
        texts, _ = read_texts(data.default or SourceDefaults())
        rows = [texts.shown(one, chat=data.apply_chat_template) for one in task.train_batch(1, FIRST_ROWS)]
    for number, row in enumerate(rows, start=1):
        shown = " ".join(f"[{message.role}] {message.content}" for message in row.context) or row.text
        parts = {"": shown, "answer ": row.solution or row.answer, "rejected ": row.rejected or ""}
        texts = (f"{name}{shortened(text, 100)!r}" for name, text in parts.items() if text or not name)
        yield f"row {number}", ", ".join(texts)
    if data.dataset_name != "files" or config.env.endpoint is not None:
        return  # embedded tasks and agents render prompts themselves
    folder = local_folder(tokenizer.name) if tokenizer.name != "char" else None
    whose = "policy.tokenizer.chat_template" if tokenizer.chat_template is not None else tokenizer.name
    if data.apply_chat_template:
        use = f"applied: {whose}"
    elif tokenizer.chat_template is not None or (folder is not None and has_template(folder)):
        use = f"not applied, although {whose} has one: set data.apply_chat_template: true"
    elif folder is not None or tokenizer.name == "char":
        use = "not applied: the tokenizer has none"
    else:
        use = "not applied: prompts are plain text"
    yield "chat template", use


def _learning(config: RunConfig) -> Iterator[tuple[str, str]]:
    env, turns = config.env, config.max_rollout_turns
    if config.generations_per_prompt or config.loop.validates:
        named = ["guess_number", "calculator", "math"]
        named = [name for name in named if getattr(env, name) is not None]
        named += [f"{name}: {path}" for name, path in (env.rewards or {}).items()]
        if env.custom is not None:
            named.append(env.custom.type or "")
        if env.endpoint is not None:
            of = ("NeMo Gym's",) if env.nemo_gym is not None else env.endpoint.command
            named.append(f"agents, {' '.join(of)}")
        yield (
            "environment",
            (", ".join(named) or "share of correct characters")
            + (f", up to {turns} turns" if turns > 1 else ""),
        )
    if isinstance(config.loop, DPOLossConfig):
        yield "loss", _keys(config.loop, only=DPOLossConfig)
    for path, loss in config.losses.items():
        yield path, _keys(loss)
    estimator = getattr(config.loop, "adv_estimator", None)
    if isinstance(estimator, StrictModel) and config.generations_per_prompt:
        yield "advantage", _keys(estimator, "name")
    for name, plan in config.models.items():
        if plan.trained:
            of = "" if name == "policy" else f" of the {name}"
            optimizer, schedule = plan.policy.megatron_cfg.optimizer, plan.policy.megatron_cfg.scheduler
            clipped = f"gradients clipped at {plan.policy.max_grad_norm:g}"
            yield f"optimizer{of}", f"AdamW, {_keys(optimizer, 'lr')}, {clipped}"
            yield f"schedule{of}", _keys(schedule, "lr_decay_style")


def _keys(section: BaseModel, *always: str, only: type[BaseModel] | None = None) -> str:
    """Return the keys that differ from their defaults, and `always`; only: a base class whose keys are shown."""
    shown = list[str]()
    for name, field in (only or type(section)).model_fields.items():
        value = getattr(section, name)
        if name in always or value != field.get_default(call_default_factory=True):
            shown.append(f"{name}: {value}")
    return ", ".join(shown) or "all keys at their defaults"


def _batch(plan: Plan) -> Iterator[_Pair]:
    config, batch, policy = plan.config, plan.batch, plan.config.policy
    answers = config.loop.num_generations_per_prompt if isinstance(config.loop, RolloutConfig) else 1
    yield "samples", f"{batch.samples // answers} prompts x {answers} answers = {batch.samples}"
    yield "samples per copy", f"{batch.samples} / {config.data_parallel_size} = {batch.samples_per_rank}"
    yield "optimizer steps", str(batch.optimizer_steps)
    each = f"{batch.microbatches_per_optimizer_step} per rank and optimizer step"
    passes = f"{batch.logprob_passes} per rank"
    if (budgets := policy.token_budgets) is not None:
        kind = f"tokens, samples {'packed' if budgets.packed else 'of similar length'}"
        each = f"up to {budgets.of_training(config.rows_per_sample)} {kind}"
        passes = f"up to {budgets.logprob} {kind}"
    yield "microbatches", each
    yield "log-probability passes", passes
    if (source := source_of_prev_logprobs(config)) is not None:
        yield "prev_logprobs", source
    if policy.router_replay.enabled:
        source = "the engines" if policy.engines_return_routes else "the pass for prev_logprobs"
        yield "routes", f"of {source}, {policy.model.route_bytes} bytes per token"
    prompt, new = config.max_prompt_length, policy.generation.max_new_tokens
    longest = policy.max_total_sequence_length
    whole = f"{prompt} prompt + {new} new <= {longest}"
    part = f"up to {prompt} prompt and up to {new} new, {longest} together"
    yield "tokens", whole if prompt + new <= longest else part


def _asynchronous(plan: Plan) -> Iterator[_Pair]:
    config, kept = plan.config, plan.asynchronous
    if kept is None:
        return
    age, groups, limits = config.max_age, config.prompts_per_step, config.group_limits
    live, least = limits.live, limits.per_chunk
    yield "age", f"at most {age} training step(s)"
    yield (
        "groups in flight",
        f"{age + 1} x {groups} = {live}, at most {limits.in_flight} of them being answered",
    )
    chunks = "the whole step" if least == groups else f"at least {least} of {groups} groups"
    yield "chunks of a step", chunks
    in_flight = config.asynchrony.in_flight_weight_updates
    yield "new weights", "within answers" if in_flight else "between answers"
    since = f"{kept.kept_groups} since a checkpoint + " if kept.kept_groups else ""
    yield "groups in the driver", f"{since}{live} in flight, at most {size_of(kept.driver_bytes)}"
    sizes = f"for a replay: {size_of(kept.step_bytes)} per step, at most {size_of(kept.disk_bytes)}"
    yield "groups on disk", sizes if kept.step_bytes else "none"
    for remark in remarks(config):
        yield "note", remark


def _memory(plan: Plan) -> Iterator[tuple[str, Iterable[_Pair]]]:
    """Yield a section per model, one for all if there are several, then GPUs and engines."""
    models = plan.memory
    for name, memory in models.items():
        of_which = f" of the {name}" if len(models) > 1 else ""
        on_rank = f"{memory.rank_parameters:,} on the fullest rank"
        frozen = memory.rank_parameters - memory.rank_trained
        if 0 < memory.rank_trained < memory.rank_parameters:
            on_rank += f": {memory.rank_trained:,} trained, {frozen:,} frozen"
        parts = ("weights", "gradients", "optimizer", "reference", "logits", "total")
        sizes = [(part, size_of(getattr(memory, part))) for part in parts]
        title = f"Memory per rank{of_which}, without activations and key-value cache"
        yield title, [("model", f"{memory.parameters:,} weights, {on_rank}"), *sizes]
    if len(models) > 1:
        whole = size_of(sum(one.total for one in models.values()))
        yield "Memory per rank of all models", [("total", whole)]
    if (gpu := plan.device_memory) is not None:
        rows = [("activations", f"{size_of(gpu.activations)} for {gpu.tokens} tokens")]
        rows.append(("during training", size_of(gpu.training)))
        if gpu.during_generation is not None:
            share = f"the engines' share at gpu_memory_utilization: {gpu.engine_share:g}"
            rows.append(("during generation", f"{size_of(gpu.during_generation)}, and {share}"))
        rows.append(("a GPU needs", f"at least {size_of(gpu.smallest)}"))
        yield "Memory of a GPU, without CUDA's own and the ranks' key-value cache", rows
    if (engine := plan.engines.memory) is not None:
        sizes = [(name, size_of(getattr(engine, name))) for name in ("weights", "buckets", "total")]
        title = "Memory per embedded engine, without key-value cache"
        yield title, [("model", f"{engine.parameters:,} weights, the whole model"), *sizes]
    if (share := plan.engines.share) is not None:
        rows = [("model", f"{share.parameters:,} weights on the fullest process")]
        rows.append(("weights", size_of(share.weights)))
        yield "Memory per process of a vLLM engine, without key-value cache", rows


# Every key


def resolved_lines(config: RunConfig, recipe: str | Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield "key: value  [file:line]" for each key, or [command line] or [default]; references stay references.

    If another file's `defaults:` replaced a value, that value is shown as well.
    """
    read = read_recipe(recipe)
    lost = taken_back(read)
    overridden = set(compute(read, overrides).overridden)
    written = {key: origin.where for key, origin in origins(read.files).items()}
    for path, value in leaves(config.model_dump(mode="json")):
        above = set(accumulate(path.split("."), join_path))
        where = COMMAND_LINE if above & overridden else written.get(path, "default")
        spelled = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
        text = visible(without_values(spelled, config.references, path))
        took = lost.get(path) if where == written.get(path) else None
        yield f"{path}: {text}  [{where}{f', in place of {took.text} of {took.where}' if took else ''}]"
