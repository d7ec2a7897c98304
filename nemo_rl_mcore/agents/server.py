"""Serves an ASGI application in the asyncio loop that is running, on sockets whose clients are not trusted.

Of uvicorn that is the protocol of a connection; listening, limits and the end are here, so that no signal is handled.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

CONNECTION = "connection"
"""Where the state of a request has its `Connection`."""
HEADER_BYTES = 32 << 10
_BACKLOG = 1024
_UNREAD_BYTES = 128 << 10
"""That the kernel may hold of an answer: else one that nobody reads would count as delivered up to some megabytes."""


@dataclass(frozen=True)
class ServerLimits:
    """connections: at once; for one more the one that has asked nothing for the longest is closed.

    header_seconds: within which the head of a request has to come. idle_seconds: until a connection without request is
    closed. stop_seconds: that requests have to end in when the server stops; then they are cancelled.
    """

    connections: int = 2048
    header_seconds: float = 10.0
    idle_seconds: int = 75
    stop_seconds: float = 2.0


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Return it without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Connection(H11Protocol):
    """A connection of a client; it has a deadline for the head of each request, and can be cut."""

    def __init__(self, config: Config, state: ServerState, limits: ServerLimits) -> None:
        super().__init__(config, state, {CONNECTION: self})
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self.used = 0.0
        """When it sent or got something, by the clock of the loop."""

    @property
    def lost(self) -> bool:
        """Return whether its client has gone, or was cut off."""
        return self.transport.is_closing()

    @property
    def idle(self) -> bool:
        """Return whether no request of it is answered."""
        return not self.cycle or self.cycle.response_complete

    @property
    def spare(self) -> bool:
        """Return whether no request that has come to its end waits for an answer."""
        return self.idle or self.cycle.more_body

    def abort(self) -> None:
        """Cut it, whatever is still to be written."""
        self.transport.abort()

    async def drained(self) -> None:
        """Wait until the kernel has all that was written."""
        if not self.lost:
            await self.flow.drain()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        self.used = self.loop.time()
        self._expect_head()
        most = _within_descriptors(self._limits.connections)
        if len(self.connections) > most:
            others = [one for one in self.connections if isinstance(one, Connection) and one.spare]
            min(others, key=lambda one: one.used, default=self).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._expect_nothing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self.used = self.loop.time()
        if not self.idle:
            self._expect_nothing()
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._expect_nothing()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif not self.lost:
            self._expect_head()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        self.used = self.loop.time()
        super().on_response_complete()
        if self.idle and self.conn.their_state is h11.SEND_BODY and not self.lost:
            self._expect_head()  # the rest of a body that was refused is read, for a while

    def timeout_keep_alive_handler(self) -> None:
        """See `H11Protocol`; what its client has not read by now it does not get."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """See `H11Protocol`; for what is no HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = {"message": msg, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers.append(("content-length", str(len(body))))
            self.transport.write(self.conn.send(h11.Response(status_code=400, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
        self.transport.close()

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.header_seconds, self.abort)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _within_descriptors(connections: int) -> int:
    """Leave half of the descriptors that this process may open to the rest of it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft // 2))


@asynccontextmanager
async def served(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits | None = None
) -> AsyncGenerator[Address]:
    """Serve an application until the block ends; port 0: one that the kernel chooses.

    Raises OSError where the address cannot be had.
    """
    limits = limits or ServerLimits()
    loop, config, state = asyncio.get_running_loop(), _config(app, limits), ServerState()
    server = await loop.create_server(
        lambda: Connection(config, state, limits), host, port, backlog=_BACKLOG, family=_family(host)
    )
    try:
        name = server.sockets[0].getsockname()
        yield Address(name[0], name[1])
    finally:
        server.close()
        await asyncio.shield(_stop(state, limits.stop_seconds))


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _config(app: ASGIApp, limits: ServerLimits) -> Config:
    config = Config(
        app,
        interface="asgi3",
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=limits.idle_seconds,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    config.load()
    return config


async def _stop(state: ServerState, seconds: float) -> None:
    """End all connections: those without request now, the others when they are answered or have had their time."""
    await _rounds()  # those that were accepted just now are connections then
    for connection in [*state.connections]:
        connection.shutdown()
    for timeout in (seconds, seconds):
        tasks: set[asyncio.Task[Any]] = {*state.tasks}
        if not tasks:
            break
        _, late = await asyncio.wait(tasks, timeout=timeout)
        for task in late:
            task.cancel()
    for connection in [*state.connections]:
        connection.transport.abort()
    await _rounds()


async def _rounds() -> None:
    """Let the loop do what it has to do already, and what follows from that."""
    for _ in range(4):
        await asyncio.sleep(0)
