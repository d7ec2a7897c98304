import json
import os
import re
import resource
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nemo_rl_mcore import cli
from nemo_rl_mcore.cli import arguments as command_line
from nemo_rl_mcore.recipe.load import load_config
from nemo_rl_mcore.recipe.shipped import shipped_recipe

REPOSITORY = Path(__file__).parents[2]
EXEMPLAR = str(REPOSITORY / "examples/configs/grpo_copy_cpu.yaml")
DPO = str(Path(EXEMPLAR).with_name("dpo_cpu.yaml"))
HEAVY = ("torch", "ray", "megatron", "transformers", "numpy")


@pytest.mark.parametrize(
    ("config", "overrides", "commands"),
    [
        (EXEMPLAR, (), [f"nemo-rl-mcore grpo --config {EXEMPLAR}"]),
        (DPO, ("dpo.max_num_steps=7",), [f"nemo-rl-mcore dpo --config {DPO} dpo.max_num_steps=7"]),
        (
            "quickstart/grpo_7B_8gpu.yaml",
            ("logger.log_dir=a b",),
            [
                "nemo-rl-mcore rehearse quickstart/grpo_7B_8gpu.yaml 'logger.log_dir=a b'",
                "nemo-rl-mcore grpo --config quickstart/grpo_7B_8gpu.yaml 'logger.log_dir=a b'",
            ],
        ),
    ],
)
def test_check_ends_with_the_command_that_comes_next(capsys, config, overrides, commands):
    assert cli.main(["check", "--config", config, *overrides]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("next: ")
    assert re.findall(r"`([^`]+)`", last) == commands


def test_overrides_on_both_sides_of_the_config_apply(capsys):
    behind = ["--config", EXEMPLAR, "logger.log_dir=elsewhere", "seed=42"]
    assert cli.main(["check", "grpo.max_num_steps=7", *behind]) == 0
    out = capsys.readouterr().out
    assert "elsewhere" in out
    assert "7" in out.split("steps")[2]


def test_every_problem_goes_to_stderr_with_status_2(capsys):
    wrong = {"policy.precison": "float32", "grpo.max_num_steps": "many", "data.num_digits": "0"}
    given = [f"{key}={value}" for key, value in wrong.items()]
    assert cli.main(["check", "--config", EXEMPLAR, *given]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert {line.partition(": ")[0].partition(". ")[2] for line in captured.err.splitlines()[1:]} == {*wrong}


def test_a_package_that_a_recipe_needs_here_is_a_problem(capsys, monkeypatch):
    """It runs on this machine's CPUs; a recipe for GPUs is checked for another one."""
    monkeypatch.setattr("nemo_rl_mcore.tools.check.machine.installed", lambda package: False)
    keys = ("policy.generation.backend=vllm", "+policy.model.kv_channels=32")
    here = ["check", "--config", EXEMPLAR, *keys, "policy.megatron_cfg.transformer_impl=local"]
    assert cli.main(here) == 2
    assert "policy.generation.backend: " in capsys.readouterr().err
    assert cli.main([*here, "cluster.gpus_per_node=2"]) == 0
    assert "policy.generation.backend: " in capsys.readouterr().out


def test_gpus_are_looked_for_where_a_run_starts(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)  # other tests of this process may have a session
    of_gpus = ["--config", EXEMPLAR, "cluster.gpus_per_node=2"]
    assert cli.main(["check", *of_gpus]) == 0
    assert cli.main(["grpo", *of_gpus]) == 2
    assert "cluster.gpus_per_node: 2 " in capsys.readouterr().err


def test_missing_files_are_found_by_the_preflight(capsys):
    assert cli.main(["check", "--config", EXEMPLAR, "policy.tokenizer.name=not/a/folder"]) == 2
    assert "policy.tokenizer.name: no folder 'not/a/folder'" in capsys.readouterr().err
    assert cli.main(["check", "--config", "not/here.yaml"]) == 2
    assert "not/here.yaml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["check"], "required: --config"),
        (["check", "--config", EXEMPLAR, "--dry-run"], "unrecognized arguments: --dry-run"),
        (["check", "--config", EXEMPLAR, "--max_steps", "3"], "grpo.max_num_steps=3"),
        (["sft", "--config", EXEMPLAR, "--max-num-steps=4"], "sft.max_num_steps=4"),
        (["check", "--max_steps", "5", "--config", DPO], "dpo.max_num_steps=5"),
        (["check", "--config", "not/here.yaml", "--learning_rate", "1"], "KEY=VALUE"),
        (["train", "--config", EXEMPLAR], "invalid choice: 'train'"),
        (["doctor", "seed=3"], "--config"),
        (["doctor", "--timeout", "0"], "'0' is not a time"),
        (["doctor", "--timeout", "nan"], "'nan' is not a time"),
        (["eval", "--hf", "a", "--checkpoint", "b"], "--hf"),
        (["generate", "--prompt", "x"], "--hf"),
        (["generate", "--hf", "a", "--samples", "0"], "--samples"),
        (["generate", "--hf", "a", "--prompt", "1", "--samples", "2", "--greedy"], "--greedy"),
    ],
)
def test_wrong_command_lines(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def launched(monkeypatch):
    configs = []
    launch = types.ModuleType("nemo_rl_mcore.driver.run")
    launch.run = lambda config, write_page: configs.append(config) or 7
    monkeypatch.setitem(sys.modules, "nemo_rl_mcore.driver.run", launch)
    return configs


def test_grpo_launches_after_the_preflight_and_returns_its_status(launched):
    assert cli.main(["grpo", "--config", EXEMPLAR, "seed=3"]) == 7
    assert [config.seed for config in launched] == [3]


@pytest.mark.parametrize(
    "override", ["policy.train_global_batch_size=100", "policy.tokenizer.name=not/a/folder"]
)
def test_grpo_launches_nothing_after_a_failed_preflight(launched, capsys, override):
    assert cli.main(["grpo", "--config", EXEMPLAR, override]) == 2
    assert launched == []
    assert override.partition("=")[0] in capsys.readouterr().err


PROBE = """
import json, sys
from nemo_rl_mcore.cli import main
status = main(["check", "--config", sys.argv[1], *sys.argv[3:]])
loaded = sorted(name for name in json.loads(sys.argv[2]) if name in sys.modules)
print(json.dumps({"status": status, "loaded": loaded}))
"""


def cpu_seconds(*code_and_arguments):
    """Run Python code; the least of three times, since neighbors only add to it.

    As on a user's machine, where Python keeps what it has compiled: the first of them may compile all libraries.
    """
    environment = {**os.environ, "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": ""}
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", *code_and_arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(used), done.stdout


def cpu_seconds_of_check(*overrides):
    seconds, output = cpu_seconds(PROBE, EXEMPLAR, json.dumps(HEAVY), *overrides)
    assert json.loads(output.splitlines()[-1]) == {"status": 0, "loaded": []}
    return seconds


def test_check_is_quick_and_imports_no_framework():
    assert cpu_seconds_of_check("policy.megatron_cfg.optimizer.lr=5e-4") < 2.0


@pytest.mark.stage("processes")
def test_a_large_tokenizer_file_costs_check_its_library_and_imports_no_framework(tmp_path):
    # 440 letters, and each pair of them is a token that a merge makes.
    letters = [chr(0x4E00 + index) for index in range(440)]
    pairs = [(first, second) for first in letters for second in letters]
    vocab = {text: index for index, text in enumerate((*letters, *map("".join, pairs)))}
    content = {"model": {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in pairs]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    plain = cpu_seconds_of_check("policy.model.vocab_size=200000")
    with_file = cpu_seconds_of_check(f"policy.tokenizer.name={tmp_path}", "policy.model.vocab_size=200000")
    read = "import sys; from tokenizers import Tokenizer; Tokenizer.from_file(sys.argv[1])"
    by_the_library, _ = cpu_seconds(read, str(tmp_path / "tokenizer.json"))
    # Measured: 2, for reading the file and looking up each id. Through transformers it takes 8 times as long.
    assert with_file - plain < 4 * by_the_library


@pytest.mark.stage("processes")
def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "nemo_rl_mcore", "check", "--config", EXEMPLAR]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "16 prompts x 16 answers = 256" in done.stdout
    assert done.stderr == ""


@pytest.mark.stage("processes")
def test_the_installed_command_exits_with_status_2():
    command = Path(sys.executable).parent / "nemo-rl-mcore"
    wrong = [str(command), "check", "--config", EXEMPLAR, "seeed=1"]
    done = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("seeed: unknown key")


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_the_example_of_each_command_is_one(command, capsys):
    example = command_line.COMMANDS[command].example
    with pytest.raises(SystemExit):
        command_line.parse([command, "--help"])
    assert f"nemo-rl-mcore {example}" in capsys.readouterr().out
    options, overrides = command_line.parse(shlex.split(example))
    if (recipe := shipped_recipe(getattr(options, "config", None) or "")) is not None:
        load_config(recipe, overrides)
