"""What each agent here needs of the endpoint: its task, and how to end its session. Of the standard library alone.

Each file beside this one is run by the Python of its stack, once for each sample; see docs/environments.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen


class Session:
    """The session of this process. task: the row of the data set, with `messages`, `answer`, `index` and `sample`."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--record", help="a file that gets a line of JSON for each session")
        self._record: str | None = parser.parse_known_args()[0].record
        self.task: dict[str, Any] = json.loads(sys.stdin.readline())
        self.question: str = self.task["messages"][-1]["content"]

    def close(self, reward: float, rewards: dict[str, float], **told: object) -> None:
        """End the session with its reward, and the parts of it by name.

        told: what the stack says of itself, such as how many calls it has made, for the record.
        """
        body = json.dumps({"reward": reward, "rewards": rewards}).encode()
        headers = {"content-type": "application/json"}
        with urlopen(
            Request(f"{os.environ['NEMO_RL_SESSION_URL']}/close", body, headers), timeout=60
        ) as answer:
            recorded = json.load(answer)["calls"]
        if self._record is not None:
            line = {key: self.task[key] for key in ("index", "sample")}
            line |= {"reward": reward, "recorded_calls": recorded, **told}
            with open(self._record, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")


def agreement(said: str, answer: str) -> float:
    """Return the share of characters that are right, from 0 to 1."""
    return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer), 1)
