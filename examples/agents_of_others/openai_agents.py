"""An agent of the OpenAI Agents SDK: it looks up what belongs to a number, and says it.

The SDK finds the model by OPENAI_BASE_URL and OPENAI_API_KEY; nothing of it is changed.
"""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    AgentsException,
    ModelResponse,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from session import Session, agreement

_MOST_CALLS = 3


async def play(session: Session) -> None:
    """Play one task, and end the session."""
    answer, looked_up = session.task["answer"], 0

    @function_tool
    def look_up() -> str:
        """Return what belongs to the number."""
        nonlocal looked_up
        looked_up += 1
        return answer

    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())
    agent = Agent(name="agent", tools=[look_up], model=model)
    said, responses = "", list[ModelResponse]()
    try:
        result = await Runner.run(agent, session.question, max_turns=_MOST_CALLS)
        said, responses = str(result.final_output), result.raw_responses
    except AgentsException as error:  # too many turns, or a call of a tool that there is not
        responses = error.run_data.raw_responses if error.run_data else []
    rewards = {"called": 0.5 * (looked_up > 0), "right": agreement(said, answer) * (looked_up > 0)}
    tokens = sum(response.usage.output_tokens for response in responses)
    session.close(sum(rewards.values()), rewards, calls=len(responses), tokens=tokens, tool_calls=looked_up)


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(play(Session()))
