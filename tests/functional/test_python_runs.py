"""Runs from Python: the same bits as by command, and the same call goes on behind what was left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_tensors import tensors_in
from grpo_run import Run, compared

SCRIPT = """
import sys
from pathlib import Path

from nemo_rl_mcore import DPO, GRPO, SFT

folder, algorithm, left_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sys.path.insert(0, str(folder))
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
         "vocab_size": 32, "max_position_embeddings": 32}
common = {"recipe": {"policy": {"model": MODEL, "tokenizer": {"name": "char"}}},
          "steps": 4, "lr": 1e-3, "max_length": 8, "gpus": 0, "out": folder / "python"}
answers = [{"prompt": f"{n:03d}>", "answer": f"{n:03d}", "target": n} for n in range(40)]
pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "1"} for row in answers]


def near(responses, answers, target):
    assert all(int(answer) == number for answer, number in zip(answers, target))
    return [sum(a == b for a, b in zip(response, answer)) / 3 for response, answer in zip(responses, answers)]


if __name__ == "__main__":
    if algorithm == "grpo":
        import rewards_of_run

        reward = near if left_after else rewards_of_run.near
        run = GRPO(None, train=answers, reward=reward, prompts_per_step=4, generations=4, max_new_tokens=4, **common)
    elif algorithm == "sft":
        run = SFT(None, train=answers, batch_size=8, **common)
    else:
        run = DPO(None, train=pairs, batch_size=4, **common)
    Path(folder / "recipe.yaml").write_text(run.recipe())
    seen = []
    for metrics in run:
        seen.append(metrics["step"])
        if len(seen) == left_after:
            break
    if left_after:
        print("left", seen)
        run.train()
        print(run.generate("527>", greedy=True)[0]["prompt"])
        print(run.export(folder / "hf").name)
    print("steps", [int(row["step"]) for row in run.metrics()])
"""


def python(folder: Path, algorithm: str, left_after: int = 0) -> str:
    (folder / "script.py").write_text(SCRIPT)
    near = SCRIPT[SCRIPT.index("def near") : SCRIPT.index("if __name__")]
    (folder / "rewards_of_run.py").write_text(near)
    command = [sys.executable, str(folder / "script.py"), str(folder), algorithm, str(left_after)]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.mark.exhaustive
def test_a_run_that_was_left_goes_on_with_a_function_of_the_script(tmp_path: Path) -> None:
    told = python(tmp_path, "grpo", left_after=2).splitlines()
    assert "left [1, 2]" in told
    last = ["527>", "hf", "steps [1, 2, 3, 4]"]
    assert [line for line in told if line in last] == last
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.exhaustive_cases("grpo")
@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_the_same_recipe_by_command_has_the_same_bits(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(tmp_path, algorithm)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    by_command = tmp_path / "command"
    saved = f"checkpointing.checkpoint_dir={by_command / 'checkpoints'}"
    run = Run(by_command, saved, algorithm=algorithm, recipe=tmp_path / "recipe.yaml")
    try:
        code, _, errors = run.end(within_s=300)
    finally:
        run.close()
    assert (code, errors) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "python/metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in compared(run)]
    first, second = (
        tensors_in(one / "checkpoints/step_4/policy") for one in (tmp_path / "python", by_command)
    )
    assert first.keys() == second.keys()
    assert not [name for name in first if not first[name].equal(second[name])]
