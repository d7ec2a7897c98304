"""Check and run recipes: `check` resolves one on paper, `grpo` and the others run it, `replay` repeats what ran.

`migrate` makes one of a recipe of NeMo RL.

Nothing heavy is imported here: a mistake in a recipe is reported before torch, Ray or Megatron start.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from nemo_rl_mcore import __version__
from nemo_rl_mcore.config import ConfigError, RunConfig
from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.load import load_with_warnings
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.errors import RunStoppedError
from nemo_rl_mcore.output import BestEffortStream, write_line
from nemo_rl_mcore.preflight import Plan, preflight
from nemo_rl_mcore.preflight.evaluation import as_evaluated
from nemo_rl_mcore.preflight.given_weights import load_over_given_weights
from nemo_rl_mcore.preflight.saved_run import RECIPE_FILE
from nemo_rl_mcore.training.checkpoints import NotACheckpointError, require_checkpoint

EXIT_CONFIG_ERROR = 2
"""Exit status of a recipe with problems, the same as argparse's for a command line with problems."""
_OVER_WEIGHTS = ("eval", "generate", "export")
"""The commands over weights that are given; nothing is trained."""


def run_command(arguments: Sequence[str] | None) -> int:
    """Run the command of a command line (None: of the process); see `cli.main`."""
    options, overrides = _parse(arguments)
    if options.command == "recipes":
        return _recipes(options)
    try:
        if options.command == "migrate":
            return _migrate(options)
        config, warnings = _load(options, overrides)
        of_a_run = options.command not in _OVER_WEIGHTS
        plan = preflight(config, elsewhere=options.command == "check", of_a_run=of_a_run, warnings=warnings)
    except (ConfigError, NotACheckpointError) as error:
        write_line(sys.stderr, str(error))
        return EXIT_CONFIG_ERROR
    match options.command:
        case "check":
            return _check(config, plan, full=options.full)
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


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="nemo-rl-mcore", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in (
        *((name, f"check a recipe with a section {name}, then run it") for name in RUN_CONFIGS),
        ("check", "check a recipe and print the resolved plan: layout, batches, guardrails, memory"),
    ):
        command = _add_command(commands, name, purpose)
        command.add_argument("--config", required=True, metavar="FILE", help="the recipe, a YAML file")
        if name == "check":
            command.add_argument(
                "--full",
                action="store_true",
                help="open the data too: tokenise it, read its golds, score one row",
            )
    evaluation = _add_command(commands, "eval", "score the answers to the sets of a recipe's section eval")
    _add_weights(evaluation, required=False)
    generate = _add_command(commands, "generate", "answer prompts with given weights")
    _add_weights(generate, required=True)
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    generate.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a prompt a line, or a file .jsonl of prompts or messages; without any prompt, held-out ones are taken",
    )
    generate.add_argument("--samples", type=_count, default=1, metavar="N", help="answers to each prompt")
    generate.add_argument(
        "--greedy", action="store_true", help="take the likeliest token instead of sampling"
    )
    generate.add_argument(
        "--output", metavar="FILE", help="write the answers here, as JSONL; it must not exist"
    )
    export = _add_command(commands, "export", "write the weights of a checkpoint as a Hugging Face folder")
    export.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder step_N of a run")
    export.add_argument(
        "--output", required=True, metavar="DIR", help="the folder to write; it must not exist"
    )
    replay = _add_command(commands, "replay", "train again what an asynchronous run has logged, and compare")
    replay.add_argument("run", metavar="RUN_DIR", help="logger.log_dir of the run")
    replay.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="the steps after A, which is 0 or has a checkpoint, up to B; left out, all of them",
    )
    _add_migrate(commands)
    _add_recipes(commands)
    # argparse takes one group of overrides; those on the other side of --config come back as unknown.
    options, rest = parser.parse_known_args(arguments)
    unknown = [text for text in rest if text.startswith("-") or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "generate" and options.greedy and options.samples > 1:
        parser.error(f"--greedy gives the same answer {options.samples} times: leave out it or --samples")
    return options, [*getattr(options, "overrides", ()), *rest]


def _add_command(commands: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=purpose, allow_abbrev=False
    )
    command.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="Hydra's grammar: a.b=c, +new=1, ~gone"
    )
    return command


def _add_migrate(commands: Any) -> None:
    migrate = commands.add_parser(
        "migrate",
        help="write a recipe from one of NeMo RL, and say what became of each key",
        allow_abbrev=False,
    )
    migrate.add_argument(
        "recipe", metavar="THEIR.yaml", help="the recipe of NeMo RL, its `defaults:` beside it"
    )
    migrate.add_argument(
        "--output", metavar="OURS.yaml", help="the file to write; left out, the same name in this folder"
    )


def _add_recipes(commands: Any) -> None:
    purpose = "list the recipes that come with the package, or copy one or a folder of them"
    command: argparse.ArgumentParser = commands.add_parser("recipes", help=purpose, description=purpose)
    actions = command.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="the names, as `defaults:` and --config take them")
    copy = actions.add_parser(
        "copy", help="copy a recipe or a folder of recipes, with the files that they need"
    )
    copy.add_argument("name", metavar="NAME", help="such as grpo_copy_cpu.yaml or quickstart")
    copy.add_argument("destination", nargs="?", metavar="DEST", help="left out, here")


def _add_weights(command: argparse.ArgumentParser, *, required: bool) -> None:
    weights = command.add_mutually_exclusive_group(required=required)
    weights.add_argument("--checkpoint", metavar="DIR", help="weights of a folder step_N of a run")
    weights.add_argument("--hf", metavar="DIR", help="weights of a Hugging Face folder")
    command.add_argument(
        "--config", metavar="FILE", help="the recipe; left out, it is that of the checkpoint"
    )


def _load(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[RunConfig, tuple[Problem, ...]]:
    if options.command in _OVER_WEIGHTS:
        return _load_over_weights(options, overrides), ()
    config, warnings = load_with_warnings(_recipe(options), overrides)
    if options.command in RUN_CONFIGS and options.command != config.algorithm:
        what = f"this is a recipe of {config.algorithm}, and the command is {options.command}"
        raise ConfigError([Problem(options.config, what, f"call nemo-rl-mcore {config.algorithm}")])
    return config, warnings


def _load_over_weights(options: argparse.Namespace, overrides: Sequence[str]) -> RunConfig:
    named = {name: getattr(options, name, None) for name in ("config", "checkpoint", "hf")}
    checkpoint = named["checkpoint"]
    if checkpoint is not None:
        if (Path(checkpoint) / "config.json").is_file():
            what = f"{checkpoint!r} is a Hugging Face folder, and no checkpoint of a run"
            raise ConfigError([Problem("--checkpoint", what, f"write --hf {checkpoint}")])
        # Its checksums are compared when the recipe has said whether they are to be.
        require_checkpoint(Path(checkpoint), "--checkpoint", verify_checksums=False)
    elif options.config is None and (missing := _nothing_asked(options)):
        raise ConfigError([missing])
    config = load_over_given_weights(overrides, **named, few_ranks=options.command == "generate")
    return as_evaluated(config) if options.command == "eval" else config


def _nothing_asked(options: argparse.Namespace) -> Problem | None:
    """What is wrong with a command that has no recipe which says what to ask."""
    if options.command == "eval":
        return Problem("--config", "missing", "name a recipe with a section eval")
    if options.prompt or options.prompt_file:
        return None
    return Problem(
        "--prompt", "missing", "write --prompt TEXT or --prompt-file FILE, or name a recipe: --config"
    )


def _recipe(options: argparse.Namespace) -> str:
    if options.command != "replay":
        return options.config
    recipe = Path(options.run) / RECIPE_FILE
    if not recipe.is_file():
        raise ConfigError(
            [Problem("RUN_DIR", f"{recipe} is not there", "name the log_dir of an asynchronous run")]
        )
    return str(recipe)


def _steps(text: str) -> tuple[int, int | None]:
    first, _, last = text.partition(":")
    try:
        return int(first or 0), int(last) if last else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not A:B, two numbers of steps, such as 0:20"
        ) from error


def _recipes(options: argparse.Namespace) -> int:
    from nemo_rl_mcore.copy_recipes import copy_recipes, list_recipes

    copies = options.action == "copy"
    try:
        lines = map(str, copy_recipes(options.name, options.destination)) if copies else list_recipes()
    except ConfigError as error:
        write_line(sys.stderr, str(error))
        return EXIT_CONFIG_ERROR
    for line in lines:
        write_line(sys.stdout, line)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of answers, 1 or more")
    return int(text)


def _check(config: RunConfig, plan: Plan, *, full: bool) -> int:
    from rich.console import Console

    from nemo_rl_mcore.preflight.render import render

    in_full = _in_full(config, plan) if full else []
    if in_full is None:
        return EXIT_CONFIG_ERROR
    console = Console(highlight=False, file=cast(TextIO, BestEffortStream(sys.stdout)))
    console.print(render(plan, in_full), soft_wrap=True)
    return 0


def _in_full(config: RunConfig, plan: Plan) -> list[tuple[str, str]] | None:
    """What opening the parts of the run tells; None, with the reason told, where they cannot be opened."""
    from nemo_rl_mcore.full_check import full_check

    try:
        return list(full_check(config, plan))
    except RunStoppedError as error:
        write_line(sys.stderr, str(error))
        return None


def _migrate(options: argparse.Namespace) -> int:
    from nemo_rl_mcore.config.migration.command import run_migrate

    return run_migrate(options.recipe, options.output)


def _run(config: RunConfig) -> int:
    # Brings in Ray and torch, which the preflight does without.
    from nemo_rl_mcore.launch import run

    return run(config)


def _eval(config: RunConfig) -> int:
    from nemo_rl_mcore.evaluate import run_eval

    return run_eval(config)


def _generate(config: RunConfig, options: argparse.Namespace) -> int:
    from nemo_rl_mcore.generate import Asked, run_generate

    asked = Asked(options.prompt, options.prompt_file, options.samples, options.greedy, options.output)
    return run_generate(config, asked)


def _export(config: RunConfig, options: argparse.Namespace) -> int:
    from nemo_rl_mcore.export import run_export

    return run_export(config, options.output)


def _replay(config: RunConfig, options: argparse.Namespace) -> int:
    from nemo_rl_mcore.replay import run_replay

    after, last = options.steps or (0, None)
    return run_replay(config, Path(options.run), after, last)
