"""The runs of each algorithm from arguments; every other key by `recipe` or `overrides`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_mcore.api.draft import Draft, Rewards, Weights
from nemo_rl_mcore.api.known_arguments import reports_unknown
from nemo_rl_mcore.api.rows import Data
from nemo_rl_mcore.api.run import Run
from nemo_rl_mcore.recipe.sources import read_recipe

type Keys = Mapping[str, Any]
"""Sections and keys of a recipe, as nested dicts; a function or class may stand in place of its import path."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run of a recipe, a YAML file or one that comes with the package; raises ConfigError.

    >>> run = load_recipe("grpo_copy_cpu.yaml", ["grpo.max_num_steps=7"])
    >>> run.config.loop.max_num_steps
    7
    """
    return Run(read_recipe(path), overrides)


class GRPO(Run):
    """Group relative policy optimization: `generations` answers to each prompt are compared by their rewards."""

    @reports_unknown
    def __init__(
        self,
        model: str | Path | None,
        *,
        train: Data | None = None,
        reward: Rewards | None = None,
        reward_weights: Weights | None = None,
        validation: Data | None = None,
        steps: int | None = None,
        epochs: int = 1,
        prompts_per_step: int = 8,
        generations: int = 8,
        lr: float = 1e-6,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        gpus: int | None = None,
        seed: int = 42,
        out: str | Path = "results/grpo",
        resume: str | Path = "auto",
        recipe: Keys | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check a run; raises ConfigError with every problem.

        model: a Hugging Face folder or hub id; None where `recipe` gives `policy.model`. train, validation: see `Data`.
        reward: a function that takes lists by name (prompts, responses, answers, finished, or any column of the data)
        and returns a number for each response; several as a list or a dict; or a class with `score` or `step`.
        reward_weights: a list in the same order, or a dict by name. steps: by default, `epochs` passes over the data.
        max_length: tokens of prompt and response. max_new_tokens: tokens of a response; by default, what its prompt
        leaves of max_length. gpus: by default, all that there are; 0 trains on the CPU. out: the folder of the run.
        resume: "auto" goes on from the last step that is saved there, and raises ChangedRunError if anything but steps,
        epochs, and what is saved or logged has changed since; "must" goes on with the changes; "never" begins anew, and
        puts aside what is there; or a folder step_N to go on from. recipe, overrides: other keys of a recipe, the
        latter in Hydra's grammar; they take precedence over arguments.

        >>> rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3=", "answer": "5"}]
        >>> def right(responses, answers):
        ...     return [float(one == other) for one, other in zip(responses, answers)]
        >>> def brief(responses):
        ...     return [-len(response) / 1000 for response in responses]
        >>> run = GRPO("model", train=rows, reward=[right, brief], steps=10, recipe={"env": {"pool": {"size": 2}}})
        >>> run.config.env.rewards
        {'right': '__main__:right', 'brief': '__main__:brief'}
        """
        draft = _sampling("grpo", prompts_per_step, generations, lr, gpus, seed)
        draft.model(model, max_length, max_new_tokens)
        draft.rewards(reward, reward_weights)
        draft.require_rewards(recipe, overrides)
        draft.data(train, validation, Path(out) / "data")
        draft.loop(steps, epochs, validation is not None, answers=True)
        draft.saved_in(out, resume)
        super().__init__(draft.recipe(recipe), overrides, draft.code, draft.problems)


class PPO(Run):
    """Proximal policy optimization: a critic with the policy's architecture judges each token."""

    @reports_unknown
    def __init__(
        self,
        model: str | Path | None,
        *,
        train: Data | None = None,
        reward: Rewards | None = None,
        reward_weights: Weights | None = None,
        validation: Data | None = None,
        steps: int | None = None,
        epochs: int = 1,
        prompts_per_step: int = 64,
        generations: int = 1,
        lr: float = 1e-6,
        critic_lr: float = 1e-5,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        gpus: int | None = None,
        seed: int = 42,
        out: str | Path = "results/ppo",
        resume: str | Path = "auto",
        recipe: Keys | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check a run; the arguments are those of `GRPO`. Raises ConfigError with every problem.

        >>> rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "2+3=", "answer": "5"}]
        >>> run = PPO("model", train=rows, reward=lambda responses: [1.0] * len(responses), critic_lr=2e-5)
        >>> run.config.algorithm
        'ppo'
        """
        draft = _sampling("ppo", prompts_per_step, generations, lr, gpus, seed)
        draft.set("value.optimizer.lr", critic_lr, "critic_lr")
        draft.model(model, max_length, max_new_tokens)
        draft.rewards(reward, reward_weights)
        draft.require_rewards(recipe, overrides)
        draft.data(train, validation, Path(out) / "data")
        draft.loop(steps, epochs, validation is not None, answers=True)
        draft.saved_in(out, resume)
        super().__init__(draft.recipe(recipe), overrides, draft.code, draft.problems)


class Distillation(Run):
    """On-policy distillation: a teacher says how probable each token of the policy's own answers is."""

    @reports_unknown
    def __init__(
        self,
        model: str | Path | None,
        *,
        teacher: str | Path | None,
        train: Data | None = None,
        validation: Data | None = None,
        reward: Rewards | None = None,
        steps: int | None = None,
        epochs: int = 1,
        prompts_per_step: int = 64,
        generations: int = 1,
        lr: float = 2e-5,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        gpus: int | None = None,
        seed: int = 42,
        out: str | Path = "results/distillation",
        resume: str | Path = "auto",
        recipe: Keys | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check a run; the other arguments are those of `GRPO`. Raises ConfigError with every problem.

        teacher: a Hugging Face folder or hub id; None where `recipe` gives `teacher`. reward: scores validations,
        which need it.

        >>> run = Distillation("model", teacher="teacher", train=[{"prompt": "2+2=", "answer": "4"}], max_new_tokens=9)
        >>> run.config.policy.generation.max_new_tokens
        9
        """
        draft = _sampling("distillation", prompts_per_step, generations, lr, gpus, seed)
        if teacher is not None:
            draft.weights("teacher", teacher, "teacher")
        draft.model(model, max_length, max_new_tokens)
        draft.rewards(reward)
        if validation is not None:
            draft.require_rewards(recipe, overrides)
        draft.data(train, validation, Path(out) / "data")
        draft.loop(steps, epochs, validation is not None, answers=True)
        draft.saved_in(out, resume)
        super().__init__(draft.recipe(recipe), overrides, draft.code, draft.problems)


class SFT(Run):
    """Supervised fine-tuning: prompts with their answers, or conversations (`messages`), are imitated."""

    @reports_unknown
    def __init__(
        self,
        model: str | Path | None,
        *,
        train: Data | None = None,
        validation: Data | None = None,
        steps: int | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        lr: float = 2e-5,
        max_length: int | None = None,
        gpus: int | None = None,
        seed: int = 42,
        out: str | Path = "results/sft",
        resume: str | Path = "auto",
        recipe: Keys | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check a run; the other arguments are those of `GRPO`. Raises ConfigError with every problem.

        batch_size: answers of a step. A validation takes the loss of held-out answers.

        >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> run = SFT("model", train=[{"messages": said}], batch_size=1, epochs=3)
        >>> run.config.loop.max_num_epochs
        3
        """
        draft = _given("sft", batch_size, lr, gpus, seed)
        draft.model(model, max_length, None)
        draft.data(train, validation, Path(out) / "data")
        draft.loop(steps, epochs, validation is not None, answers=False)
        draft.saved_in(out, resume)
        super().__init__(draft.recipe(recipe), overrides, draft.code, draft.problems)


class DPO(Run):
    """Direct preference optimization on pairs: prompt, chosen and rejected answer."""

    @reports_unknown
    def __init__(
        self,
        model: str | Path | None,
        *,
        train: Data | None = None,
        validation: Data | None = None,
        steps: int | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        lr: float = 1e-6,
        max_length: int | None = None,
        gpus: int | None = None,
        seed: int = 42,
        out: str | Path = "results/dpo",
        resume: str | Path = "auto",
        recipe: Keys | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Check a run; the other arguments are those of `GRPO`. Raises ConfigError with every problem.

        batch_size: pairs of a step. A validation takes the loss of held-out pairs.

        >>> pairs = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
        >>> DPO("model", train=pairs, batch_size=1, lr=-1.0)
        Traceback (most recent call last):
        nemo_rl_mcore.config.base.ConfigError: policy.megatron_cfg.optimizer.lr...
        """
        draft = _given("dpo", batch_size, lr, gpus, seed)
        draft.model(model, max_length, None)
        draft.data(train, validation, Path(out) / "data")
        draft.loop(steps, epochs, validation is not None, answers=False)
        draft.saved_in(out, resume)
        super().__init__(draft.recipe(recipe), overrides, draft.code, draft.problems)


def _begun(algorithm: str, lr: float, gpus: int | None, seed: int) -> Draft:
    draft = Draft(algorithm)
    draft.set("seed", seed, "seed")
    draft.set("policy.megatron_cfg.optimizer.lr", lr, "lr")
    draft.machine(gpus)
    return draft


def _sampling(
    algorithm: str, prompts: int, generations: int, lr: float, gpus: int | None, seed: int
) -> Draft:
    draft = _begun(algorithm, lr, gpus, seed)
    draft.set(f"{algorithm}.num_prompts_per_step", prompts, "prompts_per_step")
    draft.set(f"{algorithm}.num_generations_per_prompt", generations, "generations")
    draft.batch(prompts, "prompts_per_step", generations)
    return draft


def _given(algorithm: str, batch_size: int, lr: float, gpus: int | None, seed: int) -> Draft:
    draft = _begun(algorithm, lr, gpus, seed)
    draft.batch(batch_size, "batch_size")
    return draft
