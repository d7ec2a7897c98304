"""What the driver is told of vLLM's engines."""

from nemo_rl_mcore.generation.vllm.kind import vllm_environment


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
