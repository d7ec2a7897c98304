"""What the driver is told of vLLM's engines."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_rl_mcore.engine.kinds import engine_kind, vllm_environment
from nemo_rl_mcore.engine.vllm.engine import EngineMachines, EngineSettings, VllmShare
from nemo_rl_mcore.recipe.load import load_config

LONGER = ("policy.max_total_sequence_length=16", "policy.model.max_position_embeddings=16")
RECIPES = Path(__file__).parents[3] / "examples/configs"


def kind_of(folder, *overrides):
    given = [f"logger.log_dir={folder}", *LONGER, *overrides]
    return engine_kind(load_config(RECIPES / "grpo_copy_vllm_cpu.yaml", given))


@pytest.mark.parametrize(
    ("overrides", "reads_texts"),
    [
        (["seed=1"], False),
        (["grpo.max_rollout_turns=2", "+env.custom.type=mine:Env"], True),
        (["policy.generation.stop_strings=['5']"], True),
    ],
)
def test_engines_have_the_tokenizer_where_texts_may_end_an_answer(tmp_path, overrides, reads_texts):
    folder = kind_of(tmp_path, *overrides).settings.tokenizer
    assert (folder is not None) == reads_texts
    assert not reads_texts or (Path(folder) / "tokenizer.json").exists()


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


def test_arguments_of_the_recipe_reach_vllm_beside_those_that_are_set(tmp_path):
    kind = kind_of(tmp_path, "policy.generation.vllm_kwargs={enable_chunked_prefill: true}")
    arguments = kind.settings.arguments()
    assert arguments["enable_chunked_prefill"] is True
    assert arguments["max_model_len"] == 16


def test_vllm_is_asked_for_routes_and_those_of_dense_layers_are_left_out():
    settings = EngineSettings("folder", "bfloat16", 16, 4, routes=((1, 3), "int8"))
    assert settings.arguments()["enable_return_routed_experts"] is True
    of_all_layers = np.arange(40, dtype=np.uint8).reshape(5, 4, 2)
    found = settings.routes_of(SimpleNamespace(routed_experts=of_all_layers))
    assert found.dtype == np.int8
    assert (found == of_all_layers[:, 1::2]).all()
    unasked = replace(settings, routes=None)
    assert not {"routes", "enable_return_routed_experts"} & unasked.arguments().keys()
    assert unasked.routes_of(None) is None


ON_GPUS = ("cluster.gpus_per_node=2", "policy.precision=bfloat16", "policy.generation.mismatch_threshold=2")
UNCOMPARED = ("policy.generation.verify_refit=false", "policy.generation.compare_at_start=false")


@pytest.mark.parametrize(
    ("keys", "quantization", "ignored"),
    [
        ({}, "fp8_per_block", None),
        ({"precision": "mxfp8"}, "mxfp8", None),
        (
            {"quantization_ignored_layer_kws": "[o_proj, .layers.1.]"},
            "fp8_per_block",
            ["re:.*o_proj", r"re:.*\.layers\.1\."],
        ),
    ],
)
def test_an_engine_in_fp8_is_sent_bfloat16_and_told_what_to_quantize(tmp_path, keys, quantization, ignored):
    own = (
        f"+policy.generation.vllm_cfg.{key}={value}" for key, value in {"precision": "fp8", **keys}.items()
    )
    kind = kind_of(tmp_path, *ON_GPUS, *UNCOMPARED, *own)
    arguments = kind.settings.arguments()
    assert kind.precision == arguments["dtype"] == "bfloat16"
    assert arguments["quantization"] == quantization
    assert arguments.get("quantization_config") == (ignored and {"ignore": ignored})


def test_an_engine_over_machines_tells_vllm_which_part_it_is(tmp_path):
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    own = (f"+policy.generation.vllm_cfg.{key}={size}" for key, size in layout.items())
    kind = kind_of(tmp_path, *ON_GPUS, "cluster.num_nodes=2", *own)
    assert (kind.processes, kind.share) == (4, VllmShare)
    arguments = kind.settings.arguments(EngineMachines("10.0.0.1", "10.0.0.2", 1, 2, 7))
    expected = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 7}
    assert expected.items() <= arguments.items()
    assert layout.items() <= arguments.items()
    assert arguments["distributed_executor_backend"] == "mp", (
        "or vLLM would ask Ray for the GPUs that ranks have"
    )
    assert not expected.keys() & kind.settings.arguments().keys()
