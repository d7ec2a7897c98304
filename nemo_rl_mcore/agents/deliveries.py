"""Responses, and what is refused before a route is looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_rl_mcore.agents import answers
from nemo_rl_mcore.agents.refusals import Refusal
from nemo_rl_mcore.agents.server import CONNECTION, HEADER_BYTES, Connection

_WITHIN_S = 30.0


class Delivery(Response):
    """A body that has arrived once the kernel has all of it.

    within: seconds in which the client has to take it; then the connection is cut. delivered: called once it has.
    """

    def __init__(
        self,
        body: bytes,
        media_type: str,
        headers: Mapping[str, str] | None = None,
        status: int = 200,
        *,
        within: float = _WITHIN_S,
        delivered: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(body, status, headers and {**headers}, media_type)
        self._within, self._delivered = within, delivered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.responses.Response`."""
        connection: Connection = scope["state"][CONNECTION]
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with asyncio.timeout(self._within):
                await send(start)
                await send({"type": "http.response.body", "body": self.body, "more_body": True})
                await connection.drained()
        except TimeoutError:
            connection.abort()
        if self._delivered is not None and not connection.lost:
            self._delivered()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class JsonResponse(Delivery):
    """A value as JSON."""

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(answers.to_json(value), "application/json", headers, status)


class RefusedPaths:
    """Refuses paths that spell a character as its code, and more headers than a client has need of.

    No route and no token has such a character, so that a path means what it says to whoever reads it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `starlette.types.ASGIApp`."""
        refusal = _refusal_of(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await JsonResponse(refusal.body, refusal.status)(scope, receive, send)


def _refusal_of(scope: Scope) -> Refusal | None:
    if b"%" in scope["raw_path"]:
        return Refusal(404, "no path of this endpoint has an escape in it")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
        return Refusal(431, f"headers may have {HEADER_BYTES} bytes")
    return None
