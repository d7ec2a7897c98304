"""Kill a part of a run, and see: seconds to detection, what is trained, asked and done again, what is left.

    python tests/chaos/kill_table.py [--only WORD] [--keep FOLDER]

Each row is a run of twelve steps (nine of other algorithms than GRPO) over two ranks of each model, and two engines
where it is asynchronous, in which one thing happens; where that ends the command, the same command is run again. The
invariants are those of invariants.py, judged by the journals of the ranks and engines. Final weights are compared
with an undisturbed run, to the bit, where that is promised: of synchronous runs, and of those whose groups are never
older than their step. What is done again is counted in steps, of PPO in passes over the rows of a step. Exits with 1
when a row is not as it must be.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from checkpoint_tensors import tensors_in  # noqa: E402
from invariants import answers, broken, redone_steps  # noqa: E402
from journaled import CALL_S, PATHS, JournaledRun, Recipe, a_run  # noqa: E402
from journals import Fault  # noqa: E402
from processes import within  # noqa: E402
from raylets import Raylets  # noqa: E402

DETECTED_S = 2.0
BETWEEN_CALLS_S = 15.0
"""A step's answers, or a start, and what a call takes to tell."""
LIMIT_S = 240.0
SYNC, AGE_0, AGE_1 = Recipe(None), Recipe(0), Recipe(1)
AGENTS = tuple(Recipe(age, agents=True, steps=9) for age in (None, 0, 1))
BACKGROUND = (
    Recipe(None, background=True),
    Recipe(1, background=True),
    Recipe(0, agents=True, background=True, steps=9),
)
STREAMED, DYNAMIC = Recipe(1, chunk=2), Recipe(1, dynamic=True)
OTHERS = tuple(Recipe(age, one, steps=9) for one in ("ppo", "dpo", "distillation") for age in (None, 1))
TWO_MACHINES = Recipe(None, machines=2)


@dataclass(frozen=True)
class Row:
    """faults: strike from inside. strike: from outside. machine: strikes the second of two. within_s: until it is told.

    again: the fault ends the command, and the same one goes on. redoes: whether steps must have been done again. says:
    a pattern that the command must tell, besides the name.
    """

    name: str
    recipe: Recipe
    faults: tuple[Fault, ...] = ()
    strike: Callable[[JournaledRun], None] | None = None
    machine: Callable[[JournaledRun, Raylets, str], None] | None = None
    within_s: float = DETECTED_S
    again: bool = False
    redoes: bool = False
    says: str = ""


@dataclass
class Found:
    """detected_s: None where nobody is there to tell it."""

    detected_s: float | None = None
    told: str = ""
    asked: str = ""
    redone: int = 0
    weights: str = "not promised"
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def of_rank(point: str, action: str, nth: int = 7, who: str = "rank_1") -> tuple[Fault, ...]:
    return (Fault(who, point, nth, action),)


def of_engine(point: str, action: str, nth: int) -> tuple[Fault, ...]:
    return (Fault("engine", point, nth, action),)


def driver_killed(run: JournaledRun) -> None:
    run.wait_for_step(6)
    run.strike("driver", run.process.pid)


def driver_killed_beside_agents(run: JournaledRun) -> None:
    """While some play: all that they have started ends, too."""
    run.wait_for_step(6)
    assert within(LIMIT_S, lambda: any("sleep" in title for title in run.watch.alive().values()))
    run.strike("driver", run.process.pid)


def raylet_killed(run: JournaledRun) -> None:
    run.wait_for_step(6)
    raylets = [
        pid for pid, title in run.watch.alive().items() if os.path.basename(title.split()[0]) == "raylet"
    ]
    run.strike("raylet", raylets[0])


def machine_replaced(run: JournaledRun, raylets: Raylets, second: str) -> None:
    run.wait_for_step(6)
    run.strike("machine", raylets.raylet(second))
    raylets.join()


WHO_IS_NAMED = {
    "machine": r"node .* is gone",
    "rank": r"policy rank 1 ",
    "value": r"value rank 1 ",
    "teacher": r"teacher rank 1 ",
    "engine": r"embedded engine [01] ",
    "raylet": "raylet",
    "driver": "",
}
"""What the first line that is told must have."""
STOPPED_S = CALL_S + 6
"""The deadline, and the look at each process that is silent."""


def rows() -> Iterator[Row]:
    starting, name = of_rank("start", "kill", nth=1), f"rank killed while it starts, {SYNC.how}"
    yield Row(name, SYNC, starting, within_s=BETWEEN_CALLS_S, again=True)
    hanging = (Fault("rank_1", "forward", 7, "slow", seconds=3600.0),)
    ends, stacks = replace(SYNC, restarts=0), r"time\.sleep\(self\.seconds\)"
    told_s = BETWEEN_CALLS_S + CALL_S
    yield Row(f"rank hanging, {SYNC.how}", ends, hanging, within_s=told_s, again=True, says=stacks)
    for recipe in (SYNC, AGE_0, AGE_1):
        how = recipe.how
        yield Row(f"rank killed in forward, {how}", recipe, of_rank("forward", "kill"), redoes=True)
        yield Row(f"rank killed in finish, {how}", recipe, of_rank("optimizer", "kill"), redoes=True)
        yield Row(f"rank killed in save, {how}", recipe, of_rank("save", "kill", nth=2), redoes=True)
        yield Row(f"rank raising, {how}", recipe, of_rank("forward", "raise"))
        stopped = of_rank("forward", "stop")
        yield Row(f"rank stopped, {how}", recipe, stopped, within_s=STOPPED_S, redoes=True)
        yield Row(f"driver killed, {how}", recipe, strike=driver_killed, again=True)
    for recipe in (AGE_0, AGE_1):
        how = recipe.how
        yield Row(f"engine killed decoding, {how}", recipe, of_engine("decoding", "kill", 60))
        yield Row(f"engine killed in refit, {how}", recipe, of_engine("load_bucket", "kill", 5))
        yield Row(f"engine stopped, {how}", recipe, of_engine("decoding", "stop", 60), within_s=STOPPED_S)
    yield Row("raylet killed, K = 0", AGE_0, strike=raylet_killed, again=True, within_s=5.0)
    yield Row("machine gone, another joins", TWO_MACHINES, machine=machine_replaced, redoes=True)
    yield from (*_of_chunks(), *_of_copies(), *_of_agents(), *_of_other_algorithms())


def _of_chunks() -> Iterator[Row]:
    """Of GRPO alone: steps that begin before all groups are there, and groups that no step takes."""
    # In which step a pass is depends on how many chunks the steps had; no checkpoint is to be right before it.
    from_the_start, how = replace(STREAMED, period=STREAMED.steps), STREAMED.how
    yield Row(f"rank killed in forward, {how}", from_the_start, of_rank("forward", "kill"), redoes=True)
    yield Row(f"rank killed in finish, {how}", STREAMED, of_rank("optimizer", "kill"), redoes=True)
    for recipe in (STREAMED, DYNAMIC):
        yield Row(f"driver killed, {recipe.how}", recipe, strike=driver_killed, again=True)


def _of_copies() -> Iterator[Row]:
    """Of checkpoints that are written in the background; of each, the second one is struck at its second part."""
    for recipe in BACKGROUND:
        struck, within_s = of_rank("write", "kill", 5), BETWEEN_CALLS_S if recipe.agents else DETECTED_S
        name = f"rank killed while a copy is written, {recipe.how}"
        yield Row(name, recipe, struck, within_s=within_s, redoes=True)
        yield Row(f"driver killed, {recipe.how}", recipe, strike=driver_killed, again=True)


def _of_agents() -> Iterator[Row]:
    """Sessions are open when it strikes: a group whose engine or rank dies is played again by new agents."""
    for recipe in AGENTS:
        yield Row(f"rank killed in forward, {recipe.how}", recipe, of_rank("forward", "kill"), redoes=True)
        struck = driver_killed_beside_agents
        yield Row(f"driver killed, {recipe.how}", recipe, strike=struck, again=True)
        if recipe.age is not None:
            yield Row(f"engine killed decoding, {recipe.how}", recipe, of_engine("decoding", "kill", 60))


def _of_other_algorithms() -> Iterator[Row]:
    for recipe in OTHERS:
        how, late = recipe.how, 7 * recipe.kind.updates - recipe.kind.optimizer_steps + 1
        yield Row(f"rank killed in forward, {how}", recipe, of_rank("forward", "kill", late), redoes=True)
        yield Row(f"rank killed in finish, {how}", recipe, of_rank("optimizer", "kill", late), redoes=True)
        if "value" in recipe.kind.models:
            of_critic = of_rank("optimizer", "kill", late, "value_rank_1")
            yield Row(f"critic's rank killed in finish, {how}", recipe, of_critic, redoes=True)
        for model in recipe.kind.frozen:
            of_frozen = of_rank("get_topk_logits", "kill", who=f"{model}_rank_1")
            yield Row(f"{model}'s rank killed, {how}", recipe, of_frozen, redoes=True)
        yield Row(f"driver killed, {how}", recipe, strike=driver_killed, again=True)
        if recipe.age is not None:
            yield Row(f"engine killed decoding, {how}", recipe, of_engine("decoding", "kill", 60))


@cache
def undisturbed(recipe: Recipe) -> dict:
    with a_run(recipe) as run:
        assert run.end(LIMIT_S) == 0, run.text()
        return final_tensors(run, recipe)


def final_tensors(run: JournaledRun, recipe: Recipe) -> dict:
    """Of all models, by model and name."""
    last = run.saved / f"step_{recipe.steps}"
    of_models = ((model, tensors_in(last / model)) for model in recipe.kind.models)
    return {f"{model}.{name}": tensor for model, found in of_models for name, tensor in found.items()}


def try_row(row: Row, folder: Path) -> Found:
    found = Found()
    with ExitStack() as open_runs:
        environment: Mapping[str, str] = {}
        if row.machine is not None:
            os.environ["PYTHONPATH"] = PATHS  # of the ranks, which raylets start
            raylets = open_runs.enter_context(Raylets())
            second, environment = raylets.join(), raylets.environment
        run = open_runs.enter_context(a_run(row.recipe, *row.faults, folder=folder, machines=environment))
        if row.strike is not None:
            row.strike(run)
        if row.machine is not None:
            row.machine(run, raylets, second)
        status = run.end(LIMIT_S)
        _see_how_it_was_told(row, run, found)
        if row.again:
            if status in (0, None):
                found.wrong.append(f"exit status {status} of what was to end it")
            run = open_runs.enter_context(a_run(row.recipe, folder=folder))
            status = run.end(LIMIT_S)
        if status != 0:
            found.wrong.append(f"exit status {status}: {run.text()[-600:]}")
        found.left += run.left()
        _judge(row, run, found, finished=status == 0)
    return found


def _see_how_it_was_told(row: Row, run: JournaledRun, found: Found) -> None:
    struck = run.struck()
    if not struck:
        found.wrong.append("the fault did not strike")
        return
    later = [(at, line) for at, line in run.said if at >= struck[0]["time"] and line.strip()]
    if later:
        found.detected_s, found.told = later[0][0] - struck[0]["time"], later[0][1]
        if not re.search(WHO_IS_NAMED[struck[0]["who"].split("_")[0]], found.told):
            found.wrong.append(f"told is {found.told!r}")
        if found.detected_s > row.within_s:
            found.wrong.append(f"told after {found.detected_s:.1f} s of {row.within_s:g}")
        if not re.search(row.says, run.text()):
            found.wrong.append(f"does not say {row.says!r}")
    elif struck[0]["who"] != "driver":
        found.wrong.append("nothing was told")
    if row.again:
        found.left += run.left()


def _judge(row: Row, run: JournaledRun, found: Found, *, finished: bool) -> None:
    unused = Counter(run.unused() if row.recipe.dynamic else ())
    if row.recipe.dynamic and (not unused or max(unused.values()) > 1):
        found.wrong.append(
            f"the log has groups that were not used {unused.total()} times, {len(unused)} of them"
        )
    expected = row.recipe.expected({*unused}, finished=finished)
    found.wrong += broken(run.journals, expected)
    found.redone = redone_steps(run.journals)
    if row.redoes and not found.redone:
        found.wrong.append("no step was done again")
    asked = answers(run.journals)
    if row.recipe.age is not None:
        lost = [
            f"{number} {what}"
            for what, number in (("cut off", asked.cut_off), ("failed", asked.raised))
            if number
        ]
        found.asked = " + ".join([f"{asked.begun} = {asked.ended}", *lost])
    if finished and row.recipe.exact:
        now = final_tensors(run, row.recipe)
        wanted = undisturbed(replace(row.recipe, machines=1, more=(), background=False))
        different = [name for name in wanted if name not in now or not wanted[name].equal(now[name])]
        found.weights = f"{len(different)} tensors differ" if different else "equal"
        if different or now.keys() != wanted.keys():
            found.wrong.append(f"final weights: {found.weights}")
    found.wrong += [f"left: {title}" for title in found.left]


HEADER = (
    "| what | told after | trained once | dispatches | redone | final weights | left | wrong |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line_of(row: Row, found: Found) -> str:
    once = "no" if any("step" in one for one in found.wrong) else "yes"
    told = "" if found.detected_s is None else f"{found.detected_s:.1f} s"
    cells = (row.name, told, once, found.asked, found.redone, found.weights, len(found.left))
    return f"| {' | '.join(map(str, cells))} | {'; '.join(found.wrong) or 'nothing'} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--keep", type=Path, help="folder that the runs are left in")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = False
    print(HEADER, flush=True)
    for row in rows():
        if options.only not in row.name:
            continue
        folder = Path(tempfile.mkdtemp(prefix="kill_", dir=options.keep))
        found = try_row(row, folder)
        failed |= bool(found.wrong)
        print(line_of(row, found), flush=True)
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
