"""What a run asks of its data set: enough prompts and rows, and answers that can be scored."""

import difflib
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Problem, has_no_effect, join_path
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import each
from nemo_rl_mcore.errors import shortened
from nemo_rl_mcore.recipe.rules.feature import Rules


def _drawn_prompts(config: RunConfig) -> Iterator[Problem]:
    name, data, loop = config.algorithm, config.data, config.loop
    if not isinstance(loop, RolloutConfig):
        return
    drawn = loop.prompts_per_round
    if drawn != int(drawn):
        yield Problem(
            "not-divisible",
            f"{name}.batch_multiplier",
            f"{loop.batch_multiplier} times num_prompts_per_step: {loop.num_prompts_per_step} is not whole",
            "give a multiple that is",
            (f"{name}.num_prompts_per_step",),
        )
    if data.embedded and loop.num_prompts_per_step > data.train_prompts:
        yield Problem(
            "too-large",
            f"{name}.num_prompts_per_step",
            f"{loop.num_prompts_per_step} is above the {data.train_prompts} different training prompts of "
            f"data.num_digits: {data.num_digits}",
            "lower it, or raise data.num_digits",
            ("data.dataset_name", "data.num_digits"),
        )


def _given_rows(config: RunConfig) -> Iterator[Problem]:
    """Yield a batch of an embedded task's rows that is larger than the task, where a step takes one such batch."""
    data, batch = config.data, config.policy.train_global_batch_size
    if not data.embedded or isinstance(config.loop, RolloutConfig):
        return
    if batch > data.train_prompts:
        yield Problem(
            "too-large",
            "policy.train_global_batch_size",
            f"{batch} is above the {data.train_prompts} different training prompts of data.num_digits: "
            f"{data.num_digits}",
            "lower it, or raise data.num_digits",
            ("data.dataset_name", "data.num_digits"),
        )


def _held_out_prompts(config: RunConfig) -> Iterator[Problem]:
    name, loop, data = config.algorithm, config.loop, config.data
    if not loop.validates:
        return
    for key, given, count in (
        ("max_val_samples", "null", loop.max_val_samples),
        ("val_batches", "-1", config.val_loss_samples),
    ):
        if count is None and data.dataset_name != "files":
            what = f"{given} takes all rows held out, which data.dataset_name: {data.dataset_name} has not counted"
            yield Problem("incompatible", f"{name}.{key}", what, "give a number", ("data.dataset_name",))
    if loop.max_val_samples is None:
        return
    if data.embedded and loop.max_val_samples > data.validation_prompts:
        yield Problem(
            "too-large",
            f"{name}.max_val_samples",
            f"{loop.max_val_samples} is above the {data.validation_prompts} held-out prompts of "
            f"data.num_digits: {data.num_digits}",
            "lower it, raise data.num_digits, or turn validation off (val_period: 0, val_at_start and "
            "val_at_end: false)",
            (
                "data.dataset_name",
                "data.num_digits",
                f"{name}.val_period",
                f"{name}.val_at_start",
                f"{name}.val_at_end",
            ),
        )


def _named_sets(config: RunConfig) -> Iterator[Problem]:
    """Yield names in data.validation that are none of a set of eval.sets."""
    sets = config.eval.sets if config.eval else {}
    for place, name in each(config.data.validation).items():
        if not isinstance(name, str) or name in sets:
            continue
        near = difflib.get_close_matches(name, sets, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"known: {', '.join(sets) or 'none'}; name it in eval.sets"
        )
        yield Problem(
            "not-found",
            join_path("data.validation", place),
            f"{name!r} is no set of eval.sets",
            hint,
            ("eval.sets",),
        )


def _gold_answers(config: RunConfig) -> Iterator[Problem]:
    if config.data.embedded and config.env.math is not None and config.env.math.gold is not None:
        yield Problem(
            "incompatible",
            "env.math.gold",
            f"does not go with data.dataset_name: {config.data.dataset_name}, whose answers are digits and no more",
            "set it to null",
            ("data.dataset_name",),
        )
    for path, source in (config.train_sources | config.validation_sources).items():
        if source.answer is not None and config.env.math is not None and config.env.math.gold is not None:
            yield Problem(
                "incompatible",
                "env.math.gold",
                f"would look for an answer in what {path}.answer has already taken from the rows",
                "set it to null",
                (f"{path}.answer", f"{path}.dataset_name"),
            )
            return


def _given_turns(config: RunConfig) -> Iterator[Problem]:
    """Yield how given answers are shown where there are none, or no conversations."""
    data = config.data
    for key, default in (("add_eos", False), ("imitated", "answer")):
        value = getattr(data, key)
        if value != default and not data.apply_chat_template:
            yield has_no_effect(f"data.{key}", value, "without a chat template", "data.apply_chat_template")
        elif value != default and config.row_kind is RowKind.PROMPTS:
            yield has_no_effect(f"data.{key}", value, "where no answers are given")


def _idle_template(config: RunConfig) -> Iterator[Problem]:
    """Yield what is said of a chat template where none is applied."""
    tokenizer = config.policy.tokenizer
    for key, given in (
        ("chat_template", tokenizer.chat_template and shortened(tokenizer.chat_template)),
        ("chat_template_kwargs", tokenizer.chat_template_kwargs),
    ):
        if given and not config.shows_chats:
            path = f"policy.tokenizer.{key}"
            yield has_no_effect(path, given, "where no chat template is applied", "data.apply_chat_template")


def _repeated(config: RunConfig) -> Iterator[Problem]:
    """Yield held-out rows that are taken again, and answered again alike."""
    loop = config.loop
    _, greedy = loop.validation_answers
    if not loop.validates or loop.max_val_samples == 0 or not greedy:
        return
    for path, source in config.validation_sources.items():
        if source.repeat > 1:
            own = f"{config.algorithm}.val_greedy"
            sampled = f", or {own}: false" if isinstance(loop, RolloutConfig) else ""
            what = f"{source.repeat} times the likeliest answer is the same answer as often"
            yield Problem("incompatible", f"{path}.repeat", what, f"set it to 1{sampled}", (own,))


def _streams(config: RunConfig) -> Iterator[Problem]:
    """Yield what a stream of rows does not serve: it has one order, no end that is known, and nothing held out."""
    sources = config.train_sources
    streams = [path for path, source in sources.items() if source.streaming]
    if not streams:
        return
    key, loop = f"{streams[0]}.streaming", config.loop
    if len(sources) > 1:
        yield Problem(
            "incompatible",
            key,
            "true is for one source, and data.train has several",
            "set it to false, or keep one source",
        )
    for one, all_rows in (("max_samples", None), ("repeat", 1)):
        if getattr(sources[streams[0]], one) != all_rows:
            what = f"does not go with {key}: true, whose rows are not counted"
            yield Problem("incompatible", f"{streams[0]}.{one}", what, "remove one of the two", (key,))
    if config.data.validation is None and loop.validates:
        what = "true holds no rows out to validate with, and data.validation is null"
        yield Problem(
            "incompatible", key, what, "give data.validation, or turn validation off", ("data.validation",)
        )
    if (loop.max_num_epochs or 1) > 1:
        because = f"with {key}: true, whose rows are not counted"
        yield has_no_effect(f"{config.algorithm}.max_num_epochs", loop.max_num_epochs, because, key)
    if isinstance(loop, RolloutConfig) and loop.use_dynamic_sampling:
        what = f"true draws rows of all the data set, which {key}: true does not have"
        yield Problem(
            "incompatible",
            f"{config.algorithm}.use_dynamic_sampling",
            what,
            "set one of the two to false",
            (key,),
        )
    if config.asynchronous:
        what = f"true draws prompts of several steps at a time, and {key}: true reads them step after step"
        yield Problem(
            "incompatible", f"{config.asynchrony_key}.enabled", what, "set one of the two to false", (key,)
        )


RULES = Rules(
    of_runs=(
        _drawn_prompts,
        _given_rows,
        _held_out_prompts,
        _named_sets,
        _gold_answers,
        _given_turns,
        _idle_template,
        _repeated,
        _streams,
    )
)
