"""What a person sees while a run goes on: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_rl_mcore.observability.timing import TIMING_PREFIX

# Label and metric of what is shown, in this order; a metric that a run does not log is left out.
HEADLINE_METRICS: tuple[tuple[str, str], ...] = (
    ("reward", "train/reward"),
    ("accuracy", "validation/accuracy"),
    ("loss", "train/loss"),
    ("gradient norm", "train/grad_norm"),
    ("tokens/s", "performance/tokens_per_sec"),
)
# Label, metrics and text of what a run whose groups are answered beside training shows besides.
_SIDE_BY_SIDE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("buffer", ("async/buffer_ready", "async/inflight"), "{:.0f} ready, {:.0f} in flight"),
    ("age", ("async/age_mean", "async/age_max"), "{:.2f}, at most {:.0f}"),
    ("idle", ("async/trainer_idle", "async/engine_idle"), "trainer {:.0%}, engines {:.0%}"),
)
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


class ProgressDisplay:
    """A context manager and metric sink that shows how a run goes; it never changes the outcome of the block.

    On a terminal it redraws one panel. Elsewhere it prints a line for the first step, every `plain_every`-th
    and the last, without control characters. `steps_before` are those that an earlier run has done.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        console: Console | None = None,
        plain_every: int = 10,
        steps_before: int = 0,
    ) -> None:
        self._total_steps = total_steps
        self._steps_before = steps_before
        self._title = title
        self._console = console or Console()
        self._plain_every = plain_every
        self._latest: dict[str, float] = {}
        self._step = 0
        self._rewards: list[float] = []
        self._started = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Start the clock and, on a terminal, the live panel."""
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step; metrics that it does not have keep their last value."""
        self._step = step
        # Replaced, never changed: the live panel reads it from a thread of its own.
        self._latest = {**self._latest, **metrics}
        _, reward_name = HEADLINE_METRICS[0]
        if reward_name in metrics:
            self._rewards = [*self._rewards, metrics[reward_name]][-_SPARK_WIDTH:]
        if self._live is None and self._is_plain_step(step):
            self._console.print(self._plain_line(metrics), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live panel and give the cursor back; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_plain_step(self, step: int) -> bool:
        return step == self._steps_before + 1 or step % self._plain_every == 0 or step == self._total_steps

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        parts = [f"step {self._step}/{self._total_steps}"]
        parts += [f"{label} {_number(metrics[name])}" for label, name in HEADLINE_METRICS if name in metrics]
        parts += [f"{label} {text}" for label, text in _side_by_side(metrics)]
        parts += [f"{phase} {seconds:.2f} s" for phase, seconds in _phases(metrics).items()]
        return "  ".join([*parts, f"elapsed {_clock(time.monotonic() - self._started)}"])

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column()
        for label, name in HEADLINE_METRICS:
            if name in self._latest:
                rows.add_row(label, _number(self._latest[name]) + self._trend(name))
        for label, text in _side_by_side(self._latest):
            rows.add_row(label, text)
        if phases := _phases(self._latest):
            rows.add_row("seconds", "  ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items()))
        bar = Table.grid(padding=(0, 2))
        bar.add_row(Text(f"step {self._step}/{self._total_steps}"), self._bar(), Text(self._clocks()))
        return Panel(Group(bar, rows), title=self._title or None, title_align="left")

    def _bar(self) -> ProgressBar:
        return ProgressBar(total=self._total_steps, completed=self._step, width=30)

    def _clocks(self) -> str:
        elapsed = time.monotonic() - self._started
        done = self._step - self._steps_before
        if done <= 0 or self._step >= self._total_steps:
            return f"elapsed {_clock(elapsed)}"
        left = elapsed / done * (self._total_steps - self._step)
        return f"elapsed {_clock(elapsed)}, about {_clock(left)} left"

    def _trend(self, name: str) -> str:
        is_reward = name == HEADLINE_METRICS[0][1]
        return (
            f"  {_sparkline(self._rewards)}" if is_reward and self._console.encoding.startswith("utf") else ""
        )


def _side_by_side(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Label and text of how training and the engines get on; nothing for a run in which they take turns."""
    for label, names, template in _SIDE_BY_SIDE:
        if all(name in metrics for name in names):
            yield label, template.format(*(metrics[name] for name in names))


def _phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Wall seconds per phase; the CPU seconds stay in the files."""
    return {
        name.removeprefix(TIMING_PREFIX): value
        for name, value in metrics.items()
        if name.startswith(TIMING_PREFIX) and not name.endswith("_cpu")
    }


def _sparkline(values: list[float]) -> str:
    """Draw values in [0, 1] as one character each; what is outside is clipped, and NaN is a gap."""
    top = len(_SPARK) - 1
    return "".join(
        " " if value != value else _SPARK[round(min(max(value, 0.0), 1.0) * top)] for value in values
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
