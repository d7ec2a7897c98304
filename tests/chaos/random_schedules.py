"""Random faults, seeded: on a fake trainer in one process, or on real ranks and engines; see invariants.py.

    python tests/chaos/random_schedules.py [--first SEED] [--count 100]
    python tests/chaos/random_schedules.py --real [--first SEED] [--count 10]

A run that ends by its faults is started again by the same command, until it has all of its steps. Exits with 1 when an
invariant is broken, and tells the seed.
"""

import argparse
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fake_trainer import (  # noqa: E402
    GROUPS,
    SAMPLES,
    STEPS,
    Chance,
    DriverDiedError,
    recipe,
    start,
)
from invariants import Expected, broken, redone_steps  # noqa: E402
from journaled import KINDS, Recipe, a_run, note_start  # noqa: E402
from journals import Fault  # noqa: E402
from kill_table import AGE_0, AGE_1, LIMIT_S, OTHERS, STREAMED, SYNC  # noqa: E402

from nemo_rl_mcore.driver.parts import open_parts  # noqa: E402
from nemo_rl_mcore.driver.rollouts.ledger import ORDERS  # noqa: E402
from nemo_rl_mcore.errors import RunStoppedError  # noqa: E402

STARTS, STARTS_OF_REAL_RUNS = 20, 4
AGES = (None, 0, 1, 2)


def fake_schedule(seed: int, folder: Path) -> tuple[list[str], str]:
    """What was broken, and a line of what happened."""
    drawn = random.Random(seed)
    age, algorithm = drawn.choice(AGES), drawn.choice(("grpo", *KINDS))
    chunk = drawn.choice((None, 1, 2)) if algorithm == "grpo" else None
    chance = Chance(seed, rate=drawn.choice((0.02, 0.05, 0.1)), most=drawn.randint(1, 12))
    order, background = drawn.choice(tuple(ORDERS)), drawn.random() < 0.5
    return fake_run(folder, chance, age, chunk, algorithm, order, background=background)


def fake_run(
    folder: Path,
    chance: Chance,
    age: int | None,
    chunk: int | None = None,
    algorithm: str = "grpo",
    order: str = "in_order",
    *,
    background: bool = False,
) -> tuple[list[str], str]:
    config, kind = recipe(folder, age, chunk, algorithm, order, background=background), KINDS[algorithm]
    (folder / "journals").mkdir()
    (folder / "log").mkdir()
    lives, ends = count(1), []
    for _ in range(STARTS):
        note_start(folder / "journals")
        try:
            start(folder, config, chance, lives)
        except (RunStoppedError, DriverDiedError) as error:
            ends.append(type(error).__name__)
        else:
            break
    prompts = open_parts(config).prompts
    expected = Expected(
        {step: [one.index for one in prompts.train_batch(step, GROUPS)] for step in range(1, STEPS + 1)},
        SAMPLES,
        ranks=1,
        asynchronous=age is not None,
        passes=kind.passes,
        models=kind.models,
        frozen=kind.frozen,
        chosen=kind.chosen,
        repeats=age is None or (age == 0 and chunk is None),
        in_order=not age or order == "in_order",
    )
    how = "synchronous" if age is None else f"K = {age}, chunks of {chunk or GROUPS}"
    how = how if age is None or order == "in_order" else f"{how}, {order}"
    how = f"{how}, saved in the background" if background else how
    how = how if algorithm == "grpo" else f"{algorithm}, {how}"
    redone = redone_steps(folder / "journals")
    line = f"{how}: {len(chance.struck)} faults, {redone} steps again, {len(ends) + 1} starts"
    problems = broken(folder / "journals", expected)
    if problems:
        line += f"; {chance.struck}; {ends}"
    return problems, line


def real_schedule(seed: int, folder: Path) -> tuple[list[str], str]:
    drawn = random.Random(seed)
    real = replace(drawn.choice((SYNC, AGE_0, AGE_1, STREAMED, *OTHERS)), restarts=6, engine_restarts=6)
    faults = [_real_fault(drawn, real) for _ in range(drawn.randint(1, 3))]
    at_driver = drawn.randint(2, real.steps - 2) if drawn.random() < 0.25 else None
    statuses: list[int | None] = []
    for starts in range(STARTS_OF_REAL_RUNS):
        with a_run(real, *faults, folder=folder) as run:
            if starts == 0 and at_driver is not None:
                run.wait_for_step(at_driver)
                run.strike("driver", run.process.pid)
            statuses.append(run.end(LIMIT_S))
            told, left = run.text(), run.left()
            if left or statuses[-1] == 0:
                break
    problems = [*broken(run.journals, real.expected()), *(f"left: {title}" for title in left)]
    if statuses[-1] != 0:
        problems.append(f"exit statuses {statuses}: {told[-500:]}")
    what = ", ".join(f"{one.who} {one.action} at {one.point} {one.nth}" for one in faults)
    killed = f", driver after step {at_driver}" if at_driver else ""
    again = f"{redone_steps(run.journals)} steps again, {len(statuses)} starts"
    return problems, f"{real.how}: {len(run.struck())} of [{what}{killed}], {again}"


def _real_fault(drawn: random.Random, real: Recipe) -> Fault:
    if real.age is not None and drawn.random() < 0.4:
        point, most = drawn.choice(
            (("decoding", 120), ("load_bucket", 10), ("finish_refit", 10), ("generate:end", 30))
        )
        action = drawn.choice(("kill", "kill", "stop", "slow"))
        return Fault("engine", point, drawn.randint(1, most), action, 1.0 if action == "slow" else 0.0)
    of_step = ("begin_train_step", "finish_train_step:end") if real.chunk else ("train", "train:end")
    of_save = ("save", "save_checkpoint:end", "load_checkpoint")
    point = drawn.choice(("forward", "optimizer", *of_step, *of_save))
    actions = (
        ("kill", "stop", "slow", "raise") if point in ("forward", "train:end") else ("kill", "stop", "slow")
    )
    action = "full" if point == "save" and drawn.random() < 0.3 else drawn.choice(actions)
    nth = drawn.randint(1, 2 if point in of_save else real.steps * real.kind.passes)
    model = drawn.choice(("", *(f"{other}_" for other in real.kind.models[1:])))
    return Fault(
        f"{model}rank_{drawn.randrange(real.ranks)}", point, nth, action, 1.0 if action == "slow" else 0.0
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args()
    wrong, schedule = 0, real_schedule if options.real else fake_schedule
    number = options.count or (10 if options.real else 100)
    for seed in range(options.first, options.first + number):
        folder = Path(tempfile.mkdtemp(prefix=f"schedule_{seed}_"))
        problems, line = schedule(seed, folder)
        wrong += bool(problems)
        print(f"{seed}: {line}: {'; '.join(problems) or 'nothing broken'}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{number} schedules, {wrong} with something broken")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
