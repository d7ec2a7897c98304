"""What must hold of any run, judged by the journals of its ranks and engines alone; see journals.py.

    broken(folder, expected) -> what does not hold, a line each

The history of a rank is the passes that its weights have behind them, one a step but of PPO, which trains on the rows
of a step several times: a finish adds one, a load goes back to what was saved, a new process begins with none. At the
end of a run it is each pass once, in order, with the rows of the step's prompts; a pass that is done again has the same
rows and, where kernels are deterministic, gives the same weights. That holds of each model apart.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Entry = Mapping


@dataclass(frozen=True)
class Finished:
    """A step, or a pass over one, as one rank did it. rows: (prompt, sample, digest of the tokens) of each."""

    step: int
    rows: tuple[tuple[int, int, str], ...]
    weights: str
    time: float

    @property
    def content(self) -> tuple:
        return tuple(sorted(self.rows))


@dataclass
class RankReplay:
    """What one rank's weights have behind them, line by line."""

    who: str
    passes: int = 1
    history: list[Finished] = field(default_factory=list)
    ever: dict[int, list[Finished]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)
    went_on: list[Finished] = field(default_factory=list)
    """Those after which something was called that needs the step: its end was known."""
    _weights: str = ""
    _first_weights: str = ""
    _saved: dict[int, tuple[list[Finished], str]] = field(default_factory=dict)
    _open: int | None = None
    _rows: list = field(default_factory=list)
    _failed: bool = False

    def read(self, entry: Entry) -> None:
        handle = getattr(self, f"_{entry['call']}_{entry['at']}", None)
        if handle is not None:
            handle(entry)

    def _say(self, problem: str) -> None:
        self.problems.append(f"{self.who}: {problem}")

    def _start_end(self, entry: Entry) -> None:
        self._first_weights = self._first_weights or entry["weights"]
        if entry["weights"] != self._first_weights:
            self._say("a new process begins with other weights than the first one")
        self.history, self._weights = [], entry["weights"]
        self._open, self._failed = None, False

    def _go_on(self) -> None:
        if self.history and self.history[-1] not in self.went_on:
            self.went_on.append(self.history[-1])

    def _send_weights_begin(self, entry: Entry) -> None:
        self._go_on()

    def _begin_train_step_begin(self, entry: Entry) -> None:
        self._go_on()
        if entry["weights"] != self._weights:
            self._say(f"step {entry['step']} begins with weights that no step and no checkpoint gave")

    def _begin_train_step_end(self, entry: Entry) -> None:
        if self._open is not None:
            self._say(f"step {entry['step']} begins while step {self._open} is open")
        self._open, self._rows, self._failed = entry["step"], [], False

    def _train_microbatch_end(self, entry: Entry) -> None:
        self._rows += entry["rows"]

    def _train_microbatch_raised(self, entry: Entry) -> None:
        self._failed = True

    def _finish_train_step_end(self, entry: Entry) -> None:
        if self._open is None or self._failed:
            self._say("a step is finished that was not begun, or had failed, and was not aborted")
            return
        self._finish(self._open, self._rows, entry)

    def _finish_train_step_raised(self, entry: Entry) -> None:
        self._failed = True

    def _train_begin(self, entry: Entry) -> None:
        self._go_on()

    def _train_end(self, entry: Entry) -> None:
        self._finish(len(self.history) + 1, entry["rows"], entry)

    def _finish(self, step: int, rows: Sequence, entry: Entry) -> None:
        if step != len(self.history) + 1:
            self._say(f"step {step} is trained after step {len(self.history)}")
        one = Finished(step, tuple(tuple(row) for row in rows), entry["weights"], entry["time"])
        self.history.append(one)
        self.ever[step].append(one)
        self._weights, self._open = one.weights, None

    def _abort_train_step_end(self, entry: Entry) -> None:
        self._open, self._failed = None, False

    def _save_checkpoint_end(self, entry: Entry) -> None:
        self._go_on()
        if entry["step"] * self.passes != len(self.history) or entry["weights"] != self._weights:
            self._say(f"saves as step {entry['step']} what is step {len(self.history) / self.passes:g}")
        self._saved[entry["step"]] = ([*self.history], entry["weights"])

    def _load_checkpoint_end(self, entry: Entry) -> None:
        step = entry["step"]
        if step not in self._saved:
            self._say(f"loads step {step}, which it never saved whole")
            return
        history, weights = self._saved[step]
        if entry["weights"] != weights:
            self._say(f"holds other weights after loading step {step} than it saved")
        self.history, self._weights = [*history], entry["weights"]
        self._open, self._failed = None, False


def replay(who: str, lives: Sequence[Sequence[Entry]], passes: int = 1) -> RankReplay:
    rank = RankReplay(who, passes)
    for life in lives:
        for entry in life:
            rank.read(entry)
    return rank


@dataclass(frozen=True)
class Expected:
    """What the run is to train: the prompts of each step, in order, with so many answers each, over so many ranks.

    asynchronous: whether engines answer. passes: over the rows of a step. models: those that are trained. chosen: rows
    of a prompt that are trained, where an algorithm chooses among its answers. frozen: those that are only read.
    answered: groups, where some of them are not trained. in_order: whether a step trains its own prompts, and not as
    many others, of which each has its turn.
    exact: whether the same rows give the same weights to the bit.
    repeats: whether a command that goes on gives the rows, too, that the one before it had after the checkpoint.
    finished: whether the run came to its end.
    """

    prompts: Mapping[int, Sequence[int]]
    samples: int
    ranks: int
    asynchronous: bool
    passes: int = 1
    models: tuple[str, ...] = ("policy",)
    frozen: tuple[str, ...] = ()
    chosen: int | None = None
    answered: int | None = None
    exact: bool = True
    repeats: bool = True
    in_order: bool = True
    finished: bool = True

    @property
    def groups(self) -> int:
        return self.answered or len(self.prompts[1]) * max(self.prompts)

    def step_of(self, number: int) -> int:
        """That of a pass, both counted from 1 on."""
        return -(-number // self.passes)

    def rows_of(self, number: int) -> Counter[tuple[int, int]]:
        """(prompt, sample) of each row of a pass; of rows that are chosen (prompt, 0), so many times."""
        samples = range(self.samples) if self.chosen is None else [0] * self.chosen
        prompts = self.prompts.get(self.step_of(number), ())
        return Counter((prompt, sample) for prompt in prompts for sample in samples)


@dataclass
class Journals:
    """All entries of a run, by process, in the order in which the processes began."""

    ranks: dict[str, list[list[Entry]]]
    engines: list[list[Entry]]
    struck: list[Entry]
    starts: list[float]

    @classmethod
    def read(cls, folder: Path) -> "Journals":
        lives: dict[str, list[list[Entry]]] = defaultdict(list)
        for path in folder.glob("*.jsonl"):
            lines = path.read_text().split("\n")[:-1]  # a line that was cut off is none
            if lines:
                lives[path.name.split(".")[0]].append([json.loads(line) for line in lines])
        for of_one in lives.values():
            of_one.sort(key=lambda entries: entries[0]["time"])
        engines = lives.pop("engine", [])
        struck = [json.loads(path.read_text()) for path in folder.glob("struck_*")]
        starts = sorted(float(path.read_text()) for path in folder.glob("started_*"))
        return cls(dict(sorted(lives.items())), engines, struck, starts)

    def session(self, time: float) -> int:
        """Which start of the command something belongs to, from 1 on."""
        return sum(start <= time for start in self.starts)

    @property
    def struck_pids(self) -> set[int]:
        return {one["pid"] for one in self.struck}


def broken(folder: Path, expected: Expected) -> list[str]:
    journals = Journals.read(folder)
    replays = [replay(who, lives, expected.passes) for who, lives in journals.ranks.items()]
    found = [problem for one in replays for problem in one.problems]
    of_models: dict[str, list[RankReplay]] = defaultdict(list)
    for one in replays:
        of_models[model_of(one.who)].append(one)
    there = {model: len(of_model) for model, of_model in of_models.items()}
    if there != dict.fromkeys((*expected.models, *expected.frozen), expected.ranks):
        return [*found, f"ranks of {there} kept journals, not {expected.ranks} of each"]
    for model in expected.models:
        found += _of_model(journals, of_models[model], expected)
    found += _trained_answers(journals, [one for model in expected.models for one in of_models[model]])
    if expected.asynchronous:
        found += [*_answers(journals, expected), *_refits(journals, expected)]
    return found


def model_of(who: str) -> str:
    """`policy` of "rank_0", `value` of "value_rank_0"."""
    return who.rpartition("rank_")[0].rstrip("_") or "policy"


def _of_model(journals: Journals, replays: Sequence[RankReplay], expected: Expected) -> list[str]:
    model = model_of(replays[0].who)
    found = [*_redone(journals, replays, expected)]
    return [*found, *(f"{model}: {one}" for one in _histories(replays, expected))]


def _histories(replays: Sequence[RankReplay], expected: Expected) -> Iterator[str]:
    """Each step once, on all ranks, with each answer to each of its prompts once."""
    lengths = {len(rank.history) for rank in replays}
    last = max(expected.prompts) * expected.passes
    if len(lengths) > 1 or (expected.finished and lengths != {last}):
        yield f"the weights of the ranks have {sorted(lengths)} steps behind them, of {last}"
    trained, number = Counter[tuple[int, int]](), 0
    for at in range(min(lengths)):
        done = [rank.history[at] for rank in replays if at < len(rank.history)]
        step = done[0].step
        if {one.step for one in done} != {step}:
            yield f"the ranks do not agree on what follows step {step - 1}"
        if len({one.weights for one in done}) > 1:
            yield f"the ranks hold different weights after step {step}"
        rows = Counter(
            (prompt, sample if expected.chosen is None else 0)
            for one in done
            for prompt, sample, _ in one.rows
        )
        trained, number = trained + rows, number + 1
        wanted = expected.rows_of(step)
        if not expected.in_order:
            if rows.total() != wanted.total():
                yield f"step {step} trained {rows.total()} rows, not {wanted.total()}"
        elif rows != wanted:
            more, less = sum((rows - wanted).values()), sum((wanted - rows).values())
            yield f"step {step} trained {more} rows that are not its own, or twice, and left out {less}"
    every = sum((expected.rows_of(one) for one in range(1, last + 1)), Counter())
    if not expected.in_order and (trained - every or (number == last and every - trained)):
        yield f"rows were trained twice, or never: {sorted((trained - every) + (every - trained))[:8]}"


def _redone(journals: Journals, replays: Sequence[RankReplay], expected: Expected) -> Iterator[str]:
    """Of a finish that nobody heard of, the rows may come in another order the next time, chunk by chunk."""
    for rank in replays:
        sessions: dict[tuple[int, int], list[Finished]] = defaultdict(list)
        for one in (one for times in rank.ever.values() for one in times):
            sessions[0 if expected.repeats else journals.session(one.time), one.step].append(one)
        for (_, step), times in sessions.items():
            known = {one.rows for one in times if one in rank.went_on}
            if len({one.content for one in times}) > 1 or len(known) > 1:
                yield f"{rank.who}: step {step} was done again with other rows"
            before = {(one.rows, one.weights) for one in times}
            if expected.exact and len(before) > len({rows for rows, _ in before}):
                yield f"{rank.who}: step {step} was done again with the same rows, and gave other weights"


def redone_steps(folder: Path) -> int:
    replays = [replay(who, lives) for who, lives in Journals.read(folder).ranks.items()]
    return len({step for rank in replays for step, times in rank.ever.items() if len(times) > 1})


@dataclass(frozen=True)
class Answers:
    """What engines were asked: dispatches, those that ended with an answer, those cut off, those refused or raised."""

    begun: int
    ended: int
    cut_off: int
    raised: int


def answers(folder: Path) -> Answers:
    ends = Counter(_outcome(life, entry) for life in Journals.read(folder).engines for entry in _begun(life))
    return Answers(ends.total(), ends["end"], ends["none"], ends["raised"])


def _begun(life: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in life if entry["call"] == "generate" and entry["at"] == "begin"]


def _outcome(life: Sequence[Entry], begun: Entry) -> str:
    for entry in life:
        if entry["call"] == "generate" and entry["ticket"] == begun["ticket"] and entry["at"] != "begin":
            return entry["at"]
    return "none"


def position_of(ticket: str) -> int:
    """Of "group 7, attempt 0.1"."""
    return int(ticket.split(",")[0].removeprefix("group "))


def _answers(journals: Journals, expected: Expected) -> Iterator[str]:
    """Every group is answered; a request of it twice only where the first answer, or who waited for it, was lost.

    Agents ask for the samples of a group one by one: where an engine dies with one request, all of them are lost.
    """
    last_session, asked = len(journals.starts), Counter[tuple[int, str]]()
    ends, lost, answered = Counter[tuple[int, int, str]](), Counter[tuple[int, int]](), set[int]()
    for life in journals.engines:
        struck = life[0]["pid"] in journals.struck_pids
        last = [entry for entry in life if _is_answer(entry)][-1:]
        for entry in _begun(life):
            session, ticket = journals.session(entry["time"]), entry["ticket"]
            asked[session, ticket] += 1
            cut_off = _outcome(life, entry) == "none"
            lost[session, position_of(ticket)] += cut_off and struck
            if cut_off and not struck and session == last_session:
                yield f"{ticket} was given up on an engine that nothing had happened to"
        for entry in filter(_is_answer, life):
            undelivered = struck and entry in last
            session, position = journals.session(entry["time"]), position_of(entry["ticket"])
            ends[session, position, entry["asked"]] += not undelivered
            lost[session, position] += undelivered
            answered.add(position)
    yield from (f"{one[1]} was asked {times} times" for one, times in asked.items() if times > 1)
    requests = Counter((session, position) for session, position, _ in ends)
    for (session, position, _), times in ends.items():
        if times > 1 + (lost[session, position] if requests[session, position] > 1 else 0):
            yield f"group {position} was answered {times} times"
    wanted = {*range(expected.groups)}
    if answered != wanted and expected.finished:
        yield f"groups were answered that do not exist, or never: {sorted(answered ^ wanted)[:8]}"
    yield from _equal_answers(journals, expected)


def _is_answer(entry: Entry) -> bool:
    return entry["call"] == "generate" and entry["at"] == "end"


def _equal_answers(journals: Journals, expected: Expected) -> Iterator[str]:
    """The same request under the same weights, token by token, has one answer."""
    rows: dict[tuple[int, str, str], set[tuple[str, ...]]] = defaultdict(set)
    for entry in (entry for life in journals.engines for entry in life if _is_answer(entry)):
        session = 0 if expected.repeats else journals.session(entry["time"])
        rows[session, entry["asked"], entry["versions"]].add(tuple(entry["rows"]))
    for different in rows.values():
        if len(different) > 1:
            yield "a request was answered twice, differently, by the same weights"


def _refits(journals: Journals, expected: Expected) -> Iterator[str]:
    """Weights of a version are the same whenever they are sent, and versions of an engine rise."""
    sent: dict[tuple[int, int], set[str]] = defaultdict(set)
    for life in journals.engines:
        ended = [entry for entry in life if (entry["call"], entry["at"]) == ("finish_refit", "end")]
        versions = [entry["version"] for entry in ended]
        if versions != sorted(versions):
            yield f"an engine went back to older weights: {versions}"
        for entry in ended:
            session = 0 if expected.repeats else journals.session(entry["time"])
            sent[session, entry["version"]].add(entry["sent"])
    for (_, version), digests in sent.items():
        if expected.exact and len(digests) > 1:
            yield f"version {version} names {len(digests)} different weights"


def _trained_answers(journals: Journals, replays: Sequence[RankReplay]) -> Iterator[str]:
    """Nothing is trained that no engine answered, or no rank where these do."""
    lives = [*journals.engines, *(life for of_rank in journals.ranks.values() for life in of_rank)]
    answered = {row for life in lives for entry in life if _is_answer(entry) for row in entry["rows"]}
    for rank in replays:
        for one in rank.history:
            if strange := [row for row in one.rows if row[2] not in answered]:
                yield f"{rank.who}: step {one.step} trained {len(strange)} rows that nobody answered"
