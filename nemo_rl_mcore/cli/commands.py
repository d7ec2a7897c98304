"""Implementation of the commands.

Nothing heavy is imported here: a mistake in a recipe is reported before torch, Ray or Megatron start.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_mcore.cli.arguments import parse
from nemo_rl_mcore.config import ConfigError, RunConfig
from nemo_rl_mcore.config.base import Problem, refused
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.driver.checkpoints import NotACheckpointError, require_checkpoint
from nemo_rl_mcore.driver.output import command, write_line
from nemo_rl_mcore.driver.run_folder import RECIPE_FILE
from nemo_rl_mcore.errors import CustomCodeError, RunStoppedError
from nemo_rl_mcore.recipe.load import load_with_warnings
from nemo_rl_mcore.tools.check import Plan, preflight
from nemo_rl_mcore.tools.check.given_weights import as_evaluated, load_over_given_weights

EXIT_CONFIG_ERROR = 2  # as argparse's for a command line with problems
EXIT_RUN_WOULD_STOP = 1
_WITHOUT_A_PLAN = ("doctor", "migrate", "rehearse", "recipes", "report")
_OVER_WEIGHTS = ("eval", "generate", "export")
"""Commands that use existing weights and train nothing."""


def run_command(arguments: Sequence[str] | None) -> int:
    """Run the command given by a command line (None: this process's); see `cli.main`."""
    options, overrides = parse(arguments)
    try:
        if options.command in _WITHOUT_A_PLAN:
            gc.enable()
            return _without_a_plan(options, overrides)
        config, warnings = _load(options, overrides)
        of_a_run = options.command not in _OVER_WEIGHTS
        # A recipe for CPUs runs here too; a recipe for GPUs is often checked on a machine without GPUs.
        elsewhere = options.command == "check" and not config.cluster.on_cpu
        starts = of_a_run and options.command != "check"
        plan = preflight(config, elsewhere=elsewhere, of_a_run=of_a_run, starts=starts, warnings=warnings)
    except (ConfigError, NotACheckpointError) as error:
        write_line(sys.stderr, str(error))
        return EXIT_CONFIG_ERROR
    gc.enable()
    if options.command == "check":
        return _check(config, plan, options, overrides)
    if options.command == "eval":
        from nemo_rl_mcore.tools.evaluate.evaluate import run_eval

        return run_eval(config)
    if options.command == "export":
        from nemo_rl_mcore.tools.evaluate.export import run_export

        return run_export(config, options.output, adapters=options.adapters)
    if options.command == "generate":
        from nemo_rl_mcore.tools.evaluate.generate import Asked, run_generate

        asked = Asked(options.prompt, options.prompt_file, options.samples, options.greedy, options.output)
        return run_generate(config, asked)
    if options.command == "replay":
        from nemo_rl_mcore.tools.replay import run_replay

        after, last = options.steps or (0, None)
        return run_replay(config, Path(options.run), after, last)
    for warning in plan.warnings:
        write_line(sys.stderr, f"warning: {warning}")
    # Imports Ray and torch, which the preflight does not need.
    from nemo_rl_mcore.driver.run import run
    from nemo_rl_mcore.tools.report.page import page_of_run

    return run(config, page_of_run)


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    if options.command in _OVER_WEIGHTS:
        named = {name: getattr(options, name, None) for name in ("config", "checkpoint", "hf")}
        bare = named["checkpoint"] is None and named["config"] is None
        if bare and options.command == "eval":
            raise refused("missing", "--config", "is missing", "name a recipe with a section eval")
        if bare and not (options.prompt or options.prompt_file):
            remedy = "write --prompt TEXT or --prompt-file FILE, or name a recipe: --config"
            raise refused("missing", "--prompt", "missing", remedy)
        if named["checkpoint"] is not None:
            if (Path(named["checkpoint"]) / "config.json").is_file():
                what = f"{named['checkpoint']!r} is a Hugging Face folder, and no checkpoint of a run"
                raise refused("wrong-kind", "--checkpoint", what, f"write --hf {named['checkpoint']}")
            # Checksums are compared later, if the recipe requires it.
            require_checkpoint(Path(named["checkpoint"]), "--checkpoint", verify_checksums=False)
        config = load_over_given_weights(overrides, **named, few_ranks=options.command == "generate")
        return as_evaluated(config) if options.command == "eval" else config, ()
    if options.command == "replay":
        recipe = Path(options.run) / RECIPE_FILE
        if not recipe.is_file():
            remedy = "name the log_dir of an asynchronous run"
            raise refused("not-found", "RUN_DIR", f"{recipe} is not there", remedy)
        return load_with_warnings(str(recipe), overrides)
    if options.migrate:
        from nemo_rl_mcore.tools.migrate.migrate import run_in_memory

        config, warnings = run_in_memory(options.config, overrides)
    else:
        config, warnings = load_with_warnings(options.config, overrides)
    if options.command in RUN_CONFIGS and options.command != config.algorithm:
        what = f"this is a recipe of {config.algorithm}, and the command is {options.command}"
        raise refused("wrong-kind", options.config, what, f"call nemo-rl-mcore {config.algorithm}")
    return config, warnings


def _check(config: RunConfig, plan: Plan, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.resolved:
        from nemo_rl_mcore.tools.check.render import resolved_lines

        for line in resolved_lines(config, options.config, overrides):
            write_line(sys.stdout, line)
        return 0
    from nemo_rl_mcore.driver.output import open_console
    from nemo_rl_mcore.tools.check.render import Finding, render, sections_of

    in_full = list[Finding]()
    if options.full:
        from nemo_rl_mcore.tools.check.full import full_check  # imports torch and Ray

        try:
            in_full = [*full_check(config, plan)]
        except RunStoppedError as error:
            write_line(sys.stderr, str(error))
            return EXIT_RUN_WOULD_STOP if isinstance(error, CustomCodeError) else EXIT_CONFIG_ERROR
    open_console(highlight=False).print(render(sections_of(plan, in_full)), soft_wrap=True)
    migrated = ["--migrate"] * options.migrate
    run = command(config.algorithm, *migrated, "--config", options.config, *overrides)
    rehearse = command("rehearse", options.config, *overrides)
    first = "" if config.cluster.on_cpu else f"`{rehearse}`, some minutes on CPUs; then, where the GPUs are, "
    write_line(sys.stdout, f"next: {first}`{run}`")
    return 0


def _without_a_plan(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.command == "doctor":
        from nemo_rl_mcore.tools.check.doctor import run_doctor

        return run_doctor(options.config, overrides, as_json=options.json, deadline_s=options.timeout)
    if options.command == "rehearse":
        from nemo_rl_mcore.tools.rehearse.command import run_rehearse

        return run_rehearse(options.recipe, options.ranks, options.json, overrides)
    if options.command == "report":
        from nemo_rl_mcore.tools.report.page import run_report

        return run_report(options.runs, options.output)
    if options.command == "recipes":
        from nemo_rl_mcore.recipe.shipped import copy_recipes, list_recipes

        copies = options.action == "copy"
        for line in map(str, copy_recipes(options.name, options.destination)) if copies else list_recipes():
            write_line(sys.stdout, line)
        return 0
    from nemo_rl_mcore.tools.migrate.migrate import EXIT_NO_FILE, run_migrate

    def problems_of_check(config: RunConfig) -> tuple[Problem, ...]:
        try:
            preflight(config, elsewhere=not config.cluster.on_cpu)
        except ConfigError as error:
            return error.problems
        return ()

    try:
        named = [one.rpartition("=") for one in options.model]
        models = {section or "policy": model for section, _, model in named}
        named = ("train=", "validation=")
        rows = [one if one.startswith(named) else f"train={one}" for one in options.data]
        parts = [one.partition("=") for one in rows]
        files = [f"++data.{section}.data_path={json.dumps(file)}" for section, _, file in parts]
        return run_migrate(options.recipe, options.output, [*overrides, *files], models, problems_of_check)
    except ConfigError as error:
        write_line(sys.stderr, str(error))
        return EXIT_NO_FILE
