"""Functions as rewards, by name; an answer's reward is their weighted sum."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nemo_rl_mcore.config.custom_code import custom_code, function_at
from nemo_rl_mcore.config.data import GIVEN_TO_REWARDS, SAME_AS_GIVEN
from nemo_rl_mcore.environment.interface import EnvironmentReturn, number_each
from nemo_rl_mcore.errors import RefusedError


@dataclass(frozen=True)
class _Function:
    """key: the function's path in the recipe and in Python, for messages. takes: parameter names, None for any."""

    key: str
    call: Callable[..., Any]
    takes: set[str] | None
    needs: set[str]


class RewardFunctions:
    """An environment that ends each episode with its first answer, and rewards it by functions.

    A function is called with lists, with an element per answer, by the names of its parameters: prompts, responses,
    answers (str), finished (bool: the response ended by itself), and columns that `data.train.columns` lists; `**name`
    takes all of them. A function, or coroutine function, returns a finite number per answer.

    Raises RefusedError, naming the key, for a path without a function, and for a function with positional parameters.
    """

    def __init__(self, paths: Mapping[str, str], *, unscored: bool = False) -> None:
        """unscored: a reward may be None; an answer with such a reward is then not scored at all."""
        self._unscored = unscored
        self.by_reward: dict[str, _Function] = {}
        for reward, path in paths.items():
            key = f"env.rewards.{reward}"
            function = function_at(path, key)
            takes, needs, takes_all = set[str](), set[str](), False
            for name, parameter in inspect.signature(function).parameters.items():
                match parameter.kind:
                    case inspect.Parameter.VAR_KEYWORD:
                        takes_all = True
                    case inspect.Parameter.KEYWORD_ONLY | inspect.Parameter.POSITIONAL_OR_KEYWORD:
                        takes.add(name)
                        needs |= {name} if parameter.default is inspect.Parameter.empty else set()
                    case _:
                        what = f"takes {parameter} by position, but is called by parameter names"
                        raise RefusedError(f"{key}: {path} {what}", code="custom-arguments")
            self.by_reward[reward] = _Function(
                f"{key}: {path}", function, None if takes_all else takes, needs
            )

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        last = [log[-1] for log in message_log_batch]
        columns = [known.get("columns", {}) for known in metadata]
        given: dict[str, list[Any]] = {
            "prompts": [known["prompt"] for known in metadata],
            "responses": [answer["content"] for answer in last],
            "answers": [known["answer"] for known in metadata],
            "finished": [answer["finished"] for answer in last],
        }
        names = dict.fromkeys(name for row in columns for name in row)
        given = {name: [row.get(name) for row in columns] for name in names} | given
        found: dict[str, Any] = {}
        for name, function in self.by_reward.items():
            taken = {
                key: one for key, one in given.items() if function.takes is None or key in function.takes
            }
            with custom_code(function.key):
                found[name] = function.call(**taken)
        awaited = {name: one for name, one in found.items() if inspect.isawaitable(one)}

        async def result(name: str, one: Awaitable[Any]) -> Any:
            with custom_code(self.by_reward[name].key):
                return await one

        async def together() -> list[Any]:
            return await asyncio.gather(*(result(name, one) for name, one in awaited.items()))

        if awaited:  # side by side; in a thread, since this one may run an event loop already
            with ThreadPoolExecutor(1) as thread:
                found |= zip(awaited, thread.submit(asyncio.run, together()).result(), strict=True)
        indices, nothing = [known["index"] for known in metadata], [None] * len(last)
        return EnvironmentReturn(
            observations=nothing,
            metadata=nothing,
            next_stop_strings=nothing,
            rewards={
                name: number_each(self.by_reward[name].key, values, indices, unscored=self._unscored)
                for name, values in found.items()
            },
            terminateds=[True] * len(last),
        )


def require_columns(functions: RewardFunctions, there: Mapping[str, Iterable[str]]) -> None:
    """Raise RefusedError for a parameter that is no column of a source; there: the sources' columns, by recipe path."""
    for function in functions.by_reward.values():
        for path, columns in there.items():
            if lacking := sorted(function.needs - {*GIVEN_TO_REWARDS, *columns}):
                known = SAME_AS_GIVEN.get(lacking[0])
                hint = f"; or did you mean {known}?" if known else ""
                takes = f"the function takes {', '.join(lacking)}, which {path}.columns does not list"
                what = f"{function.key}: {takes}"
                given = f"functions are given {', '.join(GIVEN_TO_REWARDS)} and those columns"
                raise RefusedError(f"{what}; {given}; add {lacking[0]} there{hint}", code="unknown-column")
