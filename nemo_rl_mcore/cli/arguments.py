"""The command line: its commands, and what each takes."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NoReturn, cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.driver.output import visible
from nemo_rl_mcore.recipe.schema import Kind, path_ending_in
from nemo_rl_mcore.recipe.sources import read_recipe

_DESCRIPTION = """Check and run recipes: `check` resolves one on paper, `grpo` and the others run it, `replay` repeats
what ran. `migrate` makes one of a recipe of NeMo RL."""
_RESUMES = """Without checkpointing.enabled=true nothing is saved. With it the same command resumes an interrupted run
from its newest checkpoint; run it again until it says that the run has finished."""
_STATUSES = """Exit status: 0 where the recipe says all that theirs said and `check` takes it, 2 where the file has
something refused or left to settle, 1 where no file was written."""
_OF_REHEARSALS = """Exit status: 0 where all that ran is as it is to be, 1 where something is not, 2 where the recipe
has problems and nothing ran."""
_MORE = {
    **dict.fromkeys(RUN_CONFIGS, _RESUMES),
    "migrate": _STATUSES,
    "rehearse": _OF_REHEARSALS,
}
_EXAMPLES = {
    "grpo": "grpo --config grpo_copy_cpu.yaml grpo.max_num_steps=50 logger.log_dir=results/short",
    "ppo": "ppo --config ppo_cpu.yaml policy.megatron_cfg.optimizer.lr=1e-3",
    "dpo": "dpo --config quickstart/dpo_cpu.yaml checkpointing.enabled=true",
    "sft": "sft --config quickstart/sft_cpu.yaml checkpointing.enabled=true",
    "distillation": "distillation --config distillation_cpu.yaml distillation.max_num_steps=50",
    "check": "check --config quickstart/grpo_7B_8gpu.yaml cluster.gpus_per_node=4",
    "doctor": "doctor --config quickstart/grpo_7B_8gpu.yaml",
    "eval": "eval --checkpoint results/mine/checkpoints/step_100",
    "generate": "generate --hf results/mine/hf --config mine.yaml --prompt '527>' --samples 4",
    "export": "export --checkpoint results/mine/checkpoints/step_100 --output results/mine/hf",
    "replay": "replay results/mine --steps 0:20",
    "report": "report results/mine results/yours --output comparison.html",
    "migrate": "migrate grpo_math_1B_megatron.yaml --output mine.yaml",
    "rehearse": "rehearse grpo_math_1B_megatron.yaml --json rehearsal.json",
    "recipes": "recipes copy quickstart",
}


class _Formatter(argparse.HelpFormatter):
    """Wraps texts of one paragraph, and leaves those with line breaks as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Quotes the command line in its errors as `visible` spells it."""

    status_of_errors = 2
    """Exit status where the command line is wrong."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Write the message and end the process."""
        super().exit(status and self.status_of_errors, message and visible(message))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command line (None: of the process) and its overrides; exit where it is wrong."""
    parser = _Parser(prog="nemo-rl-mcore", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version("nemo-rl-mcore"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in RUN_CONFIGS:
        _add_recipe(_add_command(commands, name, f"check a recipe with a section {name}, then run it"))
    for add in (_add_check, _add_eval, _add_generate, _add_export, _add_replay):
        add(commands)
    for add in (_add_report, _add_doctor, _add_migrate, _add_rehearse, _add_recipes):
        add(commands)
    for name, command in commands.choices.items():
        more = _MORE.get(name, "")
        command.epilog = "\n\n".join(filter(None, (f"example:\n  nemo-rl-mcore {_EXAMPLES[name]}", more)))
        command.formatter_class = _Formatter
    # argparse takes one group of overrides; those on the other side of --config come back as unknown.
    options, rest = parser.parse_known_args(arguments)
    unknown = [text for text in rest if text.startswith("-") or "overrides" not in options]
    if unknown:
        parser.status_of_errors = commands.choices[options.command].status_of_errors
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], rest, options)}")
    if options.command == "generate" and options.greedy and options.samples > 1:
        parser.error(f"--greedy gives the same answer {options.samples} times: leave out it or --samples")
    overrides = [*getattr(options, "overrides", ()), *rest]
    if options.command == "doctor" and overrides and options.config is None:
        parser.error(f"{overrides[0]} changes a recipe, and none is named: --config FILE")
    return options, overrides


def _hint(unknown: str, rest: Sequence[str], options: argparse.Namespace) -> str:
    """Return how to write a key of the recipe that was given as an option, as in `--max_steps 3`."""
    if "overrides" not in options or not unknown.startswith("--"):
        return ""
    kind = RUN_CONFIGS.get(options.command) or _kind_of_recipe(getattr(options, "config", None))
    name, _, value = unknown.removeprefix("--").partition("=")
    path = path_ending_in(name.replace("-", "_"), kind)
    values = [text for text in (*options.overrides, *rest) if "=" not in text and not text.startswith("-")]
    given = value or next(iter(values), "VALUE")
    return f"; write {path}={given}" if path else "; a key of the recipe is written KEY=VALUE"


def _kind_of_recipe(file: str | None) -> Kind:
    """Return the kind of a recipe, as far as it can be read: its own problems are reported by whoever loads it."""
    tree: dict[str, object] = {}
    with suppress(ConfigError):
        written = {} if file is None else OmegaConf.to_container(read_recipe(file).tree)
        tree = cast("dict[str, object]", written)
    return kind_of(tree)


def _add_command(commands: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=purpose, allow_abbrev=False
    )
    command.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="Hydra's grammar: a.b=c, +new=1, ~gone"
    )
    return command


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", required=True, metavar="FILE", help="the recipe, a YAML file")
    command.add_argument(
        "--migrate",
        action="store_true",
        help="the recipe is one of NeMo RL: migrate it first, and print what changes",
    )


def _add_check(commands: Any) -> None:
    purpose = "check a recipe and print the resolved plan: layout, batches, guardrails, memory"
    check = _add_command(commands, "check", purpose)
    _add_recipe(check)
    check.add_argument(
        "--resolved",
        action="store_true",
        help="print every key with its value and where it is set, instead of the plan",
    )
    check.add_argument(
        "--full",
        action="store_true",
        help="open the data too: tokenise it, read the reference answers, score one row",
    )


def _add_doctor(commands: Any) -> None:
    purpose = "report what this machine has, what is missing for runs or for a recipe, and the command that fixes it"
    doctor = _add_command(commands, "doctor", purpose)
    doctor.add_argument("--config", metavar="FILE", help="the recipe to look at this machine for")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="S", help="seconds for all imports together (120)"
    )


def _add_eval(commands: Any) -> None:
    purpose = "score the answers to the sets of a recipe's section eval"
    _add_weights(_add_command(commands, "eval", purpose), required=False)


def _add_generate(commands: Any) -> None:
    generate = _add_command(commands, "generate", "answer prompts with given weights")
    _add_weights(generate, required=True)
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    generate.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a prompt a line, or a file .jsonl of prompts or messages; without any prompt, held-out ones are taken",
    )
    generate.add_argument("--samples", type=_count, default=1, metavar="N", help="answers to each prompt (1)")
    generate.add_argument(
        "--greedy", action="store_true", help="take the likeliest token instead of sampling"
    )
    generate.add_argument(
        "--output", metavar="FILE", help="write the answers here, as JSONL; it must not exist"
    )


def _add_export(commands: Any) -> None:
    export = _add_command(commands, "export", "write the weights of a checkpoint as a Hugging Face folder")
    export.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder step_N of a run")
    export.add_argument(
        "--output", required=True, metavar="DIR", help="the folder to write; it must not exist"
    )


def _add_replay(commands: Any) -> None:
    replay = _add_command(commands, "replay", "train again what an asynchronous run has logged, and compare")
    replay.add_argument("run", metavar="RUN_DIR", help="logger.log_dir of the run")
    replay.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="the steps after A up to B, from the last weights at or before A that are kept; left out, all steps",
    )


def _add_weights(command: argparse.ArgumentParser, *, required: bool) -> None:
    weights = command.add_mutually_exclusive_group(required=required)
    weights.add_argument("--checkpoint", metavar="DIR", help="weights of a folder step_N of a run")
    weights.add_argument("--hf", metavar="DIR", help="weights of a Hugging Face folder")
    command.add_argument(
        "--config", metavar="FILE", help="the recipe; left out, it is that of the checkpoint"
    )


def _add_report(commands: Any) -> None:
    purpose = "write a page of a run, or of several side by side, that a browser shows"
    report: argparse.ArgumentParser = commands.add_parser(
        "report", help=purpose, description=purpose, allow_abbrev=False
    )
    report.add_argument(
        "runs", nargs="+", metavar="DIR", help="logger.log_dir of a run, or the folder of an eval"
    )
    report.add_argument(
        "--output", metavar="FILE", help="left out, report.html in DIR, or comparison.html here for several"
    )


def _add_migrate(commands: Any) -> None:
    purpose = "write a recipe from one of NeMo RL, and say what became of each key"
    migrate: _Parser = commands.add_parser("migrate", help=purpose, description=purpose, allow_abbrev=False)
    migrate.status_of_errors = 1
    migrate.add_argument(
        "recipe", metavar="THEIR.yaml", help="the recipe of NeMo RL, its `defaults:` beside it"
    )
    migrate.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of their recipe, applied before it is migrated"
    )
    migrate.add_argument(
        "--output", metavar="OURS.yaml", help="the file to write; left out, the same name in this folder"
    )


def _add_rehearse(commands: Any) -> None:
    purpose = "shrink a recipe, ours or NeMo RL's, run it on CPU in its own layout, and prove what that can"
    rehearse: argparse.ArgumentParser = commands.add_parser(
        "rehearse", help=purpose, description=purpose, allow_abbrev=False
    )
    rehearse.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe, a YAML file")
    rehearse.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe, applied before it is shrunk"
    )
    rehearse.add_argument(
        "--ranks", type=int, choices=(4, 8), default=4, help="processes that share the model (4)"
    )
    rehearse.add_argument("--json", metavar="FILE", help="write what was found there too")


def _add_recipes(commands: Any) -> None:
    purpose = "list the recipes that come with the package, or copy one or a folder of them"
    command: argparse.ArgumentParser = commands.add_parser("recipes", help=purpose, description=purpose)
    actions = command.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="the names, as `defaults:` and --config take them")
    copy = actions.add_parser(
        "copy", help="copy a recipe or a folder of recipes, with the parents and other files that they need"
    )
    copy.add_argument("name", metavar="NAME", help="such as grpo_copy_cpu.yaml or quickstart")
    copy.add_argument(
        "destination",
        nargs="?",
        metavar="DEST",
        help="left out, here; each file keeps its path in the package",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of answers, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, above 0")
    return seconds


def _steps(text: str) -> tuple[int, int | None]:
    first, _, last = text.partition(":")
    try:
        return int(first or 0), int(last) if last else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not A:B, two numbers of steps, such as 0:20"
        ) from error
