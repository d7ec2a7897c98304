"""A run with two environments: each row is scored by its own, which has its own metrics."""

import json
from pathlib import Path

import pytest
from commands import run

pytestmark = pytest.mark.stage("distributed")

REPOSITORY = Path(__file__).parents[2]
RECIPE = f"""
defaults: {REPOSITORY / "examples/configs/grpo_copy_cpu.yaml"}
grpo: {{max_num_steps: 4, val_period: 2, max_val_samples: 4, val_batch_size: 4, num_prompts_per_step: 4,
  num_generations_per_prompt: 4}}
policy: {{train_global_batch_size: 16, train_micro_batch_size: 8, logprob_batch_size: 8}}
data:
  dataset_name: files
  max_input_seq_length: 4
  train: &rows [{{data_path: short.jsonl}}, {{data_path: long.jsonl, env_name: rewards}}]
  validation: *rows
  default: {{env_name: custom}}
env: {{custom: {{type: "two_environments:Short"}}, rewards: {{long: "two_environments:long"}}}}
checkpointing: {{enabled: true, checkpoint_dir: run/checkpoints, save_period: 2}}
logger: {{log_dir: run, tensorboard_enabled: false}}
cluster: {{cpu_workers_per_node: 1}}
"""
CODE = """
class Short:
    def score(self, prompts, responses, finished):
        assert {prompt.answer for prompt in prompts} == {"short"}
        return [-len(response) for response in responses]


def long(responses, answers):
    assert {*answers} == {"long"}
    return [len(response) for response in responses]
"""
ASYNCHRONOUS = (
    *("policy.generation.colocated.enabled=false", "grpo.async_grpo.enabled=true"),
    *("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=tis"),
    "loss_fn.truncated_importance_sampling_ratio=2.0",
)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("overrides", [(), ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_each_row_is_scored_by_its_own_environment_before_and_after_a_resume(tmp_path, overrides):
    (tmp_path / "two_environments.py").write_text(CODE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for name in ("short", "long"):
        rows = ({"input": f"{number}{number}>", "output": name} for number in range(10))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = ("grpo", "--config", "recipe.yaml", *overrides)
    for steps in (2, 4):
        code, output, errors = run(*given, f"grpo.max_num_steps={steps}", folder=tmp_path)
        assert (code, errors) == (0, ""), output + errors
    steps = rows_of(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        found = {name for name in ("custom", "rewards") if f"train/env/{name}/reward" in row}
        assert found, "a step has rows of one environment at least"
        for name in found:
            sign = {"custom": -1, "rewards": 1}[name]
            length = row[f"train/env/{name}/mean_gen_tokens_per_sample"]
            assert 0 <= length - sign * row[f"train/env/{name}/reward"] <= 1, (
                "an end of sequence is no character"
            )
    last = steps[-1]
    assert last["validation/env/custom/reward"] < 0 < last["validation/env/rewards/reward"]
    assert last["env/dropped"] == last["env/custom/dropped"] == last["env/rewards/dropped"] == 0
    assert "rewards/env/custom/long_mean" not in last
    if overrides:
        code, output, errors = run("replay", tmp_path / "run", folder=tmp_path)
        assert (code, errors) == (0, ""), output + errors
