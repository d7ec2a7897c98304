"""What each command does with its options.

Nothing heavy is imported here: a mistake in a recipe is reported before torch, Ray or Megatron start.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_mcore.cli.arguments import parse
from nemo_rl_mcore.config import ConfigError, RunConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.driver.saved_run import RECIPE_FILE
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError
from nemo_rl_mcore.rank.checkpoints import NotACheckpointError, require_checkpoint
from nemo_rl_mcore.recipe.load import load_with_warnings
from nemo_rl_mcore.tools.check import Plan, preflight
from nemo_rl_mcore.tools.check.evaluation import as_evaluated
from nemo_rl_mcore.tools.check.given_weights import load_over_given_weights

EXIT_CONFIG_ERROR = 2
"""Exit status of a recipe with problems, the same as argparse's for a command line with problems."""
EXIT_RUN_WOULD_STOP = 1
"""Exit status of a recipe whose code does what a run stops at."""
_OVER_WEIGHTS = ("eval", "generate", "export")
"""The commands over weights that are given; nothing is trained."""


def run_command(arguments: Sequence[str] | None) -> int:
    """Run the command of a command line (None: of the process); see `cli.main`."""
    options, overrides = parse(arguments)
    try:
        if options.command in _WITHOUT_A_RUN:
            gc.enable()
            return _WITHOUT_A_RUN[options.command](options, overrides)
        config, warnings = _load(options, overrides)
        of_a_run = options.command not in _OVER_WEIGHTS
        # A recipe for CPUs runs here too; one for GPUs is mostly checked where there are none.
        elsewhere = options.command == "check" and not config.cluster.on_cpu
        starts = of_a_run and options.command != "check"
        plan = preflight(config, elsewhere=elsewhere, of_a_run=of_a_run, starts=starts, warnings=warnings)
    except (ConfigError, NotACheckpointError) as error:
        write_line(sys.stderr, str(error))
        return EXIT_CONFIG_ERROR
    gc.enable()
    match options.command:
        case "check" if options.resolved:
            return _resolved(config, options, overrides)
        case "check":
            return _check(config, plan, options, overrides)
        case "eval":
            return _eval(config)
        case "generate":
            return _generate(config, options)
        case "export":
            return _export(config, options)
        case "replay":
            return _replay(config, options)
        case _:
            for warning in plan.warnings:
                write_line(sys.stderr, f"warning: {warning}")
            return _run(config)


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    if options.command in _OVER_WEIGHTS:
        return _load_over_weights(options, overrides), ()
    load = _migrated if getattr(options, "migrate", False) else load_with_warnings
    config, warnings = load(_recipe(options), overrides)
    if options.command in RUN_CONFIGS and options.command != config.algorithm:
        what = f"this is a recipe of {config.algorithm}, and the command is {options.command}"
        raise ConfigError(
            [Problem("wrong-kind", options.config, what, f"call nemo-rl-mcore {config.algorithm}")]
        )
    return config, warnings


def _migrated(recipe: str, overrides: Sequence[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    from nemo_rl_mcore.tools.migrate.command import run_in_memory

    return run_in_memory(recipe, overrides)


def _load_over_weights(options: argparse.Namespace, overrides: Sequence[str]) -> RunConfig:
    named = {name: getattr(options, name, None) for name in ("config", "checkpoint", "hf")}
    checkpoint = named["checkpoint"]
    if checkpoint is not None:
        if (Path(checkpoint) / "config.json").is_file():
            what = f"{checkpoint!r} is a Hugging Face folder, and no checkpoint of a run"
            raise ConfigError([Problem("wrong-kind", "--checkpoint", what, f"write --hf {checkpoint}")])
        # Its checksums are compared when the recipe has said whether they are to be.
        require_checkpoint(Path(checkpoint), "--checkpoint", verify_checksums=False)
    elif options.config is None and (missing := _nothing_asked(options)):
        raise ConfigError([missing])
    config = load_over_given_weights(overrides, **named, few_ranks=options.command == "generate")
    return as_evaluated(config) if options.command == "eval" else config


def _nothing_asked(options: argparse.Namespace) -> Problem | None:
    """Return what is wrong with a command that has no recipe which says what to ask."""
    if options.command == "eval":
        return Problem("missing", "--config", "missing", "name a recipe with a section eval")
    if options.prompt or options.prompt_file:
        return None
    return Problem(
        "missing",
        "--prompt",
        "missing",
        "write --prompt TEXT or --prompt-file FILE, or name a recipe: --config",
    )


def _recipe(options: argparse.Namespace) -> str:
    if options.command != "replay":
        return options.config
    recipe = Path(options.run) / RECIPE_FILE
    if not recipe.is_file():
        raise ConfigError(
            [
                Problem(
                    "not-found",
                    "RUN_DIR",
                    f"{recipe} is not there",
                    "name the log_dir of an asynchronous run",
                )
            ]
        )
    return str(recipe)


def _recipes(options: argparse.Namespace, _: Sequence[str]) -> int:
    from nemo_rl_mcore.recipe.copy_recipes import copy_recipes, list_recipes

    copies = options.action == "copy"
    lines = map(str, copy_recipes(options.name, options.destination)) if copies else list_recipes()
    for line in lines:
        write_line(sys.stdout, line)
    return 0


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from nemo_rl_mcore.tools.check.doctor_command import run_doctor

    return run_doctor(options.config, overrides, as_json=options.json, deadline_s=options.timeout)


def _resolved(config: RunConfig, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from nemo_rl_mcore.tools.check.resolved import resolved_lines

    for line in resolved_lines(config, options.config, overrides):
        write_line(sys.stdout, line)
    return 0


def _check(config: RunConfig, plan: Plan, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from nemo_rl_mcore.driver.console import open_console
    from nemo_rl_mcore.tools.check.render import render

    in_full = list[tuple[str, str]]()
    if options.full:
        from nemo_rl_mcore.tools.check.full_check import full_check  # brings in torch and Ray

        try:
            in_full = [*full_check(config, plan)]
        except RunStoppedError as error:
            write_line(sys.stderr, str(error))
            return EXIT_RUN_WOULD_STOP if isinstance(error, CustomCodeError) else EXIT_CONFIG_ERROR
    console = open_console(highlight=False)
    console.print(render(plan, in_full), soft_wrap=True)
    migrated = ["--migrate"] * options.migrate
    run = command(config.algorithm, *migrated, "--config", options.config, *overrides)
    rehearse = command("rehearse", options.config, *overrides)
    first = "" if config.cluster.on_cpu else f"`{rehearse}`, some minutes on CPUs; then, where the GPUs are, "
    write_line(sys.stdout, f"next: {first}`{run}`")
    return 0


def _report(options: argparse.Namespace, _: Sequence[str]) -> int:
    from nemo_rl_mcore.tools.report.command import run_report

    return run_report(options.runs, options.output)


def _migrate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from nemo_rl_mcore.tools.migrate.command import EXIT_NO_FILE, run_migrate

    try:
        return run_migrate(options.recipe, options.output, overrides, _problems_of_check)
    except ConfigError as error:
        write_line(sys.stderr, str(error))
        return EXIT_NO_FILE


def _rehearse(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from nemo_rl_mcore.tools.rehearse.command import run_rehearse

    return run_rehearse(options.recipe, options.ranks, options.json, overrides)


def _problems_of_check(config: RunConfig) -> tuple[Problem, ...]:
    try:
        preflight(config, elsewhere=not config.cluster.on_cpu)
    except ConfigError as error:
        return error.problems
    return ()


def _run(config: RunConfig) -> int:
    # Brings in Ray and torch, which the preflight does without.
    from nemo_rl_mcore.driver.run import run
    from nemo_rl_mcore.tools.report.command import page_of_run

    return run(config, page_of_run)


def _eval(config: RunConfig) -> int:
    from nemo_rl_mcore.tools.evaluate.evaluate import run_eval

    return run_eval(config)


def _generate(config: RunConfig, options: argparse.Namespace) -> int:
    from nemo_rl_mcore.tools.evaluate.generate import Asked, run_generate

    asked = Asked(options.prompt, options.prompt_file, options.samples, options.greedy, options.output)
    return run_generate(config, asked)


def _export(config: RunConfig, options: argparse.Namespace) -> int:
    from nemo_rl_mcore.tools.evaluate.export import run_export

    return run_export(config, options.output)


def _replay(config: RunConfig, options: argparse.Namespace) -> int:
    from nemo_rl_mcore.tools.replay.replay import run_replay

    after, last = options.steps or (0, None)
    return run_replay(config, Path(options.run), after, last)


_WITHOUT_A_RUN = {
    "doctor": _doctor,
    "migrate": _migrate,
    "rehearse": _rehearse,
    "recipes": _recipes,
    "report": _report,
}
"""The commands that no plan of a run is made for."""
