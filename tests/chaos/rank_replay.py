"""What one rank's weights have behind them, by its journal: see invariants.py."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
        """The rows, whatever their order."""
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
