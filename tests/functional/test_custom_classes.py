"""A run whose data set, reward and loss are the user's own, from a module beside the recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OWN_PARTS = REPOSITORY / "tests/custom_parts.py"
RECIPE = f"""
defaults: {REPOSITORY / "examples/configs/grpo_copy_cpu.yaml"}
grpo: {{max_num_steps: 2, val_period: 0, val_at_end: false, num_prompts_per_step: 2, num_generations_per_prompt: 4}}
policy: {{train_global_batch_size: 8, train_micro_batch_size: 4, logprob_batch_size: 4}}
loss_fn: {{type: "custom_parts:CountedPG", args: {{weight: 3.0}}}}
data: {{dataset_name: custom, type: "custom_parts:Counting", max_input_seq_length: 4}}
env: {{custom: {{type: "custom_parts:LengthReward"}}}}
seed: 0
logger: {{log_dir: run}}
"""


@pytest.fixture
def command(tmp_path):
    """The command as it is installed: a script in another folder than that which it is started in."""
    (tmp_path / "custom_parts.py").write_bytes(OWN_PARTS.read_bytes())
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    script = tmp_path / "bin" / "nemo-rl-mcore"
    script.parent.mkdir()
    script.write_text("import sys\nfrom nemo_rl_mcore.cli import main\nsys.exit(main())\n")

    def run(*overrides):
        return subprocess.run(
            [sys.executable, str(script), "grpo", "--config", "recipe.yaml", *overrides],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip

    return run


@pytest.mark.exhaustive
def test_the_ranks_find_the_classes_and_train_with_them(command, tmp_path):
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["train/own_weight"] for step in steps] == [pytest.approx(3.0)] * 2


@pytest.mark.stage("processes")
def test_a_class_that_does_not_serve_ends_the_command_before_the_ranks_start(command, tmp_path):
    done = command("loss_fn.type=custom_parts:Stranger", "~loss_fn.args")
    assert done.returncode == 1
    assert done.stderr.startswith("the run stopped: loss_fn.type: custom_parts:Stranger is not a subclass of")
    assert not (tmp_path / "run").exists()
