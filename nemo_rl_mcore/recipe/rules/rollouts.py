"""Rules for asynchronous rollouts, episodes, agents and the processes of environments."""

import math
from collections.abc import Iterator

from nemo_rl_mcore.config.algorithm import EpisodesConfig, RolloutConfig
from nemo_rl_mcore.config.base import Rule, Rules, either, value_at
from nemo_rl_mcore.config.data import SCORE_WITHIN_S, TURN_TASKS, RowKind
from nemo_rl_mcore.config.environment import RETRIES, EnvPoolConfig
from nemo_rl_mcore.config.master import GRPOMasterConfig
from nemo_rl_mcore.config.run_config import RunConfig

_ENABLED, _STREAMING = "asynchrony.enabled", "asynchrony.min_groups_for_streaming_train"
_AGE, _STALL = "asynchrony.max_trajectory_age_steps", "asynchrony.stall_timeout_s"
_BATCH, _PROMPTS = "policy.train_global_batch_size", "loop.num_prompts_per_step"
_BACKEND, _COLOCATED = "policy.generation.backend", "policy.generation.colocated"
_OF_ENGINES = (_ENABLED, _BACKEND, f"{_COLOCATED}.enabled", "cluster.gpus_per_node")
_CORRECTION = "gradient.use_importance_sampling_correction"
_ENDPOINT, _TASK, _TURNS = "env.endpoint", "data.dataset_name", "loop.max_rollout_turns"
_SIZE, _TIMEOUT = "env.pool.size", "env.pool.timeout_s"
_OF_AGENTS = ("max_drop_rate", "variables")
_REPLAY = "policy.router_replay.enabled"
_LIMITS_OF_A_SCORE = 3
"""Number of time limits per score: math-verify parses the reference, parses the response, and compares them."""


def remarks(config: RunConfig) -> Iterator[str]:
    """Yield remarks on valid settings that have notable consequences."""
    if not config.asynchronous:
        return
    section, generation, loss = config.asynchrony, config.policy.generation, config.gradient
    if config.max_age and loss is not None and not loss.use_importance_sampling_correction:
        key = config.key(_CORRECTION)
        yield f"{key}: false: responses of older weights are trained as if the current ones had sampled them"
    if not section.in_flight_weight_updates:
        key = f"{config.key('asynchrony')}.in_flight_weight_updates"
        yield f"{key}: false: each update waits until no group is in flight"
    if generation.backend == "vllm" and not section.recompute_kv_cache_after_weight_updates:
        key = f"{config.key('asynchrony')}.recompute_kv_cache_after_weight_updates"
        yield f"{key}: false: vLLM engines recompute it all the same"
    if config.streams and config.policy.model.load_balancing_loss:
        yield f"policy.model.moe_aux_loss_coeff: the loss depends on how {config.key(_STREAMING)} cuts a step"


def _bounds_of_groups(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for bounds on groups that a step's groups, or the time of their replies, exceed."""
    if not config.asynchronous:
        return
    least, most = config.asynchrony.min_groups_for_streaming_train, config.asynchrony.max_inflight_prompts
    groups, related = config.prompts_per_step, (config.prompts_key,)
    fix = "lower it; null waits for the whole step"
    yield Rule("too-large", _STREAMING, least is not None and least > groups, related, fix)
    fix = f"set it to {groups} or more, or to null"
    few = most is not None and most < groups
    yield Rule("too-small", "asynchrony.max_inflight_prompts", few, related, fix)
    env, limit_s = config.env, config.asynchrony.stall_timeout_s or math.inf
    reply_s = env.pool.timeout_s if env.pool_size else 0
    agent_s = 0 if env.endpoint is None else env.endpoint.timeout_s
    for key, timeout_s, what in (
        (_TIMEOUT, reply_s, "a reply"),
        (f"{_ENDPOINT}.timeout_s", agent_s, "an agent"),
    ):
        given_up_s = timeout_s * (RETRIES + 1)
        fix, why = (
            f"set it above {given_up_s:g}, or lower {key}",
            f"it would expire before {what} times out",
        )
        yield Rule("too-small", _STALL, limit_s <= given_up_s, (key,), fix, why)


def _turns(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for tasks and environments with several turns that do not match, or lack turns."""
    loop, task, given = config.loop, config.data.dataset_name, next(iter(config.env.given), None)
    if task in TURN_TASKS and given not in (task, "custom"):
        others, fix = (
            ((f"env.{given}",), f"set it to {{}}, and env.{given} to null") if given else ((), "set it to {}")
        )
        yield Rule("missing", f"env.{task}", True, (_TASK, *others), fix)
    if given in TURN_TASKS and task != given:
        fix = {f"env.{given}": None, _TASK: given}
        why = "it only has prompts of its own task"
        yield Rule("incompatible", f"env.{given}", True, (_TASK,), fix, why)
    if not isinstance(loop, EpisodesConfig):
        fix, why = "name another task, or run grpo or ppo", f"{config.algorithm} samples one turn per prompt"
        yield Rule("incompatible", _TASK, task in TURN_TASKS, fix=fix, why=why)
        return
    why = "every episode would end with its first answer"
    once = given in TURN_TASKS and loop.max_rollout_turns == 1
    yield Rule("too-small", _TURNS, once, (f"env.{given}",), why=why)
    why = "every episode ends with its first answer"
    several = config.max_rollout_turns < loop.max_rollout_turns
    yield Rule("has-no-effect", _TURNS, several, (f"env.{given}",) if given else (), why=why)


def _of_sources(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for rows without an answer in runs that read one."""
    for path, source in (config.train_sources | config.validation_sources).items():
        env = config.env.by_name.get(source.env_name or "") or config.env.by_name.get("", config.env)
        if env.rewards or env.custom:
            read_by = None if config.row_kind is RowKind.PROMPTS else config.algorithm
        elif env.endpoint is not None and not env.given:
            read_by = None
        else:
            read_by = f"env.{env.given[0]}" if env.given else "the score of embedded tasks"
        reads = read_by is not None and config.row_kind is not RowKind.PAIRS
        fix, why = "name the column of the answer", f"{read_by} needs one"
        yield Rule("requires", f"{path}.output_key", reads and source.output_key is None, fix=fix, why=why)


def _weights(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    names = config.env.rewards or {}
    for name in config.env.reward_weights or {} if names else ():
        says = f"no such reward; env.rewards has {', '.join(names)}"
        unknown = name not in names and config.env.custom is None
        yield Rule("not-found", f"env.reward_weights.{name}", unknown, says=says)


def _environments(config: RunConfig) -> Iterator[Rule[RunConfig]]:
    """Yield rules for rows whose environment is missing or unknown, and for environments without rows."""
    given, sets = config.env.given, config.eval.sets if config.eval else {}
    several, listed = len(given) > 1, ", ".join(given) or "no section"
    related = tuple(f"env.{name}" for name in given)
    if config.data.embedded:
        says = f"an embedded task has only one environment; given: {' and '.join(given)}"
        for name in related[-1:]:
            yield Rule("one-of", name, several, related, f"set env.{given[0]}: null", says=says)
        return
    sources = config.train_sources | config.validation_sources
    sources |= {f"eval.sets.{name}": source for name, source in sets.items()}
    of_agents = ["nemo_gym"] if config.env.nemo_gym is not None and not given else []
    for path, source in sources.items():
        name, key = source.env_name, f"{path}.env_name"
        fix, why = f"name one of {listed}, or set the others to null", "`env` has several environments"
        yield Rule("missing", key, several and name is None, related, fix, why)
        unknown = name is not None and name not in (*given, *of_agents)
        fix, says = f"write env.{name}, or name another section", f"{name!r}: `env` has {listed}"
        yield Rule("not-found", key, unknown, related, fix, says=says)
    named = {source.env_name for source in sources.values()}
    for name in given if several and sources and not config.data.type else ():
        unread = name not in named and None not in named
        yield Rule("has-no-effect", f"env.{name}", unread, why="no rows have this env_name")


RUN_RULES: Rules[RunConfig] = (
    *(
        Rule[RunConfig](
            "requires",
            _ENABLED,
            lambda run, name=name: (
                run.asynchronous and run.algorithm == name and not run.generations_per_prompt
            ),
            (key,),
            {_ENABLED: False, key: value},
            "responses come from the data set instead of being sampled",
        )
        for name, key, value in (
            ("dpo", "dpo.num_generations_per_prompt", 2),
            ("distillation", "distillation.on_policy", True),
        )
    ),
    Rule(
        "incompatible",
        _STREAMING,
        lambda run: run.streams and not isinstance(run, GRPOMasterConfig),
        (_ENABLED,),
        {_STREAMING: None},
        lambda run: f"{run.algorithm} trains whole steps only",
    ),
    Rule(
        "incompatible",
        _STREAMING,
        # A batch that does not divide the samples is reported in batching.
        lambda run: (
            run.streams
            and isinstance(run, GRPOMasterConfig)
            and run.samples_per_step > run.policy.train_global_batch_size
            and run.samples_per_step % run.policy.train_global_batch_size == 0
        ),
        (_ENABLED, _BATCH, _PROMPTS),
        lambda run: {_STREAMING: None, _BATCH: run.samples_per_step},
        "a streamed step is a single optimizer step",
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
        why="prompts with equal rewards are replaced immediately",
    ),
    _bounds_of_groups,
    Rule(
        "incompatible",
        f"{_COLOCATED}.enabled",
        lambda run: run.asynchronous and run.policy.generation.decodes_on_ranks,
        _OF_ENGINES,
        {f"{_COLOCATED}.enabled": False, _ENABLED: False},
        "the training ranks decode, and asynchronous runs need engines that decode meanwhile",
    ),
    Rule(
        "incompatible",
        f"{_COLOCATED}.enabled",
        lambda run: run.asynchronous and run.policy.generation.takes_turns and not run.cluster.on_cpu,
        _OF_ENGINES,
        lambda run: (
            f"set it to false with {_COLOCATED}.resources.gpus_per_node, or {run.key(_ENABLED)}: false"
        ),
        "these engines sleep while the ranks train",
    ),
    either(
        "requires",
        {"policy.generation.vllm_cfg.async_engine": True, _ENABLED: False},
        "it generates for whole batches only, not for single groups",
        where=lambda run: run.policy.generation.backend == "vllm",
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
        "estimators may need the whole step, for example to whiten advantages",
    ),
    Rule(
        "requires",
        "loop.adv_estimator.name",
        lambda run: (
            value_at(run, "loop.adv_estimator.name") == "gdpo"
            and len(run.env.rewards or ()) < 2
            and run.env.custom is None
            and run.env.endpoint is None
        ),
        ("env.rewards",),
        "name two rewards or more in env.rewards, or set adv_estimator.name: grpo",
    ),
    Rule(
        "incompatible",
        "loop.adv_estimator.name",
        lambda run: value_at(run, "loop.adv_estimator.name") == "gdpo" and len(run.env.given) > 1,
        ("env.rewards", "env.custom"),
        {"loop.adv_estimator.name": "grpo"},
        "it compares rewards by name, which differ between environments",
    ),
    *(
        Rule[RunConfig](
            "requires",
            f"grpo.{key}",
            lambda run, key=key: value_at(run, f"grpo.{key}") is not None and run.env.endpoint is None,
            (_ENDPOINT,),
            "set it to null",
            "only agents' answers are read for calls and thoughts",
        )
        for key in ("invalid_tool_call_advantage", "malformed_thinking_advantage")
    ),
    Rule(
        "incompatible",
        "policy.generation.mismatch_action",
        lambda run: (
            run.max_age
            and run.policy.generation.mismatch_threshold is not None
            and run.policy.generation.mismatch_action == "stop"
        ),
        ("policy.generation.mismatch_threshold", _ENABLED, _AGE),
        {"policy.generation.mismatch_action": "warn", "policy.generation.mismatch_threshold": None, _AGE: 0},
        "it would react to the age of the sampling weights",
    ),
    Rule(
        "missing",
        _CORRECTION,
        # Off-policy training without correction must be chosen explicitly in the recipe.
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
        "responses may come from older weights",
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
            "it would block the thread that serves the engines",
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
        f"scoring one answer may take {_LIMITS_OF_A_SCORE} x {SCORE_WITHIN_S} s",
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
            why="the environment runs in the driver process",
        )
        for name, field in EnvPoolConfig.model_fields.items()
        if name != "size"
    ),
    _environments,
    _weights,
    Rule(
        "requires",
        "env.reward_weights",
        lambda run: run.env.reward_weights and not run.env.rewards and run.env.custom is None,
        ("env.custom",),
        "remove it",
        says="needs named rewards, from env.rewards or env.custom",
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
        why="it must be a share of one GPU, or a number of whole GPUs",
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
                "a session may fork into several rows, and a critic's values do not carry over between rows",
            ),
            ("dpo", "a pair has two rows, and a session may fork into more"),
            ("sft", "nothing is sampled"),
            ("distillation", "the student samples one response per prompt"),
        )
    ),
    *(
        Rule[RunConfig](
            "incompatible",
            f"env.{task}",
            lambda run, task=task: run.env.endpoint is not None and run.env.given[:1] == [task],
            (_ENDPOINT,),
            "set one of them to null",
            "agents run the episodes themselves",
        )
        for task in TURN_TASKS
    ),
    Rule(
        "not-supported",
        _REPLAY,
        lambda run: run.policy.router_replay.enabled and run.algorithm not in ("grpo", "ppo"),
        fix={_REPLAY: False},
        why="only grpo and ppo compute log-probabilities of the same responses several times",
    ),
    Rule(
        "not-supported",
        _REPLAY,
        lambda run: run.policy.engines_return_routes and run.env.endpoint is not None,
        (_ENDPOINT,),
        {_REPLAY: False},
        "agents' sessions keep no routes",
    ),
    _turns,
)
