"""Runs from Python: the same bits as by command; one that was left goes on, and leaves the process as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_tensors import tensors_in
from grpo_run import Run, assert_same_tensors, compared

COMMON = """
import os
import random
import signal
import sys
import threading
from pathlib import Path

from nemo_rl_mcore import DPO, GRPO, PPO, SFT, Distillation

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
         "vocab_size": 32, "max_position_embeddings": 32}
TINY = {"policy": {"model": MODEL, "tokenizer": {"name": "char"}}}
common = {"recipe": TINY, "steps": 4, "lr": 1e-3, "max_length": 8, "gpus": 0, "out": folder / "python"}
answers = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}", "target": n} for n in range(40)]
pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "1"} for row in answers]
"""
REWARDS = """
def near(responses, answers, target):
    assert all(int(answer) == number for answer, number in zip(answers, target))
    return [sum(a == b for a, b in zip(response, answer)) / 3 for response, answer in zip(responses, answers)]
"""
OF_EACH_ALGORITHM = (
    COMMON
    + """
if __name__ == "__main__":
    from rewards_of_run import near

    sampled = common | {"train": answers, "generations": 4, "max_new_tokens": 4}
    match sys.argv[2]:
        case "grpo":
            run = GRPO(None, reward=near, prompts_per_step=4, **sampled)
        case "ppo":
            run = PPO(None, reward=near, prompts_per_step=4, **sampled)
        case "sft":
            run = SFT(None, train=answers, batch_size=8, **common)
        case "dpo":
            run = DPO(None, train=pairs, batch_size=4, **common)
        case "distillation":
            teacher = SFT(None, train=answers, batch_size=8, **common | {"out": folder / "teacher", "seed": 7})
            teacher.train()
            of_teacher = {"teacher": {"init_checkpoint": str(folder / "teacher/checkpoints/step_4")}}
            sampled |= {"recipe": TINY | of_teacher | {"distillation": {"topk_logits_k": 8}}}
            run = Distillation(None, teacher=None, prompts_per_step=4, **sampled)
    (folder / "recipe.yaml").write_text(run.recipe())
    run.train()
"""
)
ONE_AFTER_THE_OTHER = (
    COMMON
    + REWARDS
    + """
from nemo_rl_mcore import ClippedPGLossFn


class MeanOfAll:
    def __init__(self, cfg, loss_cfg):
        pass

    def compute_advantage(self, prompt_ids, rewards, mask, *, logprobs_policy=None, logprobs_reference=None):
        return (rewards - rewards.mean())[:, None].expand(mask.shape)


class Halved(ClippedPGLossFn):
    def __init__(self, cfg, use_fused_linear_logprobs=False, *, share):
        super().__init__(cfg, use_fused_linear_logprobs)
        self.share = share

    def sums(self, outputs, data):
        whole = super().sums(outputs, data)
        return type(whole)(whole.loss * self.share, whole.metrics)


class Length:
    def __init__(self, most):
        self.most = most

    def score(self, prompts, responses, finished):
        return [len(response) / self.most for response in responses]


def of_process():
    import psutil
    import ray

    assert not psutil.Process().children(recursive=True)
    assert not ray.is_initialized()
    import nemo_rl_mcore.config.custom_code

    assert not nemo_rl_mcore.config.custom_code.HANDED
    own_path = [place for place in sys.path if "site-packages" not in place]
    stops = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    threads = sorted(thread.name for thread in threading.enumerate())
    return dict(os.environ), own_path, stops, threads, sys.excepthook, os.getcwd()


if __name__ == "__main__":
    (folder / "held.jsonl").write_text('{"input": "527>", "output": "527", "target": 527}\\n')
    mine = {"grpo": {"adv_estimator": {"type": MeanOfAll}}, "loss_fn": {"type": Halved, "args": {"share": 0.5}}}
    mine |= {"eval": {"sets": {"held": {"data_path": str(folder / "held.jsonl"), "columns": ["target"]}}}}
    sampled = common | {"train": answers, "prompts_per_step": 4, "generations": 4, "max_new_tokens": 4}
    run = GRPO(None, reward=near, **sampled | {"recipe": TINY | mine})
    seen = []
    for metrics in run:
        seen.append(metrics["step"])
        if len(seen) == 2:
            break
    print("left", seen)
    before = of_process()
    run.train()
    assert of_process() == before
    drawn = random.getstate()
    print(run.generate("527>", greedy=True)[0]["prompt"])
    print(run.eval()["held"]["accuracy"] in (0.0, 1.0))
    print(run.export(folder / "hf").name)
    assert (of_process(), random.getstate()) == (before, drawn)
    of_class = {"env": {"custom": {"type": Length, "args": {"most": 4}}}}
    other = GRPO(None, **sampled | {"recipe": TINY | of_class, "out": folder / "other", "steps": 1})
    print(0 < other.train()["train/reward"] <= 1)
    assert of_process() == before
    print("steps", [int(row["step"]) for row in run.metrics()])
"""
)


def python(folder, script, *arguments):
    (folder / "script.py").write_text(script)
    (folder / "rewards_of_run.py").write_text(REWARDS)
    command = [sys.executable, str(folder / "script.py"), str(folder), *arguments]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.mark.exhaustive
def test_a_run_that_was_left_goes_on_with_classes_of_the_script_and_leaves_nothing_to_the_next(tmp_path):
    told = python(tmp_path, ONE_AFTER_THE_OTHER).splitlines()
    expected = ["left [1, 2]", "527>", "True", "hf", "True", "steps [1, 2, 3, 4]"]
    assert [line for line in told if line in expected] == expected
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "distillation", "sft", "dpo"])
def test_the_same_recipe_by_command_has_the_same_bits(tmp_path, algorithm, monkeypatch):
    python(tmp_path, OF_EACH_ALGORITHM, algorithm)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    by_command = tmp_path / "command"
    saved = f"checkpointing.checkpoint_dir={by_command / 'checkpoints'}"
    run = Run(by_command, saved, algorithm=algorithm, recipe=tmp_path / "recipe.yaml")
    run.finish(within_s=300)
    rows = [json.loads(line) for line in (tmp_path / "python/metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in compared(run)]
    for model in ("policy", "value") if algorithm == "ppo" else ("policy",):
        first, second = (
            tensors_in(one / "checkpoints/step_4" / model) for one in (tmp_path / "python", by_command)
        )
        assert_same_tensors(first, second)


# Data set, reward and loss of the user's own, by the command


REPOSITORY = Path(__file__).parents[2]
OWN_PARTS = REPOSITORY / "tests/custom_parts.py"
RECIPE_OF_OWN_PARTS = f"""
defaults: {REPOSITORY / "examples/configs/grpo_copy_cpu.yaml"}
grpo: {{max_num_steps: 2, val_period: 0, val_at_end: false, num_prompts_per_step: 2, num_generations_per_prompt: 4}}
policy: {{train_global_batch_size: 8, train_micro_batch_size: 4, logprob_batch_size: 4}}
loss_fn: {{type: "custom_parts:CountedPG", args: {{weight: 3.0}}}}
data: {{dataset_name: custom, type: "custom_parts:Counting", max_input_seq_length: 4}}
env: {{custom: {{type: "custom_parts:LengthReward"}}}}
seed: 0
logger: {{log_dir: run}}
"""


@pytest.mark.exhaustive
def test_the_ranks_find_the_classes_and_train_with_them(tmp_path):
    """By the command as it is installed: a script in another folder than that which it is started in."""
    (tmp_path / "custom_parts.py").write_bytes(OWN_PARTS.read_bytes())
    (tmp_path / "recipe.yaml").write_text(RECIPE_OF_OWN_PARTS)
    script = tmp_path / "bin" / "nemo-rl-mcore"
    script.parent.mkdir()
    script.write_text("import sys\nfrom nemo_rl_mcore.cli import main\nsys.exit(main())\n")
    done = subprocess.run(
        [sys.executable, str(script), "grpo", "--config", "recipe.yaml"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["train/own_weight"] for step in steps] == [pytest.approx(3.0)] * 2
