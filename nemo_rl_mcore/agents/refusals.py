"""What the endpoint answers to a call that it refuses, in the shape that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_mcore.agents.session import (
    ClosedSessionError,
    SessionError,
    UnknownSessionError,
)
from nemo_rl_mcore.engine.engine import EngineDiedError
from nemo_rl_mcore.errors import RunStoppedError

_RETRY_AFTER_S = 1


class RefusedCallError(Exception):
    """A request that cannot be taken. param: the field that is meant; code: what clients read."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Refusal:
    """A status, and what goes with it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def body(self) -> dict[str, Any]:
        """Return the error as clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def refusal_of(error: BaseException) -> Refusal | None:
    """Return what to answer; None for what is a fault of ours."""
    match error:
        case RefusedCallError():
            return Refusal(error.status, str(error), error.param, error.code)
        case UnknownSessionError():
            return Refusal(401, str(error), code=error.code, headers={"www-authenticate": "Bearer"})
        case ClosedSessionError():
            return Refusal(410, str(error), code=error.code)
        case SessionError():
            return Refusal(400, str(error), code=error.code)
        case RunStoppedError() if not isinstance(error, EngineDiedError):
            return Refusal(500, "the engine has not answered", code="engine_failed")
        case EngineDiedError():
            return busy("the engine that answered has died; another one will answer")
        case _:
            return None


def busy(message: str) -> Refusal:
    """Return what has a client ask again."""
    return Refusal(503, message, code="try_again", headers={"retry-after": str(_RETRY_AFTER_S)})
