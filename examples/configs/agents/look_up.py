"""An agent of the standard library alone: asks the model, does what it calls for, and says how good the end is.

A run starts it once for each sample (`env.endpoint.command`). It reads its task from standard input, and finds the
model where every client of OpenAI's API looks for it. Any harness that knows a base URL and a key takes its place.
"""

import json
import os
import sys
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON, and return the answer's; an answer that is none ends the agent."""
    place = urlsplit(url)
    connection = HTTPConnection(place.netloc)
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", place.path, json.dumps(body), headers)
    answer = connection.getresponse()
    read = json.loads(answer.read())
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {read['error']['message']}")
    return read


def main() -> None:
    """Play one task: up to two calls of the model."""
    task = json.loads(sys.stdin.readline())
    messages, called, said = [*task["messages"]], False, ""
    for _ in range(2):
        body = {"model": "policy", "messages": messages, "tools": TOOLS}
        choice = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)["choices"][0]
        message = choice["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            said = message["content"] or "" if choice["finish_reason"] == "stop" else ""
            break
        called = True
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": task["answer"]}
            for call in message["tool_calls"]
        ]
    right = sum(a == b for a, b in zip(said, task["answer"], strict=False)) / max(
        len(said), len(task["answer"])
    )
    rewards = {"called": 0.5 * called, "right": right * called}
    post(f"{os.environ['NEMO_RL_SESSION_URL']}/close", {"reward": sum(rewards.values()), "rewards": rewards})


if __name__ == "__main__":
    main()
