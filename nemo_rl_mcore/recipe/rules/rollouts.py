"""What does not go with asynchronous rollouts, with episodes, with agents, and with where an environment runs."""

import math
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import EpisodesConfig, RolloutConfig
from nemo_rl_mcore.config.base import Rule, Rules
from nemo_rl_mcore.config.data import SCORE_WITHIN_S, TURN_TASKS, RowKind
from nemo_rl_mcore.config.environment import EnvPoolConfig
from nemo_rl_mcore.config.master import GRPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig

_ENABLED, _STREAMING = "asynchrony.enabled", "asynchrony.min_groups_for_streaming_train"
_AGE, _STALL = "asynchrony.max_trajectory_age_steps", "asynchrony.stall_timeout_s"
_BATCH, _PROMPTS = "policy.train_global_batch_size", "loop.num_prompts_per_step"
_BACKEND, _COLOCATED = "policy.generation.backend", "policy.generation.colocated"
_OF_ENGINES = (_ENABLED, _BACKEND, f"{_COLOCATED}.enabled", "cluster.gpus_per_node")
_CORRECTION = "gradient.use_importance_sampling_correction"
_ENDPOINT, _TASK, _TURNS = "env.endpoint", "data.dataset_name", "loop.max_rollout_turns"
_SIZE, _TIMEOUT, _RETRIES = "env.pool.size", "env.pool.timeout_s", "env.pool.retries"
_OF_AGENTS = ("retries", "max_drop_rate", "variables")
_LIMITS_OF_A_SCORE = 3
"""Math-verify reads the answer of the data, that of the response, and compares them; each has its limit."""


def remarks(config: RunConfig) -> Iterator[str]:
    """Yield what a recipe may ask for, and whoever asks should know."""
    if not config.asynchronous:
        return
    section, generation, loss = config.asynchrony, config.policy.generation, config.gradient
    if config.max_age and loss is not None and not loss.use_importance_sampling_correction:
        key = config.key(_CORRECTION)
        yield f"{key}: false: older answers train as if the present weights had given them"
    if not section.in_flight_weight_updates:
        key = f"{config.asynchrony_key}.in_flight_weight_updates"
        yield f"{key}: false: each update waits until no group is being answered"
    if generation.engine.traits.always_rereads and not section.recompute_kv_cache_after_weight_updates:
        key = f"{config.asynchrony_key}.recompute_kv_cache_after_weight_updates"
        yield f"{key}: false: {generation.engine.traits.noun}s recompute it all the same"
    if config.streams and config.policy.model.load_balancing_loss:
        yield f"policy.model.moe_aux_loss_coeff: the loss depends on how {config.key(_STREAMING)} cuts a step"


def _groups(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield bounds on groups that are not those of a step."""
    least, most = config.asynchrony.min_groups_for_streaming_train, config.asynchrony.max_inflight_prompts
    groups, related = config.prompts_per_step, (config.prompts_key,)
    if config.asynchronous:
        fix = "lower it; null waits for the whole step"
        yield Rule("too-large", _STREAMING, least is not None and least > groups, related, fix)
        fix = f"set it to {groups} or more, or to null"
        few = most is not None and most < groups
        yield Rule("too-small", "asynchrony.max_inflight_prompts", few, related, fix)


def _turns(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield tasks and environments of several turns without each other, or without the turns."""
    loop, task, given = config.loop, config.data.dataset_name, next(iter(config.env.given), None)
    if task in TURN_TASKS and given not in (task, "custom"):
        others, fix = (
            ((f"env.{given}",), f"set it to {{}}, and env.{given} to null") if given else ((), "set it to {}")
        )
        yield Rule("missing", f"env.{task}", True, (_TASK, *others), fix)
    if given in TURN_TASKS and task != given:
        fix = {f"env.{given}": None, _TASK: given}
        why = "it knows the prompts of its own task alone"
        yield Rule("incompatible", f"env.{given}", True, (_TASK,), fix, why)
    if not isinstance(loop, EpisodesConfig):
        fix, why = "name another task, or run grpo or ppo", f"{config.algorithm} takes one answer to a prompt"
        yield Rule("incompatible", _TASK, task in TURN_TASKS, fix=fix, why=why)
        return
    once, why = (
        given in TURN_TASKS and loop.max_rollout_turns == 1,
        "it ends every episode with its first answer",
    )
    yield Rule("too-small", _TURNS, once, (f"env.{given}",), why=why)
    several, why = (
        config.scores_one_answer and loop.max_rollout_turns > 1,
        "that ends each episode with its first answer",
    )
    yield Rule("has-no-effect", _TURNS, several, (f"env.{given or 'arithmetic'}",), why=why)


def _of_sources(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rows to drop of a source that does not end, and rows without an answer that something reads."""
    drops = config.env.math is not None and config.env.math.unparsable == "drop"
    for path, source in config.train_sources.items():
        fix, key = {"env.math.unparsable": "zero"}, f"{path}.streaming"
        yield Rule("incompatible", "env.math.unparsable", drops and source.streaming, (key,), fix)
    if config.env.rewards or config.env.custom:
        read_by = None if config.row_kind is RowKind.PROMPTS else config.algorithm
    elif config.env.endpoint is not None and not config.env.given:
        read_by = None
    else:
        read_by = f"env.{next(iter(config.env.given), 'arithmetic')}"
    reads = read_by is not None and config.row_kind is not RowKind.PAIRS
    for path, source in (config.train_sources | config.validation_sources).items():
        fix, why = "name the column of the answer", f"{read_by} needs one"
        yield Rule("requires", f"{path}.output_key", reads and source.output_key is None, fix=fix, why=why)


def _weights(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield weights of rewards that have other names."""
    names = config.env.rewards or {}
    for name in config.env.reward_weights or {} if names else ():
        says = f"no such reward; env.rewards has {', '.join(names)}"
        yield Rule("not-found", f"env.reward_weights.{name}", name not in names, says=says)


def _given_up_after(config: RunConfig) -> float:
    """Return the seconds after which a reply of the environment that does not come is given up."""
    return config.env.pool.timeout_s * (config.env.pool.retries + 1)


def _agent_given_up_after(config: RunConfig) -> float:
    endpoint = config.env.endpoint
    return 0 if endpoint is None else endpoint.timeout_s * (config.env.pool.retries + 1)


RUN_RULES: Rules[RunConfig] = (
    *(
        Rule[RunConfig](
            "requires",
            _ENABLED,
            lambda run, name=name: (
                run.asynchronous and run.algorithm == name and not run.generations_per_prompt
            ),
            (key,),
            {_ENABLED: False, key: True},
            "the data set gives the answers, and none is sampled",
        )
        for name, key in (("dpo", "dpo.online"), ("distillation", "distillation.on_policy"))
    ),
    Rule(
        "incompatible",
        _STREAMING,
        lambda run: run.streams and not isinstance(run, GRPOMasterConfig),
        (_ENABLED,),
        {_STREAMING: None},
        lambda run: f"{run.algorithm} takes whole steps",
    ),
    Rule(
        "incompatible",
        _STREAMING,
        # A batch that does not divide the samples is told in batching.
        lambda run: (
            run.streams
            and isinstance(run, GRPOMasterConfig)
            and run.samples_per_step > run.policy.train_global_batch_size
            and run.samples_per_step % run.policy.train_global_batch_size == 0
        ),
        (_ENABLED, _BATCH, _PROMPTS),
        lambda run: {_STREAMING: None, _BATCH: run.samples_per_step},
        "a step that trains before it is whole is one optimizer step",
    ),
    Rule(
        "has-no-effect",
        "loop.batch_multiplier",
        lambda run: (
            run.asynchronous
            and isinstance(run.loop, RolloutConfig)
            and run.loop.use_dynamic_sampling
            and run.loop.batch_multiplier != 1
        ),
        (_ENABLED,),
        why="the next prompt takes the place of one without signal at once",
    ),
    _groups,
    Rule(
        "incompatible",
        f"{_COLOCATED}.enabled",
        lambda run: run.asynchronous and run.policy.generation.decodes_on_ranks,
        _OF_ENGINES,
        {f"{_COLOCATED}.enabled": False, _ENABLED: False},
        "the training ranks answer, and engines are needed that answer meanwhile",
    ),
    Rule(
        "incompatible",
        f"{_COLOCATED}.enabled",
        lambda run: (
            run.asynchronous
            and run.policy.generation.takes_turns
            and run.policy.generation.engine.traits.sleeps
            and not run.cluster.on_cpu
        ),
        _OF_ENGINES,
        lambda run: (
            f"set it to false with {_COLOCATED}.resources.gpus_per_node, or {run.key(_ENABLED)}: false"
        ),
        "engines sleep while the ranks train, and are needed meanwhile",
    ),
    Rule(
        "requires",
        "policy.generation.vllm_cfg.async_engine",
        lambda run: run.asynchronous and run.policy.generation.engine.required_for_groups,
        (_ENABLED, _BACKEND),
        {"policy.generation.vllm_cfg.async_engine": True, _ENABLED: False},
        "it answers whole batches, and not group by group",
    ),
    Rule(
        "incompatible",
        _STREAMING,
        lambda run: (
            run.streams
            and isinstance(run, GRPOMasterConfig)
            and (run.grpo.adv_estimator.type or run.grpo.adv_estimator.name) != "grpo"
        ),
        (_ENABLED, "grpo.adv_estimator.name", _PROMPTS),
        {_STREAMING: None, "grpo.adv_estimator.name": "grpo"},
        "an estimator may read the whole step, as one does that whitens advantages",
    ),
    Rule(
        "incompatible",
        "policy.generation.mismatch.action",
        lambda run: (
            run.max_age
            and run.policy.generation.mismatch.threshold is not None
            and run.policy.generation.mismatch.action != "warn"
        ),
        ("policy.generation.mismatch.threshold", _ENABLED, _AGE),
        {"policy.generation.mismatch.action": "warn", "policy.generation.mismatch.threshold": None, _AGE: 0},
        "it would act on the age of the weights that answered",
    ),
    Rule(
        "missing",
        _CORRECTION,
        # Off-policy training without correction is a choice that a recipe must make itself.
        lambda run: (
            run.max_age
            and run.gradient is not None
            and "use_importance_sampling_correction" not in run.gradient.model_fields_set
        ),
        (_ENABLED, _AGE),
        lambda run: (
            f"set {run.key(_CORRECTION)}: true, truncated_importance_sampling_type: tis and "
            "truncated_importance_sampling_ratio: 2.0; or to false, which trains as if the answers were new"
        ),
        "older weights have answered than those that train",
    ),
    *(
        Rule[RunConfig](
            "incompatible",
            _SIZE,
            lambda run, name=name: (
                run.asynchronous and not run.env.pool_size and getattr(run.env, name) is not None
            ),
            (_ENABLED, f"env.{name}"),
            "set it to 1 or more",
            "it would hold up the thread that asks the engines",
        )
        for name in ("math", "rewards", "custom")
    ),
    Rule(
        "too-small",
        _TIMEOUT,
        lambda run: (
            run.env.math is not None
            and run.env.pool_size
            and run.env.pool.timeout_s <= _LIMITS_OF_A_SCORE * SCORE_WITHIN_S
        ),
        ("env.math",),
        f"set it above {_LIMITS_OF_A_SCORE * SCORE_WITHIN_S}",
        f"a score has the limit of {SCORE_WITHIN_S} s {_LIMITS_OF_A_SCORE} times",
    ),
    Rule(
        "too-small",
        _STALL,
        lambda run: (
            run.asynchronous
            and run.env.pool_size
            and (run.asynchrony.stall_timeout_s or math.inf) <= _given_up_after(run)
        ),
        (_TIMEOUT, _RETRIES),
        lambda run: f"set it above {_given_up_after(run):g}, or lower the other two",
        "it would be over before a reply is given up",
    ),
    Rule(
        "too-small",
        _STALL,
        lambda run: (
            run.asynchronous
            and run.env.endpoint is not None
            and (run.asynchrony.stall_timeout_s or math.inf) <= _agent_given_up_after(run)
        ),
        (f"{_ENDPOINT}.timeout_s", _RETRIES),
        lambda run: f"set it above {_agent_given_up_after(run):g}, or lower the other two",
        "it would be over before an agent is given up",
    ),
    *(
        Rule[RunConfig](
            "has-no-effect",
            f"env.pool.{name}",
            lambda run, name=name, default=field.default: (
                not run.env.pool_size
                and not (run.env.endpoint is not None and name in _OF_AGENTS)
                and getattr(run.env.pool, name) != default
            ),
            (_SIZE,),
            why="the environment runs in the process of the loop",
        )
        for name, field in EnvPoolConfig.model_fields.items()
        if name != "size"
    ),
    _weights,
    Rule(
        "requires",
        "env.reward_weights",
        lambda run: run.env.reward_weights and not run.env.rewards and run.env.custom is None,
        ("env.custom",),
        "remove it",
        "without env.rewards too there is one reward, which has no name",
    ),
    _of_sources,
    Rule(
        "requires",
        "env.pool.num_gpus",
        lambda run: run.env.pool.num_gpus and run.env.pool_size and run.cluster.on_cpu,
        ("cluster.gpus_per_node",),
        {"env.pool.num_gpus": 0},
    ),
    Rule(
        "not-allowed",
        "env.pool.num_gpus",
        lambda run: (
            run.env.pool.num_gpus > 1
            and run.env.pool.num_gpus % 1
            and run.env.pool_size
            and not run.cluster.on_cpu
        ),
        fix=lambda run: {"env.pool.num_gpus": math.ceil(run.env.pool.num_gpus)},
        why="it is neither a share of one GPU nor a number of whole ones",
    ),
    *(
        Rule[RunConfig](
            "incompatible",
            _ENDPOINT,
            lambda run, name=name: run.env.endpoint is not None and run.algorithm == name,
            fix="run grpo, or set it to null",
            why=f"{name}: {why}",
        )
        for name, why in (
            (
                "ppo",
                "a session may fork into several rows, and a critic cannot say of one what the next is worth",
            ),
            ("dpo", "a pair compares two rows, and a session may fork into several"),
            ("sft", "nothing is sampled"),
            ("distillation", "the student answers a prompt once"),
        )
    ),
    *(
        Rule[RunConfig](
            "incompatible",
            f"env.{task}",
            lambda run, task=task: run.env.endpoint is not None and run.env.given[:1] == [task],
            (_ENDPOINT,),
            "set one of them to null",
            "agents play the episodes themselves",
        )
        for task in TURN_TASKS
    ),
    _turns,
)
