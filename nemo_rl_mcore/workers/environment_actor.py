"""An environment in a process of its own: a Ray actor, which answers one call after another."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray

from nemo_rl_mcore.config import EnvConfig
from nemo_rl_mcore.config.environment_pool import EnvPoolConfig
from nemo_rl_mcore.data.turns import Reply, Turn
from nemo_rl_mcore.environments.registry import make_environment
from nemo_rl_mcore.environments.replies import replies_of
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError
from nemo_rl_mcore.workers.cluster import RayCluster
from nemo_rl_mcore.workers.environment import rank_environment
from nemo_rl_mcore.workers.failures import RankFailure, RankIdentity, stderr_tail
from nemo_rl_mcore.workers.rank_actor import identity_of_this_process
from nemo_rl_mcore.workers.rank_calls import failure_of

_STACK_AT = 0.9
"""Share of the deadline after which a process writes to its standard error where it stands."""


class EnvironmentFailedError(Exception):
    """An environment gave no reply. The message says why in a line, equal for equal failures.

    number, actor: which one was asked. lost: whether that one is to be replaced. details: what else is known.
    """

    def __init__(self, reason: str, actor: EnvironmentActor, *, lost: bool, details: str = "") -> None:
        super().__init__(reason)
        self.number, self.actor = actor.number, str(actor)
        self.lost, self.details = lost, details


class EnvironmentProcess:
    """What runs there, in the main thread: math-verify keeps its limits by a signal."""

    def identify(self) -> RankIdentity:
        """Which process it is."""
        return identity_of_this_process()

    def build(self, config: EnvConfig, variables: Mapping[str, str]) -> None:
        """Build the environment; variables: added to those of the process."""
        os.environ.update(variables)
        self._environment = make_environment(config)
        self._weights, self._max_chars = config.reward_weights or {}, config.max_observation_chars

    def replies(self, turns: Sequence[Turn], within_s: float) -> list[Reply]:
        """See `replies_of`; within_s: after which the process will be killed."""
        faulthandler.dump_traceback_later(_STACK_AT * within_s)
        try:
            return replies_of(self._environment, turns, self._weights, self._max_chars)
        finally:
            faulthandler.cancel_dump_traceback_later()


class EnvironmentActor:
    """Its handle, for one caller at a time in an asyncio loop. It starts on any machine that has what it asks for.

    number: in messages.
    """

    def __init__(self, number: int, cluster: RayCluster, pool: EnvPoolConfig) -> None:
        self.number = number
        self._cluster, self._identity = cluster, RankIdentity("unknown", 0, "")
        self._killed = False
        as_actor: Any = ray.remote(EnvironmentProcess)
        self._actor = as_actor.options(
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": rank_environment(os.environ, on_cpu=not pool.num_gpus)},
        ).remote()

    def __str__(self) -> str:
        """Number and process."""
        return f"environment actor {self.number} ({self._identity})"

    async def start(self, config: EnvConfig) -> None:
        """Build the environment of a recipe. Raises EnvironmentFailedError, also for a start that takes too long."""
        limit_s = config.pool.start_timeout_s
        deadline = time.monotonic() + limit_s
        late = f"did not start within {limit_s:g} s (env.pool.start_timeout_s){_resources_asked(config.pool)}"
        self._identity = await self._result(self._actor.identify.remote(), limit_s, late)
        # As an argument: what stands in Ray's `runtime_env` is written into Ray's logs.
        built = self._actor.build.remote(config, given_variables(config.pool))
        await self._result(built, deadline - time.monotonic(), late)

    async def ask(self, turns: Sequence[Turn], within_s: float) -> list[Reply]:
        """The reply to each turn.

        Raises EnvironmentFailedError, and what ends the run: a RunStoppedError that is not of the user's code.
        """
        late = f"no reply within {within_s:g} s (env.pool.timeout_s)"
        return await self._result(self._actor.replies.remote(turns, within_s), within_s, late)

    def kill(self) -> None:
        """End the process at once; idempotent."""
        if not self._killed:
            self._killed = True
            self._cluster.kill(self._actor, self._identity)

    async def _result(self, ref: Any, within_s: float, late: str) -> Any:
        """What a call gives. late: what to say of one that gives nothing in time."""
        answer = await _settled(ref, within_s)
        if answer is None:
            raise EnvironmentFailedError(late, self, lost=True, details=self._stderr())
        if (error := answer.exception()) is None:
            return answer.result()
        raise self._failure(failure_of(self.number, self._identity, error))

    def _failure(self, failure: RankFailure) -> Exception:
        if failure.died:
            details = "\n".join(filter(None, [failure.details(), self._stderr()]))
            return EnvironmentFailedError("its process died", self, lost=True, details=details)
        if isinstance(failure.cause, RunStoppedError):
            if not isinstance(failure.cause, CustomCodeError):
                return failure.cause
            reason, _, details = str(failure.cause).partition("\n")
            return EnvironmentFailedError(reason, self, lost=False, details=details)
        return EnvironmentFailedError(failure.headline(), self, lost=False, details=failure.details())

    def _stderr(self) -> str:
        tail = stderr_tail(self._cluster.log_dir, self._identity)
        return tail and f"--- end of its standard error ---\n{tail}"


def _resources_asked(pool: EnvPoolConfig) -> str:
    """Name the resources that may not have been free, as the end of a sentence."""
    keys = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    asked = [f"env.pool.{key}: {number:g}" for key, number in keys.items() if number]
    return f"; it asks for {' and '.join(asked)}" if asked else ""


def given_variables(config: EnvPoolConfig) -> dict[str, str]:
    """What the driver gives to the processes of its environment variables; RunStoppedError for one that it lacks."""
    if missing := [name for name in config.variables if name not in os.environ]:
        raise RunStoppedError(
            f"env.pool.variables: {missing[0]} is not set where the run was started; export it",
            code="missing-variable",
        )
    return {name: os.environ[name] for name in config.variables}


async def _settled(ref: Any, within_s: float) -> Future[Any] | None:
    """The answer of a call, or its error; None where neither comes in time."""
    loop, settled = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settled.set)

    answer: Future[Any] = ref.future()
    # Not awaited itself: asyncio refuses some exceptions that an environment may raise, and tells of unread ones.
    answer.add_done_callback(tell)
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await settled.wait()
    return answer if answer.done() else None
