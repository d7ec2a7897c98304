"""Requirements on a data set: enough prompts and rows, and answers that can be scored."""

import difflib
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import RolloutConfig
from nemo_rl_mcore.config.base import Rule, Rules, join_path
from nemo_rl_mcore.config.data import DataConfig, RowKind
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import each

_TASK, _DIGITS = "data.dataset_name", "data.num_digits"
_PROMPTS, _VAL_SAMPLES = "loop.num_prompts_per_step", "loop.max_val_samples"
_GOLD = "env.math.gold"


def _named_sets(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    sets = config.eval.sets if config.eval else {}
    for place, name in each(config.data.validation).items():
        if isinstance(name, str) and name not in sets:
            near = difflib.get_close_matches(name, sets, n=1, cutoff=0.5)
            known = f"known: {', '.join(sets) or 'none'}; name it in eval.sets"
            fix, says = f"did you mean {near[0]}?" if near else known, f"{name!r} is not one of eval.sets"
            yield Rule("not-found", join_path("data.validation", place), True, ("eval.sets",), fix, says=says)


def _gold_answers(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for env.math.gold together with a source's `answer`, which has already extracted the answer."""
    gold = config.env.math is not None and config.env.math.gold is not None
    sources = config.train_sources | config.validation_sources
    taken = [path for path, source in sources.items() if source.answer is not None] if gold else []
    for path in taken[:1]:
        why = "the reference answers of that task need no extraction"
        yield Rule(
            "incompatible", _GOLD, True, (f"{path}.answer", f"{path}.dataset_name"), {_GOLD: None}, why
        )


def _repeated(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for repeated held-out rows that get the same answers each time."""
    loop = config.loop
    may_sample = isinstance(loop, RolloutConfig)
    greedy = not may_sample or loop.val_greedy
    for path, source in config.validation_sources.items():
        again = loop.validates and loop.max_val_samples != 0 and greedy and source.repeat > 1
        sampled = f", or {config.key('loop.val_greedy')}: false" if may_sample else ""
        fix, why = f"set it to 1{sampled}", "greedy answers are all the same"
        yield Rule("incompatible", f"{path}.repeat", again, ("loop.val_greedy",), fix, why)


def _prompts_there(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield a rule for a step with more prompts than an embedded task has."""
    data, fix = config.data, "lower it, or raise data.num_digits"
    says = f"that task has {data.task.train_prompts} different training prompts"
    many = data.embedded and config.prompts_per_step > data.task.train_prompts
    yield Rule("too-large", config.prompts_key, many, (_TASK, _DIGITS), fix, says=says)


def _of_conversations(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for keys of given conversations in a run without given conversations."""
    chat, sampled = config.data.apply_chat_template, config.row_kind is RowKind.PROMPTS
    for key in ("add_eos", "imitated"):
        given = getattr(config.data, key) != DataConfig.model_fields[key].default
        related, why = (
            ((), "this algorithm samples its answers") if chat else (("data.apply_chat_template",), "")
        )
        yield Rule("has-no-effect", f"data.{key}", given and (sampled or not chat), related, why=why)


RUN_RULES: Rules[RunConfig] = (
    Rule(
        "not-divisible",
        "loop.batch_multiplier",
        lambda run: (
            isinstance(run.loop, RolloutConfig)
            and run.loop.use_dynamic_sampling
            and run.loop.num_prompts_per_step * run.loop.batch_multiplier % 1
        ),
        (_PROMPTS,),
        "make the product a whole number",
        "their product is the number of prompts of a round",
    ),
    _prompts_there,
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
            and (run.loop.max_val_samples or 0) > run.data.task.validation_prompts
        ),
        (_TASK, _DIGITS, "loop.val_period", "loop.val_at_start", "loop.val_at_end"),
        "lower it, raise data.num_digits, or turn validation off (val_period: 0, val_at_start and val_at_end: false)",
        says=lambda run: (
            f"{run.loop.max_val_samples} is more than the {run.data.task.validation_prompts} held-out prompts of "
            f"{_TASK}: {run.data.dataset_name} with {_DIGITS}: {run.data.num_digits}"
        ),
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
    _of_conversations,
    *(
        Rule[RunConfig](
            "has-no-effect",
            f"policy.tokenizer.{key}",
            lambda run, key=key: (
                getattr(run.policy.tokenizer, key)
                and not run.data.apply_chat_template
                and run.env.endpoint is None
            ),
            ("data.apply_chat_template",),
        )
        for key in ("chat_template", "chat_template_kwargs")
    ),
    _repeated,
)
