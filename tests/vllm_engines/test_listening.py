"""An engine and the processes below it are reached from this machine alone."""

import asyncio
import os

import engine_process as tiny
import pytest
from listening import listening_addresses


def listening_of_an_engine(folder, ranks, asynchronous):
    """The addresses at which this process and those below it listen, once the engine has answered."""
    from nemo_rl_mcore.engine.vllm.engine import AsyncVllmEngine, VllmEngine

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as in `cluster.LOCAL_NETWORK`
    settings = tiny.settings(tiny.model_folder(folder), tensor_parallel_size=ranks)
    before = listening_addresses()

    async def in_a_loop():
        engine = AsyncVllmEngine(settings)
        await engine.begin_refit(1)
        found = listening_addresses()
        await engine.shutdown()
        return found

    if asynchronous:
        return before, asyncio.run(in_a_loop())
    engine = VllmEngine(settings)
    engine.begin_refit(1)
    found = listening_addresses()
    engine.shutdown()
    return before, found


@pytest.mark.parametrize(
    ("ranks", "asynchronous"), [(1, False), (1, True), (2, False)], ids=["one-process", "async", "tp2"]
)
def test_an_engine_listens_on_loopback_alone(engine_process, tmp_path, ranks, asynchronous):
    [(before, found)] = engine_process.run(listening_of_an_engine, tmp_path / "model", ranks, asynchronous)
    assert before == [], "what listens is the engine's"
    assert set(found) <= {"127.0.0.1"}
