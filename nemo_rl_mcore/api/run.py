"""A run in Python, with the same recipe, checks and loop as the commands."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_rl_mcore.api.draft import Code
from nemo_rl_mcore.config.base import ConfigError, Problem, refused
from nemo_rl_mcore.config.custom_code import handed
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.hub import has_tokenizer
from nemo_rl_mcore.driver.output import open_console
from nemo_rl_mcore.driver.run_folder import RECIPE_FILE, recipe_text
from nemo_rl_mcore.driver.signals import stop_signals
from nemo_rl_mcore.errors import RunStoppedError, shortened
from nemo_rl_mcore.recipe.load import Computed, check, compute
from nemo_rl_mcore.recipe.sources import COMMAND_LINE, Recipe, places
from nemo_rl_mcore.tools.check.given_weights import as_evaluated, load_over_given_weights
from nemo_rl_mcore.tools.check.plan import Plan, preflight

Metrics = Mapping[str, float]
"""A row of metrics.jsonl: `step`, and metrics by name."""
type Asking = str | Sequence[Mapping[str, object]]
"""A prompt: a text, or a conversation of messages with `role` and `content`; lists of prompts are accepted, too."""


@dataclass(frozen=True)
class RunPlan:
    """A run's plan, as printed by `nemo-rl-mcore check`.

    first_prompt: the first prompt as the model sees it, if the tokenizer is a folder on this machine.
    """

    plan: Plan
    warnings: tuple[Problem, ...]
    first_prompt: str | None = None

    def __repr__(self) -> str:
        from nemo_rl_mcore.tools.check.render import Finding, render, sections_of

        text, in_full = StringIO(), list[Finding]()
        if self.first_prompt is not None:
            in_full.append(Finding("first prompt", shortened(self.first_prompt, 400)))
        open_console(text, highlight=False).print(render(sections_of(self.plan, in_full)), soft_wrap=True)
        return text.getvalue()


class Run:
    """A checked recipe, with methods to train, evaluate and export.

    config: the checked recipe with all defaults. folder: `logger.log_dir`, with metrics, answers and report.

    Iterating trains, and yields each step's metrics when the step ends. If the loop is left early, by `break`, an error
    or Ctrl-C, the last finished step is saved, and the next iteration continues after it. A process trains one run at
    a time: starting a run ends any other run that was left open.

    >>> from nemo_rl_mcore import load_recipe
    >>> run = load_recipe("sft_cpu.yaml", ["logger.log_dir=runs/sft"])
    >>> run.plan().warnings
    ()
    >>> run.metrics()  # no step yet
    []
    """

    def __init__(
        self,
        recipe: Recipe,
        overrides: Sequence[str] = (),
        code: Code | None = None,
        problems: Sequence[Problem] = (),
    ) -> None:
        """Check a recipe; raises ConfigError with every problem.

        code: objects for its import paths. problems: problems that are already known.
        """
        self._code = code or Code()
        self._read: Computed | None = None
        with self._told(problems):
            self._read = compute(recipe, overrides)
            self.config, self._warnings = check(self._read)
        self.folder = Path(self.config.logger.log_dir)

    def recipe(self) -> str:
        """Return an equivalent recipe for the commands as YAML, with all keys."""
        return recipe_text(self.config)

    def plan(self) -> RunPlan:
        """Check files and this machine, and return the run's plan.

        Raises ConfigError, or RunStoppedError if the tokenizer cannot be loaded.
        """
        with handed(self._code.objects), self._told():
            plan = preflight(
                self.config, elsewhere=False, of_a_run=True, starts=True, warnings=self._warnings
            )
            if not has_tokenizer(self.config.policy.tokenizer.name):
                return RunPlan(plan, tuple(plan.warnings))
            # Imports torch through transformers.
            from nemo_rl_mcore.driver.parts import first_prompt, open_tokenizer

            tokenizer = open_tokenizer(self.config.policy, self.config.data)
            first = first_prompt(self.config, plan.data.first if plan.data else (), tokenizer)
            return RunPlan(plan, tuple(plan.warnings), first)

    def __iter__(self) -> Iterator[Metrics]:
        """Train; raises ConfigError, RunStoppedError, or KeyboardInterrupt if a signal ends the run."""
        _end_open_run()
        steps = self._steps()
        _under_way.append(weakref.ref(steps))
        return steps

    def train(self) -> Metrics:
        """Train all remaining steps, and return the last step's metrics; raises as iterating does."""
        for _ in self:
            pass
        return self.metrics()[-1]

    def metrics(self) -> list[Metrics]:
        """Return the metrics of each trained step, including steps from earlier calls that this run continues."""
        return [row for row in self._history() if row["step"] > 0]

    def validations(self) -> list[Metrics]:
        """Return each validation's `step` and `validation/...` metrics; step 0 is before the first training step."""
        found = [
            {name: value for name, value in row.items() if name == "step" or name.startswith("validation/")}
            for row in self._history()
        ]
        return [row for row in found if len(row) > 1]

    def _history(self) -> list[dict[str, float]]:
        from nemo_rl_mcore.driver.observability.sinks import METRICS_FILE, read_history

        return read_history(self.folder) if (self.folder / METRICS_FILE).exists() else []

    def report(self, output: str | Path | None = None) -> Path:
        """Write the run's report, by default `report.html` in its folder, and return its path."""
        from nemo_rl_mcore.driver.observability.recorder import REPORT_FILE
        from nemo_rl_mcore.tools.report.page import write_page
        from nemo_rl_mcore.tools.report.run_data import read_run

        return write_page([read_run(self.folder)], Path(output) if output else self.folder / REPORT_FILE)

    def generate(
        self,
        *prompts: Asking | Sequence[Asking],
        samples: int = 1,
        greedy: bool = False,
        checkpoint: str | Path | None = None,
    ) -> list[dict[str, object]]:
        """Answer the given prompts, or else held-out prompts, with the newest checkpoint's weights.

        Returns a dict for each answer: prompt, response, tokens, finished, index, sample.
        """
        from nemo_rl_mcore.tools.evaluate.generate import Asked, answers, rows_of

        with self._over_weights(checkpoint, few_ranks=True) as config:
            asked = Asked(prompts, samples=samples, greedy=greedy)
            return [row for answered in answers(config, asked) for row in rows_of(answered)]

    def eval(self, *, checkpoint: str | Path | None = None) -> dict[str, dict[str, float]]:
        """Score the newest checkpoint on the recipe's sets in `eval`, and return each metric's mean by set."""
        from nemo_rl_mcore.tools.evaluate.evaluate import evaluate

        means = dict[str, dict[str, float]]()
        with self._over_weights(checkpoint) as config:
            for name, result in evaluate(as_evaluated(config)).items():
                means[name] = {key: estimate.mean for key, estimate in result.metrics.items()}
        return means

    def export(self, output: str | Path, *, checkpoint: str | Path | None = None) -> Path:
        """Write the newest checkpoint as a Hugging Face folder, which must not exist, and return its path."""
        from nemo_rl_mcore.tools.evaluate.export import export

        with self._over_weights(checkpoint) as config:
            if config.policy.init_checkpoint is None:
                what = "no step of the run is saved"
                raise refused("missing", "checkpoint", what, "train, or name a folder step_N")
            export(config, Path(output).absolute())
        return Path(output).absolute()

    def _steps(self) -> Generator[Metrics]:
        with handed(self._code.objects), stop_signals() as signals, self._told():
            preflight(self.config, elsewhere=False, of_a_run=True, starts=True, warnings=self._warnings)
            from nemo_rl_mcore.driver.run import Watch, train  # imports torch, and Ray with its settings
            from nemo_rl_mcore.tools.report.page import page_of_run

            self._code.require_portable()
            steps = train(self.config, watch=Watch(page_of_run), refuse_changes=True)
            for metrics in steps:
                try:
                    yield metrics
                except GeneratorExit:
                    interrupted = bool(signals.arrived)
                    try:
                        steps.close()
                    except KeyboardInterrupt:  # a second signal during shutdown is ignored
                        if not interrupted:
                            raise
                    raise

    @contextmanager
    def _over_weights(
        self, checkpoint: str | Path | None, *, few_ranks: bool = False
    ) -> Generator[RunConfig]:
        """Yield the configuration for a command without training on the newest checkpoint's weights."""
        from nemo_rl_mcore.driver.checkpoints import CheckpointStore

        _end_open_run()
        store = CheckpointStore(Path(self.config.checkpointing.checkpoint_dir))
        saved = next(store.newest_first(), None)
        folder = checkpoint or (saved and saved.folder)
        with TemporaryDirectory() as place, handed(self._code.objects), stop_signals(), self._told():
            recipe = Path(place) / RECIPE_FILE
            recipe.write_text(self.recipe(), encoding="utf-8")
            yield load_over_given_weights(
                (), config=str(recipe), checkpoint=folder and str(folder), few_ranks=few_ranks
            )

    @contextmanager
    def _told(self, problems: Sequence[Problem] = ()) -> Generator[None]:
        """Add the Python location of its key to each recipe problem, and raise all together with known problems."""
        try:
            yield
        except (ConfigError, RunStoppedError) as error:
            found = error if isinstance(error, ConfigError) else error.__cause__
            if not isinstance(found, ConfigError):
                raise
            located = [*problems]
            set_in = {} if self._read is None else places(self._read.recipe, self._read.overridden)
            for problem in found.problems:
                # The setting of its key or, failing that, of its section or a related key.
                keys = (problem.path, problem.path.rpartition(".")[0], *problem.related)
                where = problem.where or next((set_in[key] for key in keys if key in set_in), "")
                located.append(replace(problem, where="overrides" if where == COMMAND_LINE else where))
            raise ConfigError(located) from None
        if problems:
            raise ConfigError(problems)


_under_way: list[weakref.ref[Generator[Any]]] = []
"""The run that is training, or whose unfinished iterator is still referenced."""


def _end_open_run() -> None:
    while _under_way:
        if (steps := _under_way.pop()()) is not None:
            steps.close()


atexit.register(_end_open_run)
