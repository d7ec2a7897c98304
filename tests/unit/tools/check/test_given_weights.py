"""Commands over given weights: the recipe that they make, the ranks that they start, and mistakes told at load."""

import json
from pathlib import Path

import pytest

from nemo_rl_mcore import cli
from nemo_rl_mcore.driver.run_folder import recipe_text
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.given_weights import as_evaluated, load_over_given_weights

EXEMPLARS = Path(__file__).parents[4] / "examples/configs"
RECIPE = str(EXEMPLARS / "grpo_copy_cpu.yaml")
HF = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder, as far as it is read at load."""
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HF))
    (path / "chat_template.jinja").write_text("x")
    return str(path)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input": "1>", "output": "1"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(f"defaults: {RECIPE}\neval: {{sets: {{rows: {{data_path: rows.jsonl}}}}}}\n")
    return str(path)


def save(tmp_path, *overrides):
    step = tmp_path / "step_1"
    step.mkdir()
    (step / "config.yaml").write_text(recipe_text(load_config(RECIPE, overrides)))
    return str(step)


def test_a_bare_folder_is_its_own_recipe(folder):
    config = load_over_given_weights([], hf=folder, few_ranks=True)
    policy = config.policy
    assert (policy.model_name, policy.tokenizer.name, policy.model.num_layers) == (folder, folder, 3)
    assert (policy.precision, policy.max_total_sequence_length) == ("bfloat16", 128)
    assert config.data.apply_chat_template
    assert config.cluster.world_size == 1


def test_a_folder_takes_the_place_of_all_that_a_recipe_starts_from(folder, recipe):
    config = load_over_given_weights(["seed=7"], config=recipe, hf=folder)
    assert (config.seed, config.policy.model.num_layers, config.policy.model_name) == (7, 3, folder)
    assert config.policy.tokenizer.name == folder
    assert config.cluster.world_size == 2  # an evaluation has the recipe's layout


def test_a_checkpoint_takes_the_place_of_the_weights_of_a_folder(folder, recipe, tmp_path):
    Path(recipe).write_text(
        Path(recipe).read_text()
        + f"policy: {{model: null, model_name: {folder}, tokenizer: {{name: {folder}}}}}\n"
    )
    step = save(tmp_path, "policy.model.num_layers=4")
    policy = load_over_given_weights([], config=recipe, checkpoint=step).policy
    assert (policy.model.num_layers, policy.model_name, policy.tokenizer.name) == (4, None, "char")
    assert policy.init_checkpoint == step


@pytest.mark.parametrize("algorithm", ["ppo", "distillation", "dpo", "sft"])
def test_no_weights_of_the_recipe_are_looked_for(folder, algorithm):
    config = load_over_given_weights([], config=str(EXEMPLARS / f"{algorithm}_cpu.yaml"), hf=folder)
    assert config.policy.init_checkpoint is None


TP = "policy.megatron_cfg.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("of_the_run", "of_the_command", "ranks"),
    [
        ([], [], 1),
        ([f"{TP}=2"], [], 1),
        ([f"{TP}=2"], ["cluster.cpu_workers_per_node=2", f"{TP}=2"], 2),
        # What training needs of an eighth of the layers is less than all weights.
        (["policy.megatron_cfg.pipeline_model_parallel_size=8", "policy.model.num_layers=64",
          "cluster.cpu_workers_per_node=16"], [], 8),
    ],
)  # fmt: skip
def test_one_rank_answers_where_one_of_the_run_had_room(tmp_path, of_the_run, of_the_command, ranks):
    step = save(tmp_path, *of_the_run)
    assert (
        load_over_given_weights(of_the_command, checkpoint=step, few_ranks=True).cluster.world_size == ranks
    )


def test_the_section_eval_says_how_answers_are_drawn(recipe):
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}
    sampling = [
        "policy.generation.max_new_tokens=2",
        *(f"eval.{key}={value}" for key, value in given.items()),
    ]
    config = as_evaluated(load_over_given_weights(sampling, config=recipe))
    drawn = config.policy.generation
    assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens, drawn.top_k) == (0.5, 0.9, 2, 3)
    assert config.max_prompt_length == 6
    assert config.logger.log_dir == "results/grpo_copy_cpu/eval"
    greedy = as_evaluated(load_over_given_weights([], config=recipe))
    assert greedy.policy.generation.temperature == 1.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("eval", "--config: is missing; name a recipe with a section eval"),
        ("eval --hf {hf}", "--config: is missing"),
        ("eval --config {bare}", "eval: missing; name the data: eval.sets"),
        ("eval --config {recipe} --hf {hf}x", "--hf: no folder"),
        ("eval --config {recipe} --hf {tmp}", "holds no config.json"),
        ("eval --config {recipe} --checkpoint {hf}", "is a Hugging Face folder, and no checkpoint of a run"),
        ("eval --config {recipe} --checkpoint {tmp}", "is not a complete checkpoint"),
        ("eval --config {recipe} eval.sets.rows.data_path=none.jsonl", "eval.sets.rows.data_path: "),
        ("generate --hf {hf}", "--prompt: missing"),
    ],
)
def test_mistakes_are_told_at_load(folder, recipe, tmp_path, capsys, arguments, told):
    places = {"hf": folder, "recipe": recipe, "tmp": tmp_path, "bare": RECIPE}
    assert cli.main([argument.format(**places) for argument in arguments.split()]) == 2
    assert told in capsys.readouterr().err
