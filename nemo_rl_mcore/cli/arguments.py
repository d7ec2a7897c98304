"""The command line: commands and their arguments."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn, cast

from omegaconf import OmegaConf

from nemo_rl_mcore.config.base import ConfigError
from nemo_rl_mcore.config.master import RUN_CONFIGS, kind_of
from nemo_rl_mcore.driver.output import visible
from nemo_rl_mcore.recipe.schema import path_ending_in
from nemo_rl_mcore.recipe.sources import read_recipe

_DESCRIPTION = """Check and run recipes: `check` resolves one on paper, `grpo` and the others run it, `replay` repeats
what ran. `migrate` translates a NeMo RL recipe."""


@dataclass(frozen=True)
class Command:
    """A command: its purpose, an example, and its arguments with argparse's keywords.

    overrides: their help; empty if not accepted. weights: whether --checkpoint or --hf is required; None: neither.
    """

    purpose: str
    example: str
    arguments: tuple["Argument", ...] = ()
    overrides: str = "Hydra's grammar: a.b=c, +new=1, ~gone"
    weights: bool | None = None
    more: str = ""
    status_of_errors: int = 2


type Argument = tuple[str, dict[str, Any]]


def _argument(name: str, metavar: str | None, told: str, **how: Any) -> Argument:
    return name, how | {"help": told} | ({} if metavar is None else {"metavar": metavar})


def _flag(name: str, told: str) -> Argument:
    return name, {"help": told, "action": "store_true"}


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, above 0")


def _steps(text: str) -> tuple[int, int | None]:
    first, _, last = text.partition(":")
    try:
        return int(first or 0), int(last) if last else None
    except ValueError as error:
        what = f"{text!r} is not A:B, two numbers of steps, such as 0:20"
        raise argparse.ArgumentTypeError(what) from error


_CONFIG = _argument("--config", "FILE", "the recipe, a YAML file", required=True)
_OWN_CONFIG = _argument("--config", "FILE", "the recipe; default: the checkpoint's")
_MIGRATE = _flag("--migrate", "for a NeMo RL recipe: migrate it first, and print the changes")
_RUN_EXAMPLES = {
    "grpo": "grpo --config grpo_copy_cpu.yaml grpo.max_num_steps=50 logger.log_dir=results/short",
    "ppo": "ppo --config ppo_cpu.yaml policy.megatron_cfg.optimizer.lr=1e-3",
    "dpo": "dpo --config quickstart/dpo_cpu.yaml checkpointing.enabled=true",
    "sft": "sft --config quickstart/sft_cpu.yaml checkpointing.enabled=true",
    "distillation": "distillation --config distillation_cpu.yaml distillation.max_num_steps=50",
}
_MODELS = "the policy's model, or teacher=NAME for another section; may be repeated"
_FILES = "the training rows, or validation=FILE; may be repeated"
_RESUMES = """Without checkpointing.enabled=true nothing is saved. With it the same command resumes an interrupted run
from its newest checkpoint; repeat it until the run has finished."""

COMMANDS = {
    name: Command(
        f"check a recipe with a section {name}, then run it", example, (_CONFIG, _MIGRATE), more=_RESUMES
    )
    for name, example in _RUN_EXAMPLES.items()
}
COMMANDS |= {
    "check": Command(
        "check a recipe and print the resolved plan: layout, batches, guardrails, memory",
        "check --config quickstart/grpo_7B_8gpu.yaml cluster.gpus_per_node=4",
        (
            _CONFIG,
            _MIGRATE,
            _flag("--resolved", "print every key with its value and where it is set, instead of the plan"),
            _flag("--full", "open the data too: tokenise it, read the reference answers, score one row"),
        ),
    ),
    "eval": Command(
        "score the answers to the sets of a recipe's section eval",
        "eval --checkpoint results/mine/checkpoints/step_100",
        (_OWN_CONFIG,),
        weights=False,
    ),
    "generate": Command(
        "answer prompts with given weights",
        "generate --hf results/mine/hf --config mine.yaml --prompt '527>' --samples 4",
        (
            _OWN_CONFIG,
            _argument("--prompt", "TEXT", "may be repeated", action="append", default=[]),
            _argument("--prompt-file", "FILE", "lines of prompts, or .jsonl; default: held-out prompts"),
            _argument("--samples", "N", "answers to each prompt (1)", type=int, default=1),
            _flag("--greedy", "take the likeliest token instead of sampling"),
            _argument("--output", "FILE", "write the answers here, as JSONL; it must not exist"),
        ),
        weights=True,
    ),
    "export": Command(
        "write the weights of a checkpoint as a Hugging Face folder",
        "export --checkpoint results/mine/checkpoints/step_100 --output results/mine/hf",
        (
            _argument("--checkpoint", "DIR", "a folder step_N of a run", required=True),
            _argument("--output", "DIR", "the folder to write; it must not exist", required=True),
            _flag("--adapters", "write only the adapters, as the peft library does, without merging them"),
        ),
    ),
    "replay": Command(
        "train the logged steps of an asynchronous run again, and compare",
        "replay results/mine --steps 0:20",
        (
            _argument("run", "RUN_DIR", "logger.log_dir of the run"),
            _argument("--steps", "A:B", "the steps after A up to B; default: all steps", type=_steps),
        ),
    ),
    "report": Command(
        "write an HTML page about a run, or several side by side",
        "report results/mine results/yours --output comparison.html",
        (
            _argument("runs", "DIR", "logger.log_dir of a run, or the folder of an eval", nargs="+"),
            _argument("--output", "FILE", "default: report.html in DIR, or comparison.html here for several"),
        ),
        overrides="",
    ),
    "doctor": Command(
        "report this machine's parts, those missing for runs or a recipe, and the command that fixes each",
        "doctor --config quickstart/grpo_7B_8gpu.yaml",
        (
            _argument("--config", "FILE", "a recipe whose requirements to check as well"),
            _flag("--json", "print one JSON object"),
            _argument("--timeout", "S", "seconds for all imports (120)", type=_seconds, default=120.0),
        ),
    ),
    "migrate": Command(
        "translate a NeMo RL recipe, and report the result for each key",
        "migrate grpo_math_1B_megatron.yaml --output mine.yaml",
        (
            _argument("recipe", "THEIR.yaml", "the NeMo RL recipe, with its `defaults:` beside it"),
            _argument("--output", "OURS.yaml", "the file to write; default: the same name in this folder"),
            _argument("--model", "NAME", _MODELS, action="append", default=[]),
            _argument("--data", "FILE", _FILES, action="append", default=[]),
        ),
        overrides="of their recipe, applied before it is migrated",
        more="""Exit status: 0 if everything carried over and `check` accepts the recipe, 2 if something is refused
or left to settle, 1 if no file was written.""",
        status_of_errors=1,
    ),
    "rehearse": Command(
        "shrink a recipe, ours or NeMo RL's, run it on CPU in its own layout, and compare the results",
        "rehearse grpo_math_1B_megatron.yaml --json rehearsal.json",
        (
            _argument("recipe", "RECIPE.yaml", "the recipe, a YAML file"),
            _argument("--ranks", None, "processes of the model (4)", type=int, choices=(4, 8), default=4),
            _argument("--json", "FILE", "also write the findings to this file"),
        ),
        overrides="of the recipe, applied before it is shrunk",
        more="""Exit status: 0 if everything that ran is as expected, 1 if something is not, 2 if the recipe has
problems and nothing ran.""",
    ),
    "recipes": Command(
        "list the recipes that come with the package, or copy one or a folder of them",
        "recipes copy quickstart",
        overrides="",
    ),
}


class _Parser(argparse.ArgumentParser):
    """A parser that quotes the command line in errors through `visible` and exits with `status_of_errors`."""

    status_of_errors = 2

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status and self.status_of_errors, message and visible(message))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return a command line's options and overrides (None: this process's command line); exit if it is invalid."""
    parser = _Parser(prog="nemo-rl-mcore", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version("nemo-rl-mcore"))
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        made: _Parser = commands.add_parser(
            name,
            help=command.purpose,
            description=command.purpose,
            allow_abbrev=False,
            epilog="\n\n".join(filter(None, (f"example:\n  nemo-rl-mcore {command.example}", command.more))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.status_of_errors = command.status_of_errors
        if command.weights is not None:
            weights = made.add_mutually_exclusive_group(required=command.weights)
            weights.add_argument("--checkpoint", metavar="DIR", help="weights of a folder step_N of a run")
            weights.add_argument("--hf", metavar="DIR", help="weights of a Hugging Face folder")
        for named, how in command.arguments:
            made.add_argument(named, **how)
        if command.overrides:
            made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=command.overrides)
        if name == "recipes":
            actions = made.add_subparsers(dest="action", metavar="ACTION")
            actions.add_parser("list", help="the names, as `defaults:` and --config take them")
            purpose = "copy a recipe or a folder of recipes, with the parents and other files that they need"
            copy = actions.add_parser("copy", help=purpose)
            copy.add_argument("name", metavar="NAME", help="such as grpo_copy_cpu.yaml or quickstart")
            where = "left out, here; each file keeps its path in the package"
            copy.add_argument("destination", nargs="?", metavar="DEST", help=where)
    # argparse accepts one group of overrides; any on the other side of --config are returned as unknown.
    options, rest = parser.parse_known_args(arguments)
    unknown = [text for text in rest if text.startswith("-") or "overrides" not in options]
    if unknown:
        parser.status_of_errors = COMMANDS[options.command].status_of_errors
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], rest, options)}")
    if options.command == "generate" and options.samples < 1:
        parser.error(f"--samples {options.samples}: must be at least 1")
    if options.command == "generate" and options.greedy and options.samples > 1:
        parser.error(f"--greedy gives the same answer {options.samples} times: leave out it or --samples")
    overrides = [*getattr(options, "overrides", ()), *rest]
    if options.command == "doctor" and overrides and options.config is None:
        parser.error(f"{overrides[0]} changes a recipe, and none is named: --config FILE")
    return options, overrides


def _hint(unknown: str, rest: Sequence[str], options: argparse.Namespace) -> str:
    """Return a hint for a recipe key that was written as an option, as in `--max_steps 3`."""
    if "overrides" not in options or not unknown.startswith("--"):
        return ""
    tree: dict[str, object] = {}
    if (file := getattr(options, "config", None)) is not None:
        with suppress(ConfigError):  # problems are reported when it is loaded
            tree = cast("dict[str, object]", OmegaConf.to_container(read_recipe(file).tree))
    name, _, value = unknown.removeprefix("--").partition("=")
    path = path_ending_in(name.replace("-", "_"), RUN_CONFIGS.get(options.command) or kind_of(tree))
    values = [text for text in (*options.overrides, *rest) if "=" not in text and not text.startswith("-")]
    given = value or next(iter(values), "VALUE")
    return f"; write {path}={given}" if path else "; a key of the recipe is written KEY=VALUE"
