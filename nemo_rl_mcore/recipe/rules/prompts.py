"""What a run asks of its data set: enough prompts and rows, and answers that can be scored."""

import difflib
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Rule, Rules, join_path
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import each

_TASK, _DIGITS = "data.dataset_name", "data.num_digits"
_PROMPTS, _VAL_SAMPLES = "loop.num_prompts_per_step", "loop.max_val_samples"
_BATCH, _GOLD = "policy.train_global_batch_size", "env.math.gold"


def _named_sets(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield names in data.validation that are none of a set of eval.sets."""
    sets = config.eval.sets if config.eval else {}
    for place, name in each(config.data.validation).items():
        if isinstance(name, str) and name not in sets:
            near = difflib.get_close_matches(name, sets, n=1, cutoff=0.5)
            known = f"known: {', '.join(sets) or 'none'}; name it in eval.sets"
            fix, says = f"did you mean {near[0]}?" if near else known, f"{name!r} is no set of eval.sets"
            yield Rule("not-found", join_path("data.validation", place), True, ("eval.sets",), fix, says=says)


def _gold_answers(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield a place of answers in what the rows' own place of an answer has already taken from them."""
    gold = config.env.math is not None and config.env.math.gold is not None
    sources = config.train_sources | config.validation_sources
    taken = [path for path, source in sources.items() if source.answer is not None] if gold else []
    for path in taken[:1]:
        why = "the reference answers of that task need no extraction"
        yield Rule(
            "incompatible", _GOLD, True, (f"{path}.answer", f"{path}.dataset_name"), {_GOLD: None}, why
        )


def _repeated(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield held-out rows that are taken again, and answered again alike."""
    loop = config.loop
    answers, greedy = loop.validates and loop.max_val_samples != 0, loop.validation_answers[1]
    for path, source in config.validation_sources.items():
        again = answers and greedy and source.repeat > 1
        sampled = f", or {config.key('loop.val_greedy')}: false" if isinstance(loop, RolloutConfig) else ""
        fix, why = f"set it to 1{sampled}", "greedy answers are all the same"
        yield Rule("incompatible", f"{path}.repeat", again, ("loop.val_greedy",), fix, why)


def _streams(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield what a stream of rows does not serve: it has one order, no end that is known, and nothing held out."""
    sources, loop = config.train_sources, config.loop
    path = next((path for path, source in sources.items() if source.streaming), None)
    if path is None:
        return
    key, uncounted = f"{path}.streaming", "its number of rows is unknown"
    fix, why = (
        "set it to false, or keep one source",
        "it works with a single source, and data.train has several",
    )
    yield Rule("incompatible", key, len(sources) > 1, (), fix, why)
    for one, all_rows in (("max_samples", None), ("repeat", 1)):
        given = getattr(sources[path], one) != all_rows
        yield Rule("incompatible", f"{path}.{one}", given, (key,), "remove one of the two", uncounted)
    validates = config.data.validation is None and loop.validates
    fix, why = "give data.validation, or turn validation off", "it has no rows for validation"
    yield Rule("incompatible", key, validates, ("data.validation",), fix, why)
    epochs = (loop.max_num_epochs or 1) > 1
    yield Rule("has-no-effect", "loop.max_num_epochs", epochs, (key,), why=uncounted)
    dynamic, path = isinstance(loop, RolloutConfig) and loop.use_dynamic_sampling, "loop.use_dynamic_sampling"
    yield Rule("incompatible", path, dynamic, (key,), {path: False, key: False}, "it draws from all rows")
    path, why = "asynchrony.enabled", "it draws the prompts of several steps at once"
    yield Rule("incompatible", path, config.asynchronous, (key,), {path: False, key: False}, why)


RUN_RULES: Rules[RunConfig] = (
    Rule(
        "not-divisible",
        "loop.batch_multiplier",
        lambda run: isinstance(run.loop, RolloutConfig) and run.loop.prompts_per_round % 1,
        (_PROMPTS,),
        "make the product a whole number",
        "their product is the number of prompts of a round",
    ),
    Rule(
        "too-large",
        _PROMPTS,
        lambda run: (
            isinstance(run.loop, RolloutConfig)
            and run.data.embedded
            and run.loop.num_prompts_per_step > run.data.train_prompts
        ),
        (_TASK, _DIGITS),
        "lower it, or raise data.num_digits",
        lambda run: f"that task has {run.data.train_prompts} different training prompts",
    ),
    Rule(
        "too-large",
        _BATCH,
        lambda run: (
            not isinstance(run.loop, RolloutConfig)
            and run.data.embedded
            and run.policy.train_global_batch_size > run.data.train_prompts
        ),
        (_TASK, _DIGITS),
        "lower it, or raise data.num_digits",
        lambda run: f"that task has {run.data.train_prompts} different training prompts",
    ),
    Rule(
        "incompatible",
        _VAL_SAMPLES,
        lambda run: (
            run.loop.validates and run.loop.max_val_samples is None and run.data.dataset_name != "files"
        ),
        (_TASK,),
        "give a number",
        "that task has no fixed number of validation rows",
    ),
    Rule(
        "incompatible",
        "loop.val_batches",
        lambda run: run.loop.validates and run.val_loss_samples is None and run.data.dataset_name != "files",
        (_TASK,),
        "give a number",
        "that task has no fixed number of validation rows",
    ),
    Rule(
        "too-large",
        _VAL_SAMPLES,
        lambda run: (
            run.loop.validates
            and run.data.embedded
            and (run.loop.max_val_samples or 0) > run.data.validation_prompts
        ),
        (_TASK, _DIGITS, "loop.val_period", "loop.val_at_start", "loop.val_at_end"),
        "lower it, raise data.num_digits, or turn validation off (val_period: 0, val_at_start and val_at_end: false)",
        lambda run: f"that task has {run.data.validation_prompts} held-out prompts",
    ),
    _named_sets,
    Rule(
        "incompatible",
        _GOLD,
        lambda run: run.data.embedded and run.env.math is not None and run.env.math.gold is not None,
        (_TASK,),
        {_GOLD: None},
        "its answers are single digits",
    ),
    _gold_answers,
    *(
        Rule[RunConfig](
            "has-no-effect",
            f"data.{key}",
            lambda run, key=key, default=default: (
                getattr(run.data, key) != default and not run.data.apply_chat_template
            ),
            ("data.apply_chat_template",),
        )
        for key, default in (("add_eos", False), ("imitated", "answer"))
    ),
    *(
        Rule[RunConfig](
            "has-no-effect",
            f"data.{key}",
            lambda run, key=key, default=default: (
                getattr(run.data, key) != default
                and run.data.apply_chat_template
                and run.row_kind is RowKind.PROMPTS
            ),
            why="no answers are given",
        )
        for key, default in (("add_eos", False), ("imitated", "answer"))
    ),
    *(
        Rule[RunConfig](
            "has-no-effect",
            f"policy.tokenizer.{key}",
            lambda run, key=key: getattr(run.policy.tokenizer, key) and not run.shows_chats,
            ("data.apply_chat_template",),
        )
        for key in ("chat_template", "chat_template_kwargs")
    ),
    _repeated,
    _streams,
)
