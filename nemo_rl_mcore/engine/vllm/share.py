"""The processes that a vLLM engine has on its further machines; vLLM is imported when they are started."""

from __future__ import annotations

from typing import ClassVar

from nemo_rl_mcore.engine.vllm.settings import EngineSettings, on_this_machine


class VllmShare:
    """Runs the processes that a `VllmEngine` has on one of its further machines; an `EngineShare`.

    They take their work from the engine itself, over vLLM's own queues.
    """

    usage: ClassVar[str] = "LLM_CLASS"
    """What vLLM calls the use of the engine, which decides the sizes that its processes have to agree on."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = EngineArgs(**settings.arguments(on_this_machine()))
        config = arguments.create_engine_config(UsageContext[self.usage], headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def serve(self) -> None:
        """See `EngineShare.serve`."""
        self._executor.start_worker_monitor(inline=True)


class AsyncVllmShare(VllmShare):
    """Runs the processes that an `AsyncVllmEngine` has on one of its further machines; an `EngineShare`."""

    usage = "ENGINE_CONTEXT"
