"""What the package exports: said on its page, imported when asked for, and shown by examples that run."""

import doctest
import json
import re
import subprocess
import sys
import tomllib

import pytest
from doc_pages import PAGES, REPO, blocks

import nemo_rl_mcore

PAGE = PAGES["docs/python.md"]
MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
MODEL |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
MODEL |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512}
WITH_EXAMPLES = {"GRPO", "PPO", "DPO", "SFT", "Distillation", "Run", "load_recipe", "load_config"}
WITH_EXAMPLES |= {"ConfigError", "BatchedDataDict", "ClippedPGLossFn"}


def named_in_the_table(heading):
    """What stands in backticks in the first column."""
    _, _, table = PAGE.partition(f"\n| {heading} |")
    first = [line.split(" | ")[0] for line in table.partition("\n\n")[0].splitlines()]
    return [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]


def test_the_page_names_what_is_exported_and_nothing_else():
    assert sorted(named_in_the_table("name")) == sorted(nemo_rl_mcore.__all__)


def test_the_page_names_the_modules_that_pages_and_examples_import_from():
    examples = [path.read_text("utf-8") for path in (REPO / "examples").glob("*.py")]
    code = "".join([*examples, *(text for _, _, text in blocks("python"))])
    imported = {*re.findall(r"^\s*from (nemo_rl_mcore[\w.]*) import", code, re.MULTILINE)}
    assert {*named_in_the_table("module")} == imported - {"nemo_rl_mcore"}


def test_what_is_public_is_imported_when_asked_for():
    heavy = {"torch", "ray", "megatron", "transformers"}
    code = f"import sys, nemo_rl_mcore; nemo_rl_mcore.GRPO; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
    assert all(getattr(nemo_rl_mcore, name) is not None for name in nemo_rl_mcore.__all__)
    with pytest.raises(AttributeError):
        _ = nemo_rl_mcore.Nothing


def test_the_script_that_is_checked_for_types_has_every_public_name():
    """The types of its calls are a static check, `pyright`, which reads it as it reads the package."""
    path = "tests/fixtures/typed_script.py"
    code = (REPO / path).read_text("utf-8")
    [names] = re.findall(r"^from nemo_rl_mcore import \(([^)]*)\)", code, re.MULTILINE)
    assert sorted(names.replace(",", " ").split()) == sorted(nemo_rl_mcore.__all__)
    assert code.startswith("# pyright: strict, reportUnnecessaryTypeIgnoreComment=true\n")
    checked = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["tool"]["pyright"]["include"]
    assert path in checked


def test_examples_in_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL))
    exported = {name: getattr(nemo_rl_mcore, name) for name in nemo_rl_mcore.__all__}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    shown = set()
    for name, value in exported.items():
        for test in doctest.DocTestFinder().find(
            value, name, module=False, globs={"__name__": "__main__", **exported}
        ):
            runner.run(test)
            shown |= {name} if test.examples else set()
    assert runner.failures == 0
    assert shown >= WITH_EXAMPLES
