"""What the driver is told of vLLM's engines."""

import os
from pathlib import Path

import pytest

from nemo_rl_mcore.config import load_config
from nemo_rl_mcore.generation.vllm.kind import vllm_environment
from nemo_rl_mcore.launch import engine_kind

LONGER = ("policy.max_total_sequence_length=16", "policy.model.max_position_embeddings=16")
RECIPES = Path(__file__).parents[3] / "examples/configs"


@pytest.mark.parametrize(
    ("overrides", "reads_texts"),
    [
        (["seed=1"], False),
        (["grpo.max_rollout_turns=2", "env.arithmetic=null", "+env.custom.type=mine:Env"], True),
        (["policy.generation.stop_strings=['5']"], True),
    ],
)
def test_engines_have_the_tokenizer_where_texts_may_end_an_answer(tmp_path, overrides, reads_texts):
    config = load_config(
        RECIPES / "grpo_copy_vllm_cpu.yaml", [f"logger.log_dir={tmp_path}", *LONGER, *overrides]
    )
    kind = engine_kind(config)
    folder = kind.settings.tokenizer
    assert (folder is not None) == reads_texts
    assert not reads_texts or (Path(folder) / "tokenizer.json").exists()


@pytest.mark.parametrize("recipe", ["grpo_copy_vllm_cpu.yaml", "grpo_copy_async_cpu.yaml"])
def test_engines_are_told_where_their_journal_is(tmp_path, recipe, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["logger.log_dir=run"]
    assert engine_kind(load_config(RECIPES / recipe, keys)).settings.journal is None
    keys.append("policy.generation.journal=true")
    found = engine_kind(load_config(RECIPES / recipe, keys)).settings.journal
    assert found == os.fspath(tmp_path / "run/journal")


def test_an_engine_gets_vllms_own_variables_and_defaults_that_they_override():
    driver = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "SECRET": "s",
        "NCCL_DEBUG": "INFO",
    }
    found = vllm_environment(driver, on_cpu=True)
    assert found["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "the engine ends with its actor"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert vllm_environment(driver | {"HF_HUB_OFFLINE": "0"}, on_cpu=True)["HF_HUB_OFFLINE"] == "0"
    assert "SECRET" not in found
    assert "TORCHDYNAMO_DISABLE" not in vllm_environment(driver, on_cpu=False)
