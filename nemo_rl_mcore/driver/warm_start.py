"""Recipes that a run has run first, for its weights or its teacher's."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_mcore.config.base import ConfigError, Problem
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.config.run_models import ModelPlan
from nemo_rl_mcore.driver.data_files import answer_problems, scored_examples
from nemo_rl_mcore.driver.saved_run import does_not_fit
from nemo_rl_mcore.recipe.load import load_config


def warm_start_recipe(path: str, config: RunConfig, folder: Path) -> RunConfig:
    """Return the recipe at `path` as part of a run: in its own folder, with the run's seed, keeping its last weights.

    Raises ConfigError.
    """
    own = load_config(path)
    checkpointing = {
        "enabled": True,
        "resume": "auto",
        "checkpoint_dir": str(folder / "checkpoints"),
        "save_period": own.loop.max_num_steps,
        "metric_name": None,
        "keep_top_k": None,
        "checkpoint_must_save_by": config.checkpointing.checkpoint_must_save_by,
    }
    silent = {"tensorboard_enabled": False, "wandb_enabled": False, "mlflow_enabled": False}
    logger = {"log_dir": str(folder), **silent}
    return own.model_copy(
        update={
            "seed": config.seed,
            "checkpointing": own.checkpointing.model_copy(update=checkpointing),
            "logger": own.logger.model_copy(update=logger),
        }
    )


def recipes_run_first(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the recipes that are run before this one, for the weights of its models, and those before them.

    Raises ConfigError.
    """
    for path in (config.warm_start, *(plan.warm_start for plan in config.models.values())):
        if path is not None:
            recipe = load_config(path)
            yield from recipes_run_first(recipe)
            yield recipe


def warm_start_problems(config: RunConfig, chain: tuple[Path, ...] = ()) -> Iterator[Problem]:
    """Yield what is wrong with the recipes that are run first; paths are those of the run's recipe.

    chain: the recipes for which this one is run first.
    """
    models = config.models
    if config.warm_start is not None:
        if config.policy.init_checkpoint is not None or config.policy.model_name is not None:
            yield Problem(
                "one-of",
                "warm_start",
                "and policy.init_checkpoint or policy.model_name both give the weights to start from",
                "remove one of the two",
                ("policy.init_checkpoint", "policy.model_name"),
            )
        yield from _problems_of("warm_start", config.warm_start, models["policy"], chain)
    for name, plan in models.items():
        if plan.warm_start is not None:
            yield from _problems_of(f"{name}.warm_start", plan.warm_start, plan, chain)


def _problems_of(key: str, path: str, plan: ModelPlan, chain: tuple[Path, ...]) -> Iterator[Problem]:
    file = Path(path).resolve()
    if file in chain:
        yield Problem("reference", key, f"{path} is to run before itself", "remove the cycle")
        return
    try:
        recipe = load_config(path)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(problem.code, key, f"in {path}: {problem}")
        return
    for problem in warm_start_problems(recipe, (*chain, file)):
        yield Problem(problem.code, key, f"in {path}: {problem}")
    for problem in answer_problems(recipe, scored_examples(recipe)):
        yield Problem(problem.code, key, f"in {path}: {problem}")
    if differing := does_not_fit(recipe.model_dump(), plan):
        yield Problem(
            "other-model", key, f"{path} trains another model: {', '.join(differing)}", "make the two equal"
        )
