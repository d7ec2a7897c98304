"""Show what a run trains, as `check` prints it first: models, data, environment, loss, optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from nemo_rl_mcore.config.base import StrictModel
from nemo_rl_mcore.config.loss import DPOLossConfig
from nemo_rl_mcore.config.policy import PolicyConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceDefaults
from nemo_rl_mcore.data.datasets import DigitTaskSource
from nemo_rl_mcore.data.examples import Example
from nemo_rl_mcore.data.prompt_texts import read_texts
from nemo_rl_mcore.data.tokenizer_folder import ends_of
from nemo_rl_mcore.driver.data_files import FIRST_ROWS, chat_template_told
from nemo_rl_mcore.driver.output import visible
from nemo_rl_mcore.errors import shortened
from nemo_rl_mcore.recipe.environment_values import without_values

_SHOWN_TEXT = 100


def subject_of(config: RunConfig, rows: Sequence[Example] = ()) -> Iterator[tuple[str, str]]:
    """Yield name and value of each line, with references in place of what is from the environment.

    rows: the first of the data set's files.
    """
    for name, value in _lines(config, rows):
        yield name, visible(without_values(value, config.references))


def _lines(config: RunConfig, rows: Sequence[Example]) -> Iterator[tuple[str, str]]:
    yield "algorithm", f"{config.algorithm}{', asynchronous rollouts' if config.asynchronous else ''}"
    for name, plan in config.models.items():
        first = config.warm_start if name == "policy" else plan.warm_start
        yield name, _model(plan.policy) + (f", trained by {first} first" if first else "")
    yield "tokenizer", config.policy.tokenizer.name
    if ends := ends_of(config.policy):
        yield "answers end with", ", ".join(f"{text!r} ({token})" for token, text in ends.items())
    yield from _data(config)
    for number, example in enumerate(rows or _first_of_task(config), start=1):
        yield f"row {number}", _row(example)
    if (told := chat_template_told(config)) is not None:
        yield "chat template", told
    if config.learns_from_samples or config.loop.validates:
        yield from _environments(config)
    yield from _losses(config)
    for name, plan in config.models.items():
        if plan.trained:
            yield from _optimizer(plan.policy, "" if name == "policy" else f" of the {name}")


def _losses(config: RunConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config.loop, DPOLossConfig):
        yield "loss", _keys(config.loop, only=DPOLossConfig)
    for path, loss in config.losses.items():
        yield path, _keys(loss)
    estimator = getattr(config.loop, "adv_estimator", None)
    if isinstance(estimator, StrictModel) and config.learns_from_samples:
        yield "advantage", _keys(estimator, "name")


def _model(policy: PolicyConfig) -> str:
    model = policy.model
    shape = f"{model.num_layers} layers x {model.hidden_size}, vocabulary {model.vocab_size}"
    weights = policy.init_checkpoint or policy.model_name or "random weights"
    return f"{shape}, from {weights}"


def _data(config: RunConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.type is not None:
        yield "data", data.type
    elif not data.from_files:
        yield "data", str(data.dataset_name)
    for path, source in (config.train_sources | config.validation_sources).items():
        yield path, ", ".join(map(str, source.paths))


def _first_of_task(config: RunConfig) -> list[Example]:
    """Return the first prompts of an embedded task."""
    data = config.data
    if data.from_files or data.type is not None:
        return []
    prompts = DigitTaskSource(data.dataset_name, data.num_digits, config.seed).train_batch(1, FIRST_ROWS)
    texts, _ = read_texts(data.default or SourceDefaults())
    chat = data.apply_chat_template
    return [Example("", one.index, texts.shown(one.text, chat=chat), one.answer) for one in prompts]


def _row(row: Example) -> str:
    """Spell what the model is shown and what is the answer, on one line."""
    shown = row.context
    if not isinstance(shown, str):
        shown = " ".join(f"[{message.role}] {message.content}" for message in shown)
    answers = {"answer": row.solution or row.answer, "rejected": row.rejected}
    named = (f"{name} {_quoted(answer)}" for name, answer in answers.items() if answer)
    return ", ".join((_quoted(shown), *named))


def _quoted(text: str) -> str:
    return repr(shortened(text, _SHOWN_TEXT))


def _environments(config: RunConfig) -> Iterator[tuple[str, str]]:
    sections = {
        name: getattr(config.env, name) for name in ("arithmetic", "guess_number", "calculator", "math")
    }
    named = [name for name, section in sections.items() if section is not None]
    named += [f"{name}: {path}" for name, path in (config.env.rewards or {}).items()]
    if config.env.custom is not None:
        named.append(config.env.custom.type)
    if config.env.endpoint is not None:
        of = ("NeMo Gym's",) if config.env.nemo_gym is not None else config.env.endpoint.command
        named.append(f"agents, {' '.join(of)}")
    turns = config.max_rollout_turns
    of_turns = f", up to {turns} turns" if turns > 1 else ""
    yield "environment", (", ".join(named) or "none") + of_turns


def _optimizer(policy: PolicyConfig, of: str) -> Iterator[tuple[str, str]]:
    megatron = policy.megatron_cfg
    optimizer, schedule = megatron.optimizer, megatron.scheduler
    yield (
        f"optimizer{of}",
        f"{_keys(optimizer, 'optimizer', 'lr')}, gradients clipped at {policy.max_grad_norm:g}",
    )
    yield f"schedule{of}", _keys(schedule, "lr_decay_style")


def _keys(section: BaseModel, *always: str, only: type[BaseModel] | None = None) -> str:
    """Spell the keys, of a class of the section's, that differ from their defaults or are always shown."""
    fields = (only or type(section)).model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    shown = [
        f"{name}: {value}"
        for name, default in defaults.items()
        if (value := getattr(section, name)) != default or name in always
    ]
    return ", ".join(shown) or "all keys at their defaults"
