"""A taskset of verifiers, one task of it at a time: say a number. verifiers renders, parses and scores by itself.

Its first argument is the folder of the tokenizer, by which verifiers writes the ids that it sends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from session import Session, agreement

_MOST_TOKENS = 12


class NumberData(vf.TaskData):
    """answer: what is to be said."""

    answer: str


class NumberTask(vf.Task[NumberData]):
    """A number that is to be said."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Return the share of its digits that were said."""
        return agreement(trace.last_reply, self.data.answer)


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    """All numbers of two digits; any other taskset takes its place."""

    def load(self) -> Iterable[NumberTask]:
        """Return the tasks, in the order of the rows of the recipe."""
        for number in range(100):
            answer = f"{number:02d}"
            yield NumberTask(NumberData(name=answer, prompt=f"say {answer}", answer=answer), self.config.task)


async def play(session: Session, tokenizer: Path) -> None:
    """Play one task, and end the session with the reward of its trace."""
    [task] = [task for task in Numbers(vf.TasksetConfig()) if task.data.idx == int(session.question)]
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=str(tokenizer),
    )
    config = vf.AgentConfig.model_validate(
        {
            "harness": {"id": "null"},
            # Else it asks for a machine of Prime's.
            "runtime": {"type": "subprocess"},
            "model": "policy",
            "client": client,
            "sampling": {"temperature": 1.0, "max_tokens": _MOST_TOKENS},
            "timeout": {"setup": 200.0, "rollout": 200.0},
        }
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(task)
    usage = trace.usage
    session.close(
        trace.reward,
        {name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        calls=trace.num_turns,
        tokens=usage.completion_tokens if usage else 0,
        errors=[str(error) for error in trace.errors],
    )


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The harness is a script that it has uv run, which is installed beside it.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    asyncio.run(play(Session(), Path(sys.argv[1])))
