"""A run's terminal output: a line of metrics per step, samples at the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE, ROLLOUTS_FOLDER, Row, Sample
from nemo_rl_mcore.driver.output import print_plain, visible

VALIDATION_PREFIX, TIMING_PREFIX = "validation/", "timing/"
STARTUP_PREFIX = "startup/"
"""Prefix of phases that are parts of the start."""
# Labels and metrics in display order; metrics that a run does not log are omitted.
HEADLINE_METRICS: tuple[tuple[str, str], ...] = (
    ("reward", "train/reward"),
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
# Labels, metrics and texts for runs with asynchronous rollouts.
SIDE_BY_SIDE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("buffer", ("async/buffer_ready", "async/inflight"), "{:.0f} ready, {:.0f} in flight"),
    ("age", ("async/age_mean", "async/age_max"), "{:.2f}, at most {:.0f}"),
    ("idle", ("async/trainer_idle", "async/engine_idle"), "trainer {:.0%}, engines {:.0%}"),
)
_ZERO_WHERE_UNUSED = "train/kl_penalty"
"""Always 0, and then omitted, if the recipe penalises nothing."""
REPORT_FILE = "report.html"


class Best(NamedTuple):
    step: int
    value: float


def best_of(name: str, points: Iterable[Best]) -> Best:
    """Return a metric's best value, the earliest of equal ones: the highest for validation metrics except losses."""
    highest = name.startswith(VALIDATION_PREFIX) and not name.endswith("loss")
    return max(points, key=lambda point: point.value if highest else -point.value)


class ProgressDisplay:
    """Prints a line per step on a terminal; elsewhere for the first, the last and every `plain_every`-th step.

    steps_before: the number of steps in an earlier run.
    """

    def __init__(
        self, total_steps: int, *, console: Console, plain_every: int = 10, steps_before: int = 0
    ) -> None:
        self._total, self._before, self._console = total_steps, steps_before, console
        self._every = 1 if console.is_terminal else plain_every
        self._best: dict[str, Best] = {}
        self._penalised = False

    def log(self, step: int, metrics: Mapping[str, float], elapsed_s: float = 0.0) -> None:
        self.take(step, metrics)
        if step not in (self._before + 1, self._total) and step % self._every:
            return
        parts = [f"step {step}/{self._total}"]
        for label, name in HEADLINE_METRICS:
            if name in metrics and (self._penalised or name != _ZERO_WHERE_UNUSED):
                value = metrics[name]
                best = self._best.get(name, Best(0, value))
                more = f" (best {_number(best.value)} at step {best.step})" if best.value != value else ""
                parts.append(f"{label} {_number(value)}{more}")
        for label, names, template in SIDE_BY_SIDE:
            if all(name in metrics for name in names):
                parts.append(f"{label} {template.format(*(metrics[name] for name in names))}")
        for name, value in metrics.items():  # CPU seconds and startup times go only to the files
            phase = name.removeprefix(TIMING_PREFIX)
            if phase != name and not (phase.startswith(STARTUP_PREFIX) or phase.endswith("_cpu")):
                parts.append(f"{phase} {value:.2f} s")
        parts.append(f"elapsed {timedelta(seconds=int(elapsed_s))}")
        if self._console.is_terminal and step - self._before > 0:
            left_s = elapsed_s / (step - self._before) * (self._total - step)
            parts.append(f"left {timedelta(seconds=int(left_s))}")
        print_plain(self._console, "  ".join(parts))

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Include an unprinted step in the best values."""
        self._penalised |= bool(metrics.get(_ZERO_WHERE_UNUSED, 0.0))
        for _, name in HEADLINE_METRICS:
            if name.startswith(VALIDATION_PREFIX) and math.isfinite(metrics.get(name, math.nan)):
                new = Best(step, metrics[name])
                self._best[name] = best_of(name, (self._best.get(name, new), new))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def print_report(
    log_dir: Path, rows: Sequence[Row], samples: Collection[Sample] = (), *, console: Console
) -> None:
    """Print some of the run's answers and its files' paths."""
    if not rows:
        console.print("No step was finished: nothing to report.")
        return
    if samples:
        console.print(sample_table(samples))
    for name in (METRICS_FILE, ROLLOUTS_FOLDER, REPORT_FILE):
        if (file := log_dir / name).exists():
            print_plain(console, f"{file}")


def sample_table(samples: Iterable[Sample]) -> Table:
    table = Table(title="samples", title_justify="left")
    for heading in ("step", "prompt", "answer", "response", "ended", "reward"):
        table.add_column(heading)
    for sample in samples:
        # Spell it out here as well, since any console may print it.
        texts = (escape(visible(text)) for text in (sample.prompt, sample.answer, sample.response))
        ended = "no" if sample.truncated else "yes"
        table.add_row(str(sample.step), *texts, ended, f"{sample.reward:.3g}")
    return table
