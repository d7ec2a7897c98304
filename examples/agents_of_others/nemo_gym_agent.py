"""A session that NeMo Gym plays: its agent is asked to run a row, and says the reward. See nemo_gym_servers.py.

The row is one of Gym's, in the column `row`. Gym passes on what is in the metadata of a row as fields of its calls of
the model, and there the endpoint finds the session.
"""

from __future__ import annotations

import json
import os
from urllib.request import Request, urlopen

from session import Session


def play(session: Session) -> None:
    """Have Gym play a row, and end the session with its reward."""
    row = session.task["columns"]["row"]
    index, sample = session.task["index"], session.task["sample"]
    asked = row["responses_create_params"]
    asked["metadata"] = {"extra_body": json.dumps({"session": os.environ["OPENAI_API_KEY"]})}
    body = json.dumps({**row, "_ng_task_index": index, "_ng_rollout_index": sample}).encode()
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{os.environ['NEMO_GYM_AGENT_URL']}/run", body, headers), timeout=250) as answer:
        result = json.load(answer)
    output = result["response"]["output"]
    answers = [item["generation_token_ids"] for item in output if item.get("generation_token_ids")]
    session.close(
        result["reward"],
        {},
        calls=len(answers),
        tokens=sum(map(len, answers)),
        tool_calls=sum(item["type"] == "function_call" for item in output),
    )


if __name__ == "__main__":
    play(Session())
