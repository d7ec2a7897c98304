"""mini-swe-agent: by a shell in a folder of its own it finds out what a file says, and submits it.

The model says what the shell runs, so this one runs the two commands of the task alone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

_SETTINGS = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",  # nobody has told it what a token of ours costs
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
_OWN = tempfile.TemporaryDirectory()
os.environ.update(_SETTINGS, MSWEA_GLOBAL_CONFIG_DIR=_OWN.name)  # read when it is imported

from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402
from session import Session, agreement  # noqa: E402

_MOST_CALLS = 3
_READ = "cat number.txt"
_ALLOWED = (_READ, f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; {_READ}")


class OneTask(LocalEnvironment):
    """A shell that runs what the task needs, and nothing else."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command in the folder."""
        if action["command"] not in _ALLOWED:
            return {"output": "not allowed", "returncode": 1, "exception_info": ""}
        return super().execute(action, timeout=timeout)


def play(session: Session, folder: Path) -> None:
    """Play one task in a folder, and end the session."""
    (folder / "number.txt").write_text(session.task["answer"])
    url = {"api_base": os.environ["OPENAI_BASE_URL"], "timeout": 120}
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", model_kwargs=url),
        OneTask(cwd=str(folder), timeout=30),
        system_template="shell",
        instance_template="{{ task }}",
        step_limit=_MOST_CALLS,
        wall_time_limit_seconds=200,
    )
    try:
        ended = agent.run(session.question)
    except Exception as error:  # noqa: BLE001 it raises what litellm does, and has told it already
        ended = {"exit_status": type(error).__name__}
    answers = [
        message["extra"]["response"] for message in agent.messages if "response" in message.get("extra", {})
    ]
    submitted = ended.get("submission", "")
    rewards = {
        "submitted": 0.5 * (ended["exit_status"] == "Submitted"),
        "right": agreement(submitted.strip(), session.task["answer"]),
    }
    session.close(
        sum(rewards.values()),
        rewards,
        calls=agent.n_calls,
        tokens=sum(answer["usage"]["completion_tokens"] for answer in answers),
        tool_calls=sum(message["role"] == "tool" for message in agent.messages),
        exit_status=ended["exit_status"],
    )


if __name__ == "__main__":
    with _OWN, tempfile.TemporaryDirectory() as scratch:
        play(Session(), Path(scratch))
