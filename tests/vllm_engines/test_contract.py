"""vLLM's two engines keep to what every engine does, see tests/engine_contract.py."""

import asyncio

import engine_process as tiny
import pytest
from engine_contract import keeps_to_the_contract


def keeps(folder, asynchronous):
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine, VllmEngine

    tiny.model_folder(folder)
    old, new = (tiny.weights(tiny.transformers_model(folder, seed)) for seed in (0, 1))

    async def in_a_loop():
        engine = (AsyncVllmEngine if asynchronous else VllmEngine)(tiny.settings(folder))
        await keeps_to_the_contract(
            engine, old, new, tiny.requests([3, 40, 5]), overlaps=asynchronous, sleeps=False
        )

    asyncio.run(in_a_loop())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["batches", "requests"])
def test_vllm_keeps_to_the_contract(engine_process, tmp_path, asynchronous):
    engine_process.run(keeps, tmp_path / "model", asynchronous)
