"""Recipes for commands that train nothing: `generate`, `export` and `eval`.

Weights from a checkpoint or a Hugging Face folder replace the recipe's own, with their architecture and tokenizer.
Only the policy starts; the recipe's initial weights and its other models are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from nemo_rl_mcore.config.base import ConfigError, Problem, folder_or_name, refused, value_at
from nemo_rl_mcore.config.data import RowKind
from nemo_rl_mcore.config.megatron import UNDIVIDED
from nemo_rl_mcore.config.run_config import RunConfig
from nemo_rl_mcore.data.examples import read_set, special_token_problems
from nemo_rl_mcore.data.rows import is_fetched
from nemo_rl_mcore.driver.run_folder import RECIPE_FILE, TOKENIZER_FOLDER, read_recipe_of
from nemo_rl_mcore.models import count_parameters
from nemo_rl_mcore.models.memory import WEIGHT_BYTES, estimate_memory
from nemo_rl_mcore.models.pretrained import pretrained_model, read_hf_config
from nemo_rl_mcore.recipe.interpolations import value_now
from nemo_rl_mcore.recipe.load import load_recipe
from nemo_rl_mcore.recipe.sources import Recipe, read_recipe
from nemo_rl_mcore.tools.check.data import has_template, special_tokens_of, template_problems
from nemo_rl_mcore.tools.check.machine import import_problems, visible_gpus

ONE_RANK = {
    "cluster.num_nodes": 1,
    "cluster.cpu_workers_per_node": 1,
    **{f"policy.megatron_cfg.{key}": value for key, value in UNDIVIDED.items()},
}
"""Keys of a recipe on one rank."""
_LONGEST = 4096
"""Most tokens of prompt and response together without a recipe."""


def load_over_given_weights(
    overrides: Iterable[str],
    *,
    config: str | None = None,
    checkpoint: str | None = None,
    hf: str | None = None,
    few_ranks: bool = False,
) -> RunConfig:
    """Return the configuration with the weights of a checkpoint or Hugging Face folder, or the recipe's initial ones.

    config: the recipe; without it, the checkpoint's own, or a minimal one for a Hugging Face folder. checkpoint, hf:
    folders, at most one of them. few_ranks: see `on_few_ranks`. Raises ConfigError.
    """
    recipe = None if config is None else Path(config)
    if checkpoint is not None:
        return load_recipe_of(Path(checkpoint), overrides, recipe=recipe, few_ranks=few_ranks)
    if hf is None:
        if recipe is None:
            raise refused("missing", "--config", "is missing", "name a recipe, or weights: --checkpoint DIR")
        read = read_recipe(recipe)
        _begin_with(read.tree)
        return load_recipe(read, overrides)
    if not Path(hf).is_dir():
        raise refused("not-found", "--hf", f"no folder {hf!r} in {Path.cwd()}", "name a Hugging Face folder")
    if (Path(hf) / RECIPE_FILE).is_file():
        raise refused("wrong-kind", "--hf", f"{hf!r} is a run's checkpoint", f"write --checkpoint {hf}")
    try:
        pretrained_model(hf)
    except ConfigError as error:
        of_option = [replace(one, path="--hf", related=(), where="") for one in error.problems]
        raise ConfigError(of_option) from error
    folder = str(Path(hf).absolute())
    read = Recipe(_bare_recipe(folder), ()) if recipe is None else read_recipe(recipe)
    _begin_with(read.tree, model=None, init_checkpoint=None, model_name=folder, tokenizer={"name": folder})
    return on_few_ranks(read, overrides) if few_ranks else load_recipe(read, overrides)


def load_recipe_of(
    folder: Path, overrides: Iterable[str] = (), *, recipe: Path | None = None, few_ranks: bool = False
) -> RunConfig:
    """Return the configuration with a checkpoint's weights; recipe: replaces the checkpoint's own.

    few_ranks: see `on_few_ranks`. Raises ConfigError.
    """
    path = folder / RECIPE_FILE
    try:
        saved = read_recipe_of(folder)
    except ValueError as error:
        raise refused("not-readable", str(path), str(error), "name another checkpoint") from error
    read = read_recipe(recipe or path)
    section = cast("Mapping[str, object]", saved.get("policy") or {})
    if recipe is not None:
        _begin_with(read.tree, model=section.get("model"), tokenizer=section.get("tokenizer"))
        if (peft := value_at(section, "megatron_cfg.peft")) is not None:
            _replace(read.tree, {"policy.megatron_cfg.peft": peft})
    # The run's initial weights, or its teacher's, may be gone by now.
    _begin_with(read.tree, model_name=None, init_checkpoint=None)
    config = on_few_ranks(read, overrides) if few_ranks else load_recipe(read, overrides)
    own, tokenizer = folder.absolute() / TOKENIZER_FOLDER, config.policy.tokenizer
    saved_name = cast("Mapping[str, object]", section.get("tokenizer") or {}).get("name")
    its_name = folder_or_name(value_now(saved_name) or "") if isinstance(saved_name, str) else None
    if own.is_dir() and tokenizer.name == its_name:
        tokenizer = tokenizer.model_copy(update={"name": str(own)})
    megatron = config.policy.megatron_cfg
    peft = megatron.peft.model_copy(update={"pretrained_adapter": None})
    changed = {
        "init_checkpoint": str(folder.absolute()),
        "tokenizer": tokenizer,
        "megatron_cfg": megatron.model_copy(update={"peft": peft}),
    }
    return config.model_copy(update={"policy": config.policy.model_copy(update=changed)})


def on_few_ranks(recipe: Recipe, overrides: Iterable[str]) -> RunConfig:
    """Return the configuration on one rank if the model fits, else on the ranks that hold one copy of it.

    It fits if it takes no more than a rank's training state, with gradients and optimizer. Overrides come last. Raises
    ConfigError.
    """
    overrides = list(overrides)
    config = load_recipe(Recipe(recipe.tree.copy(), recipe.files), overrides)
    policy, cluster = config.policy, config.cluster
    whole = count_parameters(policy.model) * WEIGHT_BYTES[policy.precision]
    needed = policy.megatron_cfg.model_parallel_size
    if whole <= estimate_memory(config)["policy"].total:
        _replace(recipe.tree, {**ONE_RANK, "cluster.gpus_per_node": min(cluster.gpus_per_node, 1)})
    elif needed <= cluster.workers_per_node:
        workers = "cpu_workers_per_node" if cluster.on_cpu else "gpus_per_node"
        _replace(recipe.tree, {"cluster.num_nodes": 1, f"cluster.{workers}": needed})
    return load_recipe(recipe, overrides)


def _bare_recipe(folder: str) -> DictConfig:
    """Return a minimal recipe for a Hugging Face folder."""
    model, described = pretrained_model(folder), read_hf_config(folder)
    assert model is not None
    assert described is not None
    longest = min(model.max_position_embeddings, _LONGEST)
    dtype = described.get("dtype") or described.get("torch_dtype")
    template = has_template(Path(folder))
    return OmegaConf.create(
        {
            "sft": {"max_num_steps": 1},
            "policy": {
                "precision": "float32" if dtype in (None, "float32") else "bfloat16",
                "train_global_batch_size": 1,
                "train_micro_batch_size": 1,
                "max_total_sequence_length": longest,
                "megatron_cfg": {"optimizer": {"lr": 1.0}},
                "generation": {"max_new_tokens": longest // 2},
            },
            "cluster": {"gpus_per_node": min(visible_gpus(), 1)},
            # The command line gives the prompts: this class is not looked for.
            "data": {"dataset_name": "custom", "type": "of_the:CommandLine", "apply_chat_template": template},
        }
    )


def _begin_with(tree: DictConfig, **of_policy: object) -> None:
    """Set keys of the policy, and replace the sections of models that do not start with harmless ones."""
    others = {"value": {"optimizer": {"lr": 1.0}}, "teacher": {"init_checkpoint": "none"}}
    _replace(tree, {name: section for name, section in others.items() if name in tree})
    _replace(tree, {f"policy.{key}": value for key, value in of_policy.items()})


def _replace(tree: DictConfig, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        OmegaConf.update(tree, key, value, merge=False, force_add=True)


# Evaluation


def as_evaluated(config: RunConfig) -> RunConfig:
    """Return the configuration with the sampling parameters and folder of its section eval.

    A temperature of 0, which means greedy answers, leaves the recipe's. Raises ConfigError.
    """
    section, policy, problems = config.eval, config.policy, list[Problem]()
    if section is None:
        raise refused("missing", "eval", "missing", "name the data: eval.sets: {NAME: {data_path: FILE}}")
    if config.env.endpoint is not None:
        what = "has agents play episodes, but eval generates one answer per prompt"
        remedy = "use the run's validation, or override env.endpoint=null"
        problems.append(Problem("incompatible", "env.endpoint", what, remedy))
    problems += template_problems(config)
    for name, source in section.sets.items():
        if not is_fetched(*source.paths):
            path, kind, chat = f"eval.sets.{name}", RowKind.PROMPTS, config.data.apply_chat_template
            rows, _, wrong = read_set(path, source, kind, chat=chat)
            tokens = special_tokens_of(policy.tokenizer.name)
            problems += wrong
            problems += special_token_problems(config, {path: rows}, tokens, kind)
    paths = {key: path for key, path in config.import_paths.items() if key.startswith("env.")}
    problems += import_problems(paths)
    if problems:
        raise ConfigError(problems)
    sampling = {
        "temperature": section.temperature or policy.generation.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
    }
    generation = policy.generation.model_copy(update=sampling)
    reserved = policy.max_total_sequence_length - policy.reserved_tokens
    folder = str(Path(config.logger.log_dir) / "eval")
    changed = {
        "policy": policy.model_copy(update={"generation": generation}),
        "data": config.data.model_copy(update={"max_input_seq_length": reserved}),
        "logger": config.logger.model_copy(update={"log_dir": folder}),
    }
    return config.model_copy(update=changed)
