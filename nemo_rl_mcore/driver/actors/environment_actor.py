"""An environment in a separate process: a Ray actor, which answers one call after another.

`EnvironmentProcess` is what runs there; `EnvironmentActor` is how the driver supervises it, for one asyncio loop at a
time: that of the thread that starts it, then that of the environments' thread.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import ray

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.custom_code import RAISED, hand_over, handed_objects
from nemo_rl_mcore.config.environment_pool import EnvPoolConfig
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.driver.actors.actor import (
    LOOK_EVERY_S,
    Actor,
    Construction,
    GivenUpError,
    actor_class,
    settled,
)
from nemo_rl_mcore.driver.actors.cluster import RayCluster
from nemo_rl_mcore.driver.actors.environment import rank_environment
from nemo_rl_mcore.driver.actors.failures import stderr_tail
from nemo_rl_mcore.driver.actors.placement import RankSlot
from nemo_rl_mcore.environment.registry import make_environment
from nemo_rl_mcore.environment.replies import replies_of
from nemo_rl_mcore.errors import RunStoppedError

_STACK_AT = 0.9
"""Share of the deadline after which a process writes to its standard error where it stands."""


class EnvironmentFailedError(Exception):
    """An environment gave no reply. The message says why in a line, equal for equal failures.

    number, actor: which one was asked. lost: whether that one is to be replaced. details: what else is known.
    """

    def __init__(self, reason: str, actor: Actor, *, lost: bool, details: str = "") -> None:
        super().__init__(reason)
        self.number, self.actor = actor.number, str(actor)
        self.lost, self.details = lost, details

    def report(self, before: str, after: str = "") -> str:
        """Return the reason between two texts, and the details in lines below."""
        return "\n".join(filter(None, [f"{self.actor}{before}: {self}{after}", self.details]))


class EnvironmentProcess:
    """Runs there, in the main thread: math-verify keeps its limits by a signal."""

    def __init__(self, config: EnvConfig, code: Mapping[str, object]) -> None:
        hand_over(code)
        self._environment = make_environment(config)
        self._weights, self._max_chars = config.reward_weights or {}, config.max_observation_chars

    def replies(self, turns: Sequence[Turn], within_s: float) -> list[Reply]:
        """See `replies_of`; within_s: after which the process will be killed."""
        faulthandler.dump_traceback_later(_STACK_AT * within_s)
        try:
            return replies_of(self._environment, turns, self._weights, self._max_chars)
        finally:
            faulthandler.cancel_dump_traceback_later()


@dataclass(eq=False)
class EnvironmentActor(Actor):
    """Such a process, on any machine that has what it asks for. A `Member` of a pool.

    serves: whether the pool gives it turns. From then on it is the pool that reports the end of Ray: no reply is
    dropped for it.
    """

    serves: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls, number: int, cluster: RayCluster, pool: EnvPoolConfig, lost: Callable[[], str | None]
    ) -> Self:
        """Begin its process; see `Actor.begin`."""
        options = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus, "scheduling_strategy": "SPREAD"}
        slot = RankSlot(number, rank_environment(os.environ, on_cpu=not pool.num_gpus), options)
        remote_class = actor_class(EnvironmentProcess, with_health=False)
        return cls.begin(remote_class, slot, "environment actor", cluster, lost)

    async def start(self, config: EnvConfig) -> None:
        """Build the environment of a recipe. Raises EnvironmentFailedError, also for a start that takes too long."""
        limit_s = config.pool.start_timeout_s
        deadline = time.monotonic() + limit_s
        late = f"did not start within {limit_s:g} s (env.pool.start_timeout_s){_resources_asked(config.pool)}"
        self.identity = await self._result(self.handle._identify.remote(), limit_s, late)
        construction = Construction((config, handed_objects()), environment=given_variables(config.pool))
        built = self.handle._build.remote(ray.put(construction))
        await self._result(built, deadline - time.monotonic(), late)

    async def ask(self, turns: Sequence[Turn], within_s: float) -> list[Reply]:
        """Return the reply to each turn.

        Raises EnvironmentFailedError, and what ends the run: a RunStoppedError but what the user's code has raised.
        """
        late = f"no reply within {within_s:g} s (env.pool.timeout_s)"
        return await self._result(self.handle.replies.remote(turns, within_s), within_s, late)

    async def _result(self, ref: Any, within_s: float, late: str) -> Any:
        """Return what a call gives. late: what to say of one that gives nothing in time."""
        deadline = time.monotonic() + within_s

        def over() -> str | None:
            lost = None if self.serves else self.lost()
            return lost or (late if time.monotonic() >= deadline else None)

        try:
            answer = await settled(ref, over, min(LOOK_EVERY_S, max(within_s / 8, 0.01)))
        except GivenUpError as why:
            raise EnvironmentFailedError(str(why), self, lost=True, details=self._stderr()) from None
        if (error := answer.exception()) is None:
            return answer.result()
        raise self._failed(error)

    def _failed(self, error: BaseException) -> Exception:
        failure = self.failure(error)
        if failure.died:
            details = "\n".join(filter(None, [failure.details(), self._stderr()]))
            return EnvironmentFailedError("its process died", self, lost=True, details=details)
        if isinstance(failure.cause, RunStoppedError):
            if failure.cause.code != RAISED:
                return failure.cause
            reason, _, details = str(failure.cause).partition("\n")
            return EnvironmentFailedError(reason, self, lost=False, details=details)
        return EnvironmentFailedError(failure.headline(), self, lost=False, details=failure.details())

    def _stderr(self) -> str:
        tail = stderr_tail(self.cluster.log_dir, self.identity) if self.identity else ""
        return tail and f"--- end of its standard error ---\n{tail}"


def _resources_asked(pool: EnvPoolConfig) -> str:
    """Name the resources that may not have been free, as the end of a sentence."""
    keys = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    asked = [f"env.pool.{key}: {number:g}" for key, number in keys.items() if number]
    return f"; it asks for {' and '.join(asked)}" if asked else ""


def given_variables(config: EnvPoolConfig) -> dict[str, str]:
    """Return what the driver gives to the processes of its environment; RunStoppedError for a variable it lacks."""
    if missing := [name for name in config.variables if name not in os.environ]:
        raise RunStoppedError(
            f"env.pool.variables: {missing[0]} is not set where the run was started; export it",
            code="missing-variable",
        )
    return {name: os.environ[name] for name in config.variables}
