"""`nemo-rl-mcore eval` and `generate` in processes of their own: over a bare folder, with a session and without."""

import json
import os
from pathlib import Path

import pytest
from commands import run
from hidden_packages import HIDE

pytestmark = pytest.mark.stage("distributed")

RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_copy_cpu.yaml"


def test_generate_answers_a_file_by_a_folder_without_a_recipe(tmp_path):
    import torch
    import transformers
    from chat_tokenizer import save_chat_tokenizer

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=104, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    save_chat_tokenizer(tmp_path / "hf")
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")

    asked = ("generate", "--hf", "hf", "--prompt-file", "prompts.txt", "--prompt", "zero")
    asked += ("--output", "answers.jsonl")
    length = "policy.generation.max_new_tokens=10"
    done = run(*asked, "--greedy", length, folder=tmp_path)
    assert done[0] == 0, done
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(row["index"], row["sample"]) for row in rows] == [(0, 0), (1, 0), (2, 0)]
    shown = [f"<turn>user\n{text}<end>\n<turn>assistant\n" for text in ("zero", "one", "two")]
    assert [row["prompt"] for row in rows] == shown
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"], add_special_tokens=False).input_ids])
        whole = model.generate(ids, max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(ids))
        expected = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=False).partition("<end>")[0]
        assert row["response"] == expected
    again = run(*asked, folder=tmp_path)
    assert (again[0], again[2]) == (
        1,
        "the run stopped: --output 'answers.jsonl' exists already; name another file\n",
    )


_IN_A_SESSION = """
from nemo_rl_mcore.tools.evaluate import evaluate, export, generate
from nemo_rl_mcore.driver.actors.cluster import RayCluster
for command in (evaluate, export, generate):
    command.open_place = lambda config, **_: RayCluster(config.cluster)
"""


@pytest.mark.exhaustive  # seven commands
def test_one_rank_in_the_one_process_gives_what_one_of_a_session_gives(tmp_path):
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding/sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join(filter(None, [str(tmp_path / "hiding"), os.environ.get("PYTHONPATH")]))
    ways = {"here": {"PYTHONPATH": path, "HIDDEN": "ray"}, "session": {"first": _IN_A_SESSION}}
    rows = [{"input": f"{value}>", "output": str(value)} for value in range(100, 116)]
    (tmp_path / "digits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        f"defaults: {RECIPE}\ngrpo: {{max_num_steps: 1, val_period: 0, val_at_end: false}}\n"
        "cluster: {cpu_workers_per_node: 1}\nlogger: {log_dir: run, tensorboard_enabled: false}\n"
        "checkpointing: {enabled: true, checkpoint_dir: saved, save_period: 1}\n"
        "eval: {sets: {digits: {data_path: digits.jsonl}}, num_tests_per_prompt: 2, temperature: 1.0}\n"
    )
    trained = run("grpo", "--config", "recipe.yaml", folder=tmp_path)
    assert trained[0] == 0, trained
    weights = ("--checkpoint", "saved/step_1")
    for way, options in ways.items():
        for asked in (
            ("export", *weights, "--output", f"{way}/hf"),
            ("generate", *weights, "--samples", 2, "--output", f"{way}/answers.jsonl"),
            ("eval", "--config", "recipe.yaml", *weights, f"logger.log_dir={way}"),
        ):
            (tmp_path / way).mkdir(exist_ok=True)
            status, _, errors = run(*asked, folder=tmp_path, **options)
            assert (status, errors) == (0, "")
    here, session = (_files(tmp_path / way) for way in ways)
    assert here == session
    assert {"hf/model.safetensors", "answers.jsonl", "eval/digits.jsonl", "eval/results.json"} <= here.keys()


def _files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
