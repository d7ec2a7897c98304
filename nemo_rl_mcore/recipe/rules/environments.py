"""Where an environment runs, and what does not go with it."""

import math
from collections.abc import Iterator

from nemo_rl_mcore.config.base import Problem, has_no_effect, join_path
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.environment_pool import EnvPoolConfig
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.source import SourceConfig, each
from nemo_rl_mcore.recipe.rules.feature import Rules

_SIZE = "env.pool.size"
_TIMEOUT = "env.pool.timeout_s"
_OF_AGENTS = ("retries", "max_drop_rate", "variables")
_LIMITS_OF_A_SCORE = 3
"""Math-verify reads the answer of the data, that of the response, and compares them; each has its limit."""


def _beside_training(config: RunConfig) -> Iterator[Problem]:
    """Yield code that may take its time, or keeps it by a signal, in the thread that asks the engines."""
    if not config.asynchronous or config.env.pool_size:
        return
    for name in ("math", "rewards", "custom"):
        if getattr(config.env, name) is not None:
            yield Problem(
                "incompatible",
                _SIZE,
                f"0 does not go with {config.asynchrony_key}.enabled: true and env.{name}, which would hold up the "
                "thread that asks the engines",
                "set it to 1 or more",
                (f"{config.asynchrony_key}.enabled", f"env.{name}"),
            )


def _deadlines(config: RunConfig) -> Iterator[Problem]:
    """Yield a deadline that an expression may rightly pass."""
    env = config.env
    if env.math is None or not env.pool_size:
        return
    longest = _LIMITS_OF_A_SCORE * env.math.timeout_s
    if env.pool.timeout_s <= longest:
        yield Problem(
            "too-small",
            _TIMEOUT,
            f"{env.pool.timeout_s:g} is over before env.math.timeout_s: {env.math.timeout_s}, which holds "
            f"{_LIMITS_OF_A_SCORE} times in a score",
            f"set it above {longest}, or lower env.math.timeout_s",
            ("env.math.timeout_s",),
        )


def _dropped_answers(config: RunConfig) -> Iterator[Problem]:
    """Yield rows to drop of a source that does not end, of which nobody knows them all before they train."""
    if config.env.math is None or config.env.math.unparsable != "drop":
        return
    for place, source in each(config.data.train).items():
        if isinstance(source, SourceConfig) and source.streaming:
            yield Problem(
                "incompatible",
                "env.math.unparsable",
                f"drop does not go with {join_path('data.train', place)}.streaming: true",
                "set it to zero",
                (f"{join_path('data.train', place)}.streaming",),
            )


def _stall(config: RunConfig) -> Iterator[Problem]:
    """Yield a stall that is told before a reply that does not come is given up."""
    if not (config.asynchronous and config.env.pool_size):
        return
    pool, stall = config.env.pool, config.asynchrony.stall_timeout_s
    longest = pool.timeout_s * (pool.retries + 1)
    if stall is not None and stall <= longest:
        yield Problem(
            "too-small",
            f"{config.asynchrony_key}.stall_timeout_s",
            f"{stall:g} is over before a reply is given up, after {longest:g} (env.pool.timeout_s: "
            f"{pool.timeout_s:g}, asked once and env.pool.retries: {pool.retries} times more)",
            f"set it above {longest:g}, or lower the other two",
            (_TIMEOUT, "env.pool.retries"),
        )


def _unread(config: RunConfig) -> Iterator[Problem]:
    """Yield what is not read where the environment runs in the process of the loop, which waits for it."""
    given, default = config.env.pool, EnvPoolConfig()
    if config.env.pool_size:
        return
    read = ("size", *(_OF_AGENTS if config.env.endpoint is not None else ()))
    for name in EnvPoolConfig.model_fields:
        if name not in read and (value := getattr(given, name)) != getattr(default, name):
            yield has_no_effect(f"env.pool.{name}", value, f"with {_SIZE}: 0", _SIZE)


def _weights(config: RunConfig) -> Iterator[Problem]:
    """Yield weights of rewards that have no names, or other ones."""
    rewards, weights = config.env.rewards, config.env.reward_weights or {}
    for name in weights if rewards else ():
        if name not in (rewards or {}):
            given = ", ".join(rewards or {})
            yield Problem(
                "not-found", f"env.reward_weights.{name}", f"no such reward; env.rewards has {given}"
            )
    if weights and not rewards and config.env.custom is None:
        yield Problem(
            "requires",
            "env.reward_weights",
            "given without env.rewards and env.custom: other environments give one reward, which has no name",
            "remove it",
            ("env.custom",),
        )


def _answers(config: RunConfig) -> Iterator[Problem]:
    """Yield rows without an answer, where something else than reward functions reads it."""
    if config.env.rewards or config.env.custom:
        read_by = None if config.row_kind is RowKind.PROMPTS else config.algorithm
    elif config.env.endpoint is not None and not config.env.given:
        read_by = None
    else:
        read_by = f"env.{next(iter(config.env.given), 'arithmetic')}"
    for path, source in (config.train_sources | config.validation_sources).items():
        if source.output_key is None and read_by is not None and config.row_kind is not RowKind.PAIRS:
            yield Problem(
                "requires",
                f"{path}.output_key",
                f"null leaves {read_by} no answer",
                "name the column of the answer",
            )


def _gpus(config: RunConfig) -> Iterator[Problem]:
    """Yield GPUs of processes where there are none, and a number of them that Ray does not give."""
    gpus = config.env.pool.num_gpus
    if not (gpus and config.env.pool_size):
        return
    if config.cluster.on_cpu:
        yield Problem(
            "requires",
            "env.pool.num_gpus",
            f"{gpus:g} needs machines with GPUs, and cluster.gpus_per_node: 0 has none",
            "set it to 0",
            ("cluster.gpus_per_node",),
        )
    elif gpus > 1 and gpus != int(gpus):
        what = f"{gpus:g} is neither a share of one GPU nor a number of whole ones"
        yield Problem("not-allowed", "env.pool.num_gpus", what, f"set it to {math.ceil(gpus)}")


RULES = Rules(
    of_runs=(_beside_training, _deadlines, _dropped_answers, _stall, _unread, _weights, _answers, _gpus)
)
