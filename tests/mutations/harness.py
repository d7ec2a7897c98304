"""What tables of mutations share: checks of the test suite, run on gloo ranks while a known mistake is made."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """A function of a test file, or of a table, as it runs on gloo ranks, and what is expected of the results."""

    module: str
    function: str
    args: tuple[Any, ...]
    passes: Callable[[list[Any]], bool]
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.module}.{self.function}, {self.ranks} rank{'s' * (self.ranks > 1)}"


@dataclass(frozen=True)
class Mutation:
    """A mistake and the checks that may catch it."""

    apply: Callable[[], AbstractContextManager[Any]]
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__

    @property
    def file(self) -> str:
        """Where the mistake is written down."""
        return inspect.unwrap(self.apply).__code__.co_filename


def run_check(mistake: tuple[str, str] | None, module: str, function: str, args: tuple[Any, ...]) -> Any:
    """In a rank: the check's function under the mutation of this file and name."""
    for folder in (Path(__file__).parent, Path(__file__).parents[1]):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    made: AbstractContextManager[Any] = nullcontext()
    if mistake is not None:
        file, name = mistake
        made = getattr(importlib.import_module(Path(file).stem), name)()
    with made:
        return getattr(importlib.import_module(module), function)(*args)


def failure(ranks: Callable[[int], Any], check: Check, mutation: Mutation | None = None) -> str | None:
    """How the check fails, under the mutation if there is one; None if it passes."""
    mistake = None if mutation is None else (mutation.file, mutation.name)
    try:
        answers = ranks(check.ranks).run(run_check, mistake, check.module, check.function, check.args)
    except AssertionError as error:  # a rank raised
        lines = str(error).splitlines()
        return next((line for line in reversed(lines) if "Error" in line or "Failed" in line), lines[-1])
    return None if check.passes(answers) else f"found {answers}"


def caught_by(ranks: Callable[[int], Any], mutation: Mutation) -> tuple[Check, str] | None:
    """The first check that fails under the mutation, and how; None if the mutation survives."""
    for check in mutation.checks:
        reason = failure(ranks, check, mutation)
        if reason is not None:
            return check, reason
    return None


def run_table(mutations: tuple[Mutation, ...]) -> int:
    """Run a table on pools of one and two ranks, and print it; 1 if a mutation survives or a check fails unmutated."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
    from rank_pool import Ranks

    ranks = Ranks()
    try:
        return _report(ranks, mutations)
    finally:
        ranks.close()


def _report(ranks: Callable[[int], Any], mutations: tuple[Mutation, ...]) -> int:
    failed = False
    for check in {str(check): check for mutation in mutations for check in mutation.checks}.values():
        reason = failure(ranks, check)
        if reason is not None:
            print(f"{check} fails without a mutation: {reason}")
            failed = True
    if failed:
        return 1
    for mutation in mutations:
        caught = caught_by(ranks, mutation)
        failed |= caught is None
        print(
            f"{mutation.name:<38} {'SURVIVES' if caught is None else f'{caught[0]}: {caught[1][:60]}'}",
            flush=True,
        )
    return int(failed)
