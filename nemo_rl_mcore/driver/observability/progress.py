"""What a person sees while a run goes on: a live panel on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_rl_mcore.driver.console import open_console
from nemo_rl_mcore.driver.observability.series import Best, best_of, shown_metrics, sparkline
from nemo_rl_mcore.driver.observability.startup import STARTUP_PREFIX
from nemo_rl_mcore.driver.observability.timing import TIMING_PREFIX

_REWARD, _STEP_TIME = "train/reward", f"{TIMING_PREFIX}total"
_DRAWN = {_REWARD: 1.0, _STEP_TIME: 0.0}
"""Metrics that are shown as a line over all steps so far, and where their scale ends at least."""
# Label and metric of what is shown, in this order; a metric that a run does not log is left out.
HEADLINE_METRICS: tuple[tuple[str, str], ...] = (
    ("reward", _REWARD),
    ("accuracy", "validation/accuracy"),
    ("preference accuracy", "train/preference_accuracy"),
    ("held-out preference accuracy", "validation/preference_accuracy"),
    ("margin", "train/rewards_margin_mean"),
    ("loss", "train/loss"),
    ("held-out loss", "validation/loss"),
    ("gradient norm", "train/grad_norm"),
    ("response length", "train/mean_gen_tokens_per_sample"),
    ("truncated", "train/truncation_rate"),
    ("KL", "train/kl_penalty"),
    ("tokens/s", "performance/tokens_per_sec"),
)
_PANEL_METRICS = (
    ("reward spread", "train/reward_std"),
    ("clipped", "train/probs_ratio_clipfrac"),
    ("learning rate", "train/lr"),
    ("memory, GiB", "performance/peak_memory_gib"),
)
"""What is shown in the panel besides: a plain line has no room for it."""
# Label, metrics and text of what a run with asynchronous rollouts shows besides.
_SIDE_BY_SIDE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("buffer", ("async/buffer_ready", "async/inflight"), "{:.0f} ready, {:.0f} in flight"),
    ("age", ("async/age_mean", "async/age_max"), "{:.2f}, at most {:.0f}"),
    ("idle", ("async/trainer_idle", "async/engine_idle"), "trainer {:.0%}, engines {:.0%}"),
)


class ProgressDisplay:
    """A context manager and metric sink that shows how a run goes; it never changes the outcome of the block.

    On a terminal it redraws one panel, from `begin` on. Elsewhere it prints a line for the first step, every
    `plain_every`-th and the last, without control characters. `steps_before` are those that an earlier run has done.
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
        self._console = console or open_console()
        self._plain_every = plain_every
        self._latest: dict[str, float] = {}
        self._step = steps_before
        self._series: dict[str, list[float]] = {name: [] for name in _DRAWN}
        self._best: dict[str, Best] = {}
        self._varies: frozenset[str] = frozenset()
        self._saved: int | None = None
        self._started: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Return the display."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        self.close()

    @property
    def begun(self) -> bool:
        """Return whether the first step has begun."""
        return self._started is not None

    def begin(self) -> None:
        """Start the clock and, on a terminal, the live panel; idempotent."""
        if self.begun:
            return
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()

    def recall(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Take in the steps of an earlier run."""
        for row in rows:
            self._take(int(row["step"]), row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step; metrics that it does not have keep their last value."""
        self.begin()
        self._take(step, metrics)
        self._step = step
        if self._live is None and self._is_plain_step(step):
            self._print(self._plain_line(metrics))

    def saved(self, step: int) -> None:
        """Show that the checkpoint of a step is whole."""
        self._saved = step
        if self._live is None:
            self._print(f"checkpoint saved: step {self._saved}")

    def close(self) -> None:
        """Stop the live panel and give the cursor back; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        # Replaced, never changed: the live panel reads them from a thread of its own.
        self._latest = {**self._latest, **metrics}
        self._varies |= shown_metrics(metrics)
        self._best = self._best | {
            name: best_of(name, self._best.get(name), Best(step, metrics[name]))
            for _, name in HEADLINE_METRICS
            if name.startswith("validation/") and math.isfinite(metrics.get(name, math.nan))
        }
        for name in _DRAWN:
            if name in metrics:
                self._series[name].append(metrics[name])

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _is_plain_step(self, step: int) -> bool:
        return step == self._steps_before + 1 or step % self._plain_every == 0 or step == self._total_steps

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        parts = [f"step {self._step}/{self._total_steps}"]
        parts += [f"{label} {self._value(name)}" for label, name in self._known(HEADLINE_METRICS, metrics)]
        parts += [f"{label} {text}" for label, text in _side_by_side(metrics)]
        parts += [f"{phase} {seconds:.2f} s" for phase, seconds in _phases(metrics).items()]
        return "  ".join([*parts, f"elapsed {_clock(self._elapsed())}"])

    def _known(
        self, headlines: Sequence[tuple[str, str]], metrics: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        for label, name in headlines:
            if name in metrics and name in self._varies:
                yield label, name

    def _value(self, name: str) -> str:
        """Return the latest value, of a validation with the best one so far."""
        best, value = self._best.get(name), _number(self._latest[name])
        if best is None or best.value == self._latest[name]:
            return value
        return f"{value} (best {_number(best.value)} at step {best.step})"

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column()
        for label, name in self._known((*HEADLINE_METRICS, *_PANEL_METRICS), self._latest):
            rows.add_row(label, self._value(name) + (self._trend(name) if name == _REWARD else ""))
        for label, text in _side_by_side(self._latest):
            rows.add_row(label, text)
        if phases := _phases(self._latest):
            seconds = "  ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
            rows.add_row("seconds", seconds + self._trend(_STEP_TIME))
        if self._saved is not None:
            rows.add_row("checkpoint", f"step {self._saved} is saved")
        bar = Table.grid(padding=(0, 2))
        bar.add_row(Text(f"step {self._step}/{self._total_steps}"), self._bar(), Text(self._clocks()))
        return Panel(Group(bar, rows), title=self._title or None, title_align="left")

    def _bar(self) -> ProgressBar:
        return ProgressBar(total=self._total_steps, completed=self._step, width=30)

    def _elapsed(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _clocks(self) -> str:
        elapsed = self._elapsed()
        done = self._step - self._steps_before
        if done <= 0 or self._step >= self._total_steps:
            return f"elapsed {_clock(elapsed)}"
        left = elapsed / done * (self._total_steps - self._step)
        return f"elapsed {_clock(elapsed)}, about {_clock(left)} left"

    def _trend(self, name: str) -> str:
        series = self._series[name]
        drawn = series and self._console.encoding.startswith("utf")
        return f"  {sparkline(series, _DRAWN[name])}" if drawn else ""


def _side_by_side(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Label and text of how training and the engines get on; nothing for a run in which they take turns."""
    for label, names, template in _SIDE_BY_SIDE:
        if all(name in metrics for name in names):
            yield label, template.format(*(metrics[name] for name in names))


def _phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Wall seconds per phase of a step; the CPU seconds, and those of the start, stay in the files."""
    return {
        phase: value
        for name, value in metrics.items()
        if name.startswith(TIMING_PREFIX)
        and not (phase := name.removeprefix(TIMING_PREFIX)).startswith(STARTUP_PREFIX)
        and not name.endswith("_cpu")
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
