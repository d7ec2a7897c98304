"""Evaluations by real ranks: of a checkpoint and of its export, and by every engine without a process of its own."""

import json
from functools import partial
from pathlib import Path

import pytest
from meeting_runs import NoCluster, _Groups, run

from nemo_rl_mcore.driver import policy
from nemo_rl_mcore.driver.policy import Policy
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.tools.check.given_weights import as_evaluated, load_over_given_weights
from nemo_rl_mcore.tools.evaluate import evaluate, export

RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_copy_cpu.yaml"
ONE_RANK = "cluster: {cpu_workers_per_node: 1}\n"
QUICK = f"""
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 1, val_at_end: false, val_batch_size: 3}}
policy: {{train_global_batch_size: 8, train_micro_batch_size: 8, logprob_batch_size: 8}}
{ONE_RANK}"""


class Session(NoCluster):
    """The session of Ray, of which ranks in a pool need none."""

    def __init__(self, _config):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass


def write_recipe(folder, base, more=""):
    rows = [{"input": f"{number}>", "output": str(number)} for number in range(100, 1000, 90)]
    (folder / "digits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = folder / "recipe.yaml"
    path.write_text(
        f"defaults: {base}\n{more}"
        "eval: {sets: {digits: {data_path: digits.jsonl}, some: {data_path: digits.jsonl}}}\n"
        f"checkpointing: {{enabled: true, checkpoint_dir: {folder / 'saved'}}}\n"
        f"logger: {{log_dir: {folder / 'run'}, tensorboard_enabled: false}}\n"
    )
    return path


@pytest.fixture
def groups(ranks, monkeypatch):
    """The ranks of the models that are started."""
    groups = _Groups(ranks(1))
    monkeypatch.setattr(policy, "Policy", partial(Policy, group=groups))
    for module in (evaluate, export):
        monkeypatch.setattr(module, "open_place", lambda config, **_: Session(config.cluster))
    return groups


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """The recipe of a run of one step, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, RECIPE, QUICK)
    run(load_config(recipe), ranks(1), lambda *_: None)
    return recipe, str(folder / "saved/step_1")


def evaluated(recipe, folder, *overrides, **weights):
    """The samples and results of an evaluation, by file."""
    config = load_over_given_weights([f"logger.log_dir={folder}", *overrides], config=recipe, **weights)
    assert evaluate.run_eval(as_evaluated(config)) == 0
    return {
        name: (folder / "eval" / name).read_text() for name in ("digits.jsonl", "some.jsonl", "results.json")
    }


SAMPLED = ("eval.temperature=0.8", "eval.num_tests_per_prompt=3", "eval.top_k=9")


def test_a_checkpoint_and_its_export_give_the_same_files(trained, groups, tmp_path, capsys):
    recipe, checkpoint = trained
    exported = str(tmp_path / "exported")
    assert export.run_export(load_over_given_weights([], checkpoint=checkpoint), exported) == 0

    start = evaluated(recipe, tmp_path / "start")
    for overrides in ((), SAMPLED):
        of_both = [
            evaluated(recipe, tmp_path / f"{len(overrides)}_{name}", *overrides, **{name: folder})
            for name, folder in (("checkpoint", checkpoint), ("hf", exported))
        ]
        assert of_both[0] == of_both[1]
        assert of_both[0] != start
    rows = [json.loads(line) for line in of_both[0]["digits.jsonl"].splitlines()]
    assert [(row["index"], row["sample"]) for row in rows] == [(i, s) for i in range(10) for s in range(3)]
    assert len({row["response"] for row in rows}) > 10
    assert "pass@1" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "sft", "distillation"])
def test_recipes_of_all_algorithms_evaluate_the_policy_alone(trained, groups, tmp_path, algorithm):
    recipe, checkpoint = trained
    wanted = evaluated(recipe, tmp_path / "grpo", *SAMPLED, checkpoint=checkpoint)
    base = RECIPE.parent / f"{algorithm}_cpu.yaml"
    other = write_recipe(tmp_path, base, f"{algorithm}: {{val_batch_size: 3}}\n{ONE_RANK}")
    groups.made.clear()
    found = evaluated(
        other, tmp_path / algorithm, *SAMPLED, "policy.generation.max_new_tokens=4", checkpoint=checkpoint
    )
    assert found == wanted
    assert len(groups.made) == 1
