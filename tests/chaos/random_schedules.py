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
from journaled import note_start  # noqa: E402

from nemo_rl_mcore.errors import RunStoppedError  # noqa: E402
from nemo_rl_mcore.parts import open_parts  # noqa: E402

STARTS = 20
AGES = (None, 0, 1, 2)


def fake_schedule(seed: int, folder: Path) -> tuple[list[str], str]:
    """What was broken, and a line of what happened."""
    drawn = random.Random(seed)
    age, chunk = drawn.choice(AGES), drawn.choice((None, 1, 2))
    chance = Chance(seed, rate=drawn.choice((0.02, 0.05, 0.1)), most=drawn.randint(1, 12))
    config = recipe(folder, age, chunk)
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
        repeats=age is None or (age == 0 and chunk is None),
    )
    how = "synchronous" if age is None else f"K = {age}, chunks of {chunk or GROUPS}"
    redone = redone_steps(folder / "journals")
    line = f"{how}: {len(chance.struck)} faults, {redone} steps again, {len(ends) + 1} starts"
    problems = broken(folder / "journals", expected)
    if problems:
        line += f"; {chance.struck}; {ends}"
    return problems, line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    wrong = 0
    for seed in range(options.first, options.first + options.count):
        folder = Path(tempfile.mkdtemp(prefix=f"schedule_{seed}_"))
        problems, line = fake_schedule(seed, folder)
        wrong += bool(problems)
        print(f"{seed}: {line}: {'; '.join(problems) or 'nothing broken'}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{options.count} schedules, {wrong} with something broken")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
