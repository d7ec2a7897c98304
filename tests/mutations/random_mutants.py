"""Change random places of config, preflight, data and algorithms, and show which changes the unit tests notice.

    uv run --with cosmic-ray==8.7.0 --with pytest-cov python tests/mutations/random_mutants.py HEAD [ANOTHER_REVISION]

Draws places that are the same in all revisions, so that their kill rates compare. A mutant is tested by the tests that
run its line, those first that run the fewest lines: at most `MOST_TESTS`, and for `DEADLINE` seconds. Writes a JSON
file a revision into --folder, where a run that was stopped goes on.
"""

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage.numbits import numbits_to_nums

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("config", "recipe", "models", "tools/check", "data", "driver/algorithms")
TESTS = (
    "config",
    "recipe",
    "models",
    "data",
    "driver/algorithms",
    "losses",
    "environment",
    "tools",
    "suites",
    "rank",
)
MOST_TESTS = 400
DEADLINE = 180
OPERATORS = [
    name
    for name in operator_names()
    if "BitOr" not in name and "Variable" not in name  # types; needs arguments
]


class Place(NamedTuple):
    """Where something can be changed: a line of a file, told by its text, and the column."""

    file: str
    line: str
    nth: int
    column: int


class Mutant(NamedTuple):
    """A change: its place, and which one."""

    place: Place
    operator: str


Mutants = dict[Mutant, tuple[int, int]]
"""The number of the line, and which occurrence of the operator it is."""


def mutants_of(tree: Path) -> Mutants:
    found: Mutants = {}
    for room in ROOMS:
        for path in sorted((tree / "nemo_rl_mcore" / room).rglob("*.py")):
            source = path.read_text("utf-8")
            found |= _of_file(str(path.relative_to(tree)), source)
    return found


def _of_file(file: str, source: str) -> Mutants:
    lines, seen, nth = source.splitlines(), Counter[str](), list[int]()
    for line in lines:
        nth.append(seen[line.strip()])
        seen[line.strip()] += 1
    nodes, found = list(ast_nodes(parso.parse(source))), {}
    for name in OPERATORS:
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for (number, column), _ in operator.mutation_positions(node):
                line = lines[number - 1]
                column -= len(line) - len(line.lstrip())
                found[Mutant(Place(file, line.strip(), nth[number - 1], column), name)] = number, occurrence
                occurrence += 1
    return found


def drawn(every: list[Mutants], count: int, seed: int) -> list[Mutant]:
    common = sorted(set.intersection(*(set(mutants) for mutants in every)))
    changes: dict[Place, list[str]] = defaultdict(list)
    for place, operator in common:
        changes[place].append(operator)
    dice = random.Random(seed)
    return [Mutant(place, dice.choice(changes[place])) for place in dice.sample(sorted(changes), count)]


class Tests:
    """The unit tests that run each line of a tree."""

    def __init__(self, tree: Path) -> None:
        self._of_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._of_file: dict[str, Counter[str]] = defaultdict(Counter)
        self._size = Counter[str]()
        for file, test, numbers in _coverage(tree):
            self._size[test] += len(numbers)
            self._of_file[file][test] += len(numbers)
            for number in numbers:
                self._of_line[file, number].add(test)

    def of(self, file: str, number: int) -> list[str]:
        """Return those of a line, those first that run the fewest; of one that an import runs, those of its file."""
        if found := self._of_line.get((file, number)):
            return sorted(found, key=lambda test: (self._size[test], test))
        return [test for test, _ in self._of_file[file].most_common()]


def _coverage(tree: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield a file, a test, and the lines of the file that the test runs."""
    data = tree / ".coverage"
    if not data.exists():
        where = [f"tests/unit/{room}" for room in TESTS if (tree / "tests/unit" / room).exists()]
        where += map(str, sorted(tree.glob("tests/unit/test_[acgrw]*.py")))
        _pytest(tree, ["-n", "2", "--cov=nemo_rl_mcore", "--cov-context=test", "--cov-report=", *where])
    rows = sqlite3.connect(data).execute(
        "select path, context, numbits from line_bits join file on file.id = file_id "
        "join context on context.id = context_id where context != ''"
    )
    for path, context, numbits in rows:
        file = str(Path(path).relative_to(tree.resolve()))
        yield file, context.partition("|")[0], numbits_to_nums(numbits)


def _pytest(tree: Path, arguments: list[str], deadline: float | None = None) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with (tree / "pytest.log").open("w") as output:
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, stdout=output, stderr=output, timeout=deadline
            )
        except subprocess.TimeoutExpired:
            return 1
    return done.returncode


def results(tree: Path, mutants: Mutants, chosen: list[Mutant], file: Path) -> Iterator[tuple[Mutant, str]]:
    """Yield whether each mutant is killed, survives, or is in a file that no test runs."""
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    tests = Tests(tree)
    for mutant in chosen:
        key = json.dumps(mutant)
        if key not in known:
            number, occurrence = mutants[mutant]
            known[key] = _tried(tree, mutant, occurrence, tests.of(mutant.place.file, number))
            file.write_text(json.dumps(known, indent=1))
        yield mutant, known[key]


def _tried(tree: Path, mutant: Mutant, occurrence: int, tests: list[str]) -> str:
    if not tests:
        return "not run"
    path = tree / mutant.place.file
    source = path.read_text("utf-8")
    names = tree / "tests.txt"
    names.write_text("\n".join([test for test in tests if "\n" not in test][:MOST_TESTS]))
    try:
        changed = mutate_code(source, get_operator(mutant.operator)(), occurrence)
    except AttributeError:  # the operator for exceptions cannot replace a dotted name
        return "not run"
    path.write_text(changed, "utf-8")
    try:
        return "killed" if _pytest(tree, ["-x", "-n", "0", f"@{names}"], DEADLINE) else "survived"
    finally:
        path.write_text(source, "utf-8")


def _tree_of(revision: str, folder: Path) -> Path:
    tree = folder / revision
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", revision], cwd=REPOSITORY, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x"], cwd=tree, input=archive, check=True)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revisions", nargs="+")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("results/random_mutants"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    trees = [_tree_of(revision, folder) for revision in options.revisions]
    every = [mutants_of(tree) for tree in trees]
    chosen = drawn(every, options.count, options.seed)
    for revision, tree, mutants in zip(options.revisions, trees, every, strict=True):
        found = list(results(tree, mutants, chosen, folder / f"{revision}.json"))
        print(revision, dict(Counter(result for _, result in found)))
        for mutant, result in found:
            if result != "killed":
                print(f"  {result}: {mutant.place.file}: {mutant.operator}: {mutant.place.line}")


if __name__ == "__main__":
    main()
