"""Serves an ASGI application in the running asyncio loop, to untrusted clients.

The server is uvicorn's, without its signal handlers and with a deadline for a request's head.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTION = "connection"
"""The key of a request's `Connection` in its state."""
HEADER_BYTES = 32 << 10
_UNREAD_BYTES = 128 << 10
"""An answer's bytes in the kernel's buffer: a larger one would make unread answers count as delivered."""


@dataclass(frozen=True)
class ServerLimits:
    """connections: most at once; one more closes the one that has been idle longest.

    header_seconds: time for a request's head. idle_seconds: time until a connection without a request is closed.
    stop_seconds: time for requests to end once the server stops; then they are cancelled.
    """

    connections: int = 2048
    header_seconds: float = 10.0
    idle_seconds: int = 75
    stop_seconds: float = 2.0


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    url: str


class Connection(H11Protocol):
    """A client's connection, cut if the next request or the rest of one is late."""

    def __init__(self, *args: Any, limits: ServerLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self.app_state = {**self.app_state, CONNECTION: self}
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited = ""
        self.used = 0.0  # the loop's time at the last bytes sent or received

    @property
    def idle(self) -> bool:
        return not self.cycle or self.cycle.response_complete

    async def drained(self) -> bool:
        """Wait until the kernel has accepted everything; return False if the client left before."""
        if not self.transport.is_closing():
            await self.flow.drain()
        return not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._watch()
        if len(self.connections) > within_descriptors(self._limits.connections):
            others = [one for one in self.connections if isinstance(one, Connection)]
            spare = [one for one in others if one.idle or one.cycle.more_body]
            min(spare, key=lambda one: one.used, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Set the deadline for the client's next bytes; there is none while a request is answered."""
        self.used = self.loop.time()
        between = self.cycle and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        awaited = "request" if between else "head"
        awaited = awaited if self.idle and not self.transport.is_closing() else ""
        if awaited == self._awaited:
            return  # a head that comes byte by byte gets no extra time
        if self._deadline is not None:
            self._deadline.cancel()
        limits = self._limits
        within = limits.idle_seconds if awaited == "request" else limits.header_seconds
        self._awaited = awaited
        self._deadline = self.loop.call_later(within, self.transport.abort) if awaited else None

    def send_400_response(self, msg: str) -> None:
        """As in `H11Protocol`, for bytes that are not HTTP; behind a begun answer, close instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


def within_descriptors(connections: int) -> int:
    """Cap connections at half of the process's file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft // 2))


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing: the run handles signals."""
        yield


@asynccontextmanager
async def served(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits | None = None
) -> AsyncGenerator[Address]:
    """Serve an application until the block ends; port 0: a free one. Raises OSError for an unavailable address."""
    limits = limits or ServerLimits()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # connections inherit it
        config = uvicorn.Config(
            app,
            http=partial(Connection, limits=limits),  # pyright: ignore[reportArgumentType]
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=1024,
            timeout_keep_alive=limits.idle_seconds,
            timeout_graceful_shutdown=limits.stop_seconds,  # pyright: ignore[reportArgumentType]
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            name, number, *_ = listener.getsockname()
            yield Address(name, number, f"http://{f'[{name}]' if ':' in name else name}:{number}")
        finally:
            server.should_exit = True
            await asyncio.shield(_stopped(server, serving, limits.stop_seconds))


async def _stopped(server: uvicorn.Server, serving: asyncio.Future[None], seconds: float) -> None:
    """Wait for the server's end, and for the requests that it has cancelled."""
    await serving
    if tasks := {*server.server_state.tasks}:
        await asyncio.wait(tasks, timeout=seconds)
    for connection in [*server.server_state.connections]:
        connection.transport.abort()
    for _ in range(4):  # the loop closes aborted connections
        await asyncio.sleep(0)
