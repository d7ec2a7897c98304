"""Run classes for each algorithm, built from arguments; `recipe` and `overrides` set all other keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import Parameter, Signature
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

from nemo_rl_mcore.api.draft import Data, Draft, Rewards, Weights
from nemo_rl_mcore.api.run import Run
from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.master import RUN_CONFIGS
from nemo_rl_mcore.models.pretrained import read_hf_config
from nemo_rl_mcore.recipe.schema import fields
from nemo_rl_mcore.recipe.sources import read_recipe
from nemo_rl_mcore.tools.check.machine import visible_gpus

type Keys = Mapping[str, Any]
"""Sections and keys of a recipe as nested dicts; functions and classes may replace their import paths."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run for a recipe, a YAML file or a recipe shipped with the package; raises ConfigError.

    >>> run = load_recipe("grpo_copy_cpu.yaml", ["grpo.max_num_steps=7"])
    >>> run.config.loop.max_num_steps
    7
    """
    return Run(read_recipe(path), overrides)


class Arguments(TypedDict, total=False):
    """Arguments of every algorithm, described in `GRPO`."""

    train: Data | None
    validation: Data | None
    steps: int | None
    epochs: int
    lr: float
    lora: int | Keys | None
    max_length: int | None
    gpus: int | None
    seed: int
    out: str | Path
    resume: str | Path
    recipe: Keys | None
    overrides: Sequence[str]


class GivenArguments(Arguments, total=False):
    batch_size: int


class SamplingArguments(Arguments, total=False):
    reward: Rewards | None
    prompts_per_step: int
    generations: int
    reward_weights: Weights | None
    max_new_tokens: int | None


class PPOArguments(SamplingArguments, total=False):
    critic_lr: float


TRL = {
    "batch_size": "prompts_per_step",
    "beta": "reference_policy_kl_penalty",
    "eval_dataset": "validation",
    "learning_rate": "lr",
    "peft_config": "lora",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "num_generations": "generations",
    "num_train_epochs": "epochs",
    "output_dir": "out",
    "per_device_train_batch_size": "prompts_per_step",
    "processing_class": "policy.tokenizer.name",
    "prompts_per_step": "batch_size",
    "reward_funcs": "reward",
    "train_dataset": "train",
}
"""Argument names of TRL or another algorithm, with the corresponding argument, recipe key, or further such name."""

_LONGEST = 1024
"""Default maximum tokens in prompt and answer together, if the model supports it."""
_NO_END = 1_000_000


class _Algorithm(Run):
    """A run built from a TypedDict's arguments, with defaults from the class."""

    __signature__: ClassVar[Signature]
    _defaults: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, arguments: type, **defaults: object) -> None:
        """Build the signature of arguments and defaults for `help` and inspection."""
        shared = {"steps": None, "epochs": 1, "lora": None, "max_length": None, "gpus": None, "recipe": None}
        shared |= {"seed": 42, "out": f"results/{cls.__name__.lower()}", "resume": "auto", "overrides": ()}
        named = dict.fromkeys([*arguments.__annotations__, *defaults], None)
        cls._defaults = {**named, **shared, **defaults}
        keywords = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in cls._defaults.items()
        ]
        cls.__signature__ = Signature([Parameter("model", Parameter.POSITIONAL_OR_KEYWORD), *keywords])

    def _begin(self, model: str | Path | None, given: Mapping[str, Any]) -> None:
        """Build and check a recipe from arguments; unknown arguments are reported with all other problems."""
        algorithm = type(self).__name__.lower()
        asked, unknown = {**self._defaults, **given}, list[Problem]()
        for name in given:
            if name not in self._defaults:
                what, meant = f"no argument of {algorithm.upper()}", TRL.get(name, name)
                unknown.append(Problem("unknown-key", name, what, self._remedy(name)))
                if meant in self._defaults and meant not in given:
                    asked[meant] = given[name]
        draft = Draft(algorithm)
        try:
            _fill(draft, model, asked)
        except ConfigError as error:
            raise ConfigError([*unknown, *error.problems]) from None
        problems = [*unknown, *draft.problems]
        Run.__init__(self, draft.recipe(asked["recipe"]), asked["overrides"], draft.code, problems)

    def _remedy(self, name: str) -> str:
        """Return a suggestion for an unknown argument."""
        known, meant = self._defaults, TRL.get(name, name)
        meant = meant if meant in known else TRL.get(meant, meant)
        if meant in known:
            return f"did you mean {meant}?"
        paths = fields(RUN_CONFIGS[type(self).__name__.lower()])
        if keys := [path for path in paths if path == meant or path.endswith(f".{meant}")]:
            there = " or ".join(keys)
            return f"it is a key of the recipe: {there}; give it in recipe={{...}} or overrides=[...]"
        if near := difflib.get_close_matches(name, known, n=1):
            return f"did you mean {near[0]}?"
        return f"arguments are model, {', '.join(known)}; all else is a key of the recipe"


def _fill(draft: Draft, model: str | Path | None, asked: Mapping[str, Any]) -> None:
    """Set a recipe's keys from an algorithm's arguments; raises ConfigError."""
    name, samples, validated = draft.algorithm, "generations" in asked, asked["validation"] is not None
    gpus = visible_gpus() if asked["gpus"] is None else asked["gpus"]
    draft.set("seed", {"seed": asked["seed"]})
    draft.set("lr", {"policy.megatron_cfg.optimizer.lr": asked["lr"]})
    if (lora := asked["lora"]) is not None:
        peft = {"enabled": True, **(lora if isinstance(lora, Mapping) else {"dim": lora, "alpha": 2 * lora})}
        draft.set("lora", {f"policy.megatron_cfg.peft.{key}": value for key, value in peft.items()})
    draft.set("gpus", {"cluster.gpus_per_node": gpus, "policy.precision": "bfloat16" if gpus else "float32"})
    if samples:
        answers, rows, of = asked["generations"], asked["prompts_per_step"], "prompts_per_step"
        draft.set(of, {f"{name}.num_prompts_per_step": rows})
        draft.set("generations", {f"{name}.num_generations_per_prompt": answers})
    else:
        answers, rows, of = 1, asked["batch_size"], "batch_size"
    if all(isinstance(one, int) for one in (rows, answers, gpus)):  # each is reported under its own key
        draft.set(of, {"policy.train_global_batch_size": rows * answers})
        microbatch = gcd(max(1, rows * answers // max(1, gpus)), 4)  # at most 4 rows
        sizes = ("policy.train_micro_batch_size", "policy.logprob_batch_size")
        draft.set("", dict.fromkeys(sizes, microbatch))
    if "critic_lr" in asked:
        draft.set("critic_lr", {"value.optimizer.lr": asked["critic_lr"]})
    if asked.get("teacher") is not None:
        draft.weights("teacher", asked["teacher"], "teacher")
    longest = asked["max_length"] or _LONGEST
    if model is not None:
        draft.weights("policy", model, "model")
        with suppress(ConfigError):  # reported when the recipe is checked
            positions = (read_hf_config(str(model)) or {}).get("max_position_embeddings")
            if asked["max_length"] is None and isinstance(positions, int):
                longest = min(longest, positions)
    draft.set("max_length", {"policy.max_total_sequence_length": longest})
    new_tokens = asked.get("max_new_tokens")
    new = {"max_new_tokens": new_tokens or longest, "fit_to_sequence": new_tokens is None}
    draft.set("max_new_tokens", {f"policy.generation.{key}": value for key, value in new.items()})
    if samples:
        given = {
            *(asked["recipe"] or ()),
            *(text.lstrip("+").partition(".")[0] for text in asked["overrides"]),
        }
        required = "env" not in given and (validated or "teacher" not in asked)
        draft.rewards(asked["reward"], asked.get("reward_weights"), required=required)
    out, steps = Path(asked["out"]), asked["steps"]
    draft.data(asked["train"], asked["validation"], out / "data")
    draft.set("steps", {f"{name}.max_num_steps": _NO_END if steps is None else steps})
    draft.set("epochs", {f"{name}.max_num_epochs": asked["epochs"] if steps is None else _NO_END})
    draft.set("validation", {f"{name}.{key}": validated for key in ("val_at_start", "val_at_end")})
    if validated and not samples:  # there are no answers to score
        draft.set("validation", {f"{name}.max_val_samples": 0})
    saved = {"checkpointing.enabled": True, "checkpointing.checkpoint_dir": str(out / "checkpoints")}
    draft.set("out", {"logger.log_dir": str(asked["out"]), **saved})
    draft.set("", {"checkpointing.keep_top_k": 1})
    draft.set("resume", {"checkpointing.resume": str(asked["resume"])})


class GRPO(_Algorithm, arguments=SamplingArguments, lr=1e-6, prompts_per_step=8, generations=8):
    """Group relative policy optimization: `generations` answers to each prompt are compared by their rewards."""

    def __init__(self, model: str | Path | None, **given: Unpack[SamplingArguments]) -> None:
        """Check a run; raises ConfigError with every problem.

        model: a Hugging Face folder or hub id; None if `recipe` sets `policy.model`. train, validation: see `Data`.
        reward: a function that takes lists by name (prompts, responses, answers, finished, or any column of the data)
        and returns a number for each response; several as a list or a dict; or a class with `score` or `step`.
        reward_weights: a list in the same order, or a dict by name. steps: by default, `epochs` passes over the data.
        lora: the rank of adapters to train in place of the weights (alpha is twice that), or keys of
        `policy.megatron_cfg.peft`. max_length: tokens of prompt and response. max_new_tokens: tokens of a response; by
        default, all that its prompt leaves of max_length. gpus: by default, all available; 0 trains on the CPU.
        out: the run's folder. resume: "auto" continues from the last step saved there, and raises ChangedRunError if
        anything but steps, epochs, and settings for saving or logging has changed; "must" continues despite changes;
        "never" starts over and moves existing files aside; or a folder step_N from which to continue.
        recipe, overrides: other keys of a recipe, the latter in Hydra's grammar; they take precedence over arguments.

        >>> rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3=", "answer": "5"}]
        >>> def right(responses, answers):
        ...     return [float(one == other) for one, other in zip(responses, answers)]
        >>> def brief(responses):
        ...     return [-len(response) / 1000 for response in responses]
        >>> run = GRPO("model", train=rows, reward=[right, brief], steps=10, recipe={"env": {"pool": {"size": 2}}})
        >>> run.config.env.rewards
        {'right': '__main__:right', 'brief': '__main__:brief'}
        """
        self._begin(model, given)


class PPO(_Algorithm, arguments=PPOArguments, lr=1e-6, critic_lr=1e-5, prompts_per_step=64, generations=1):
    """Proximal policy optimization: a critic with the policy's architecture judges each token."""

    def __init__(self, model: str | Path | None, **given: Unpack[PPOArguments]) -> None:
        """Check a run; the arguments are those of `GRPO`. Raises ConfigError with every problem.

        >>> rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3=", "answer": "5"}]
        >>> run = PPO("model", train=rows, reward=lambda responses: [1.0] * len(responses), critic_lr=2e-5)
        >>> run.config.algorithm
        'ppo'
        """
        self._begin(model, given)


class Distillation(
    _Algorithm,
    arguments=SamplingArguments,
    teacher=Parameter.empty,
    lr=2e-5,
    prompts_per_step=64,
    generations=1,
):
    """On-policy distillation: the policy learns a teacher's token probabilities on its own answers."""

    def __init__(
        self, model: str | Path | None, *, teacher: str | Path | None, **given: Unpack[SamplingArguments]
    ) -> None:
        """Check a run; the other arguments are those of `GRPO`. Raises ConfigError with every problem.

        teacher: a Hugging Face folder or hub id; None if `recipe` sets `teacher`. reward: required for validations,
        whose answers it scores.

        >>> run = Distillation("model", teacher="teacher", train=[{"prompt": "2+2=", "answer": "4"}], max_new_tokens=9)
        >>> run.config.policy.generation.max_new_tokens
        9
        """
        self._begin(model, {**given, "teacher": teacher})


class SFT(_Algorithm, arguments=GivenArguments, lr=2e-5, batch_size=32):
    """Supervised fine-tuning on prompts with answers, or on conversations (`messages`)."""

    def __init__(self, model: str | Path | None, **given: Unpack[GivenArguments]) -> None:
        """Check a run; the other arguments are those of `GRPO`. Raises ConfigError with every problem.

        batch_size: answers per step. A validation computes the loss of held-out answers.

        >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> run = SFT("model", train=[{"messages": said}], batch_size=1, epochs=3)
        >>> run.config.loop.max_num_epochs
        3
        """
        self._begin(model, given)


class DPO(_Algorithm, arguments=GivenArguments, lr=1e-6, batch_size=32):
    """Direct preference optimization on pairs: prompt, chosen and rejected answer."""

    def __init__(self, model: str | Path | None, **given: Unpack[GivenArguments]) -> None:
        """Check a run; the other arguments are those of `GRPO`. Raises ConfigError with every problem.

        batch_size: pairs per step. A validation computes the loss of held-out pairs.

        >>> pairs = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
        >>> DPO("model", train=pairs, batch_size=1, lr=-1.0)
        Traceback (most recent call last):
        nemo_rl_mcore.config.base.ConfigError: policy.megatron_cfg.optimizer.lr...
        """
        self._begin(model, given)
