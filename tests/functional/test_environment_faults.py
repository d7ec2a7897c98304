"""Runs whose environment raises, dies and hangs: no run ends, and the numbers are those of an undisturbed one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ASYNCHRONOUS = (
    "+grpo.async_grpo.enabled=true",
    "policy.generation.colocated.enabled=false",
    "loss_fn.use_importance_sampling_correction=true",
)
RECIPE = """
defaults: {exemplar}
grpo: {{max_num_steps: {steps}, val_period: 0, val_at_end: true, num_prompts_per_step: 2,
        num_generations_per_prompt: 4, max_val_samples: 4}}
policy: {{train_global_batch_size: 8, train_micro_batch_size: 4, logprob_batch_size: 4}}
env:
  custom: {{type: "fragile_parts:Fragile", args: {{share: {share}}}}}
  pool: {{size: {size}, timeout_s: 3, max_drop_rate: 1.0}}
seed: 0
logger: {{log_dir: {name}}}
"""

PROGRAM = """
import sys
from nemo_rl_mcore import cli
from nemo_rl_mcore.driver.actors import environment_pool

if __name__ == "__main__":
    environment_pool.RETRIES = 6  # so that no answer is dropped
    sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def steps_of(tmp_path):
    """The metrics of a run in which a share of the environment's calls fails."""

    def run(name, steps, *overrides, share=0.0, size=2):
        recipe = RECIPE.format(
            exemplar=REPOSITORY / "examples/configs/grpo_copy_cpu.yaml",
            steps=steps, share=share, size=size, name=name,
        )  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(recipe)
        paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "grpo", "--config", f"{name}.yaml", *overrides],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return run


def numbers(steps):
    """What is the same in each run: neither times nor what the environments went through."""
    kept = ("train/", "validation/", "mismatch/", "rewards/")
    return [{name: value for name, value in step.items() if name.startswith(kept)} for step in steps]


@pytest.mark.nightly
@pytest.mark.parametrize("overrides", [(), ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_fifty_steps_of_faults_change_no_number(steps_of, overrides):
    # With a maximal age of 0 an asynchronous run is equal to the bit whenever its groups are answered.
    age = ("+grpo.async_grpo.max_trajectory_age_steps=0",) if overrides else ()
    disturbed = steps_of("disturbed", 50, *overrides, *age, share=0.05, size=3)
    assert numbers(disturbed) == numbers(steps_of("undisturbed", 50, *overrides, *age))
    for name in ("env/restarts", "env/retried"):
        assert sum(step[name] for step in disturbed) > 0
    assert all(step["env/dropped"] == 0 for step in disturbed)
