"""Whether a Ray cluster answers, and takes this driver: Ray itself retries for minutes, and may then end the driver."""

from __future__ import annotations

import os
import socket
import threading
import time

_AUTH_MODE = "RAY_AUTH_MODE"
_TIMEOUT_S = 3.0
_EVERY_S = 3.0
_MISSES = 3


def probe(address: str) -> None:
    """Connect to `host:port` and hang up. Raises OSError when nothing answers, ValueError for a port that is none."""
    if not _has_port(address):
        return  # "auto", or a form that Ray checks at once
    host, _, port = address.rpartition(":")
    if int(port) not in range(1, 1 << 16):
        raise ValueError(f"no port {port}")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S).close()


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal()


class TokenRefusedError(Exception):
    """A cluster does not take this driver's token, or its lack of one."""


def authenticate(address: str) -> None:
    """Settle whether the cluster at `host:port` takes this driver; the user's token is sent where it asks for one.

    Raises TokenRefusedError at the first answer that refuses the token, or the lack of one.
    """
    # Here, since `doctor` probes addresses where Ray may be missing or broken.
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType] - compiled
    from ray.exceptions import RpcError

    try:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray.exceptions import AuthenticationError
    except ImportError:
        return  # a Ray without tokens
    try:
        # First, since a GcsClient that is to send a token and finds none ends the process.
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
        if not _has_port(address):
            return
        try:
            GcsClient(address=address)
        except AuthenticationError:
            # `ray start` asks for the token that it finds; a driver that names an address sends none by itself.
            if _AUTH_MODE in os.environ or not tokens.maybe_enable_token_auth_if_token_available(
                warn_if_disabled=False
            ):
                raise
            GcsClient(address=address)
    except RpcError:
        return  # no word about tokens: Ray is to find out what is wrong
    except AuthenticationError as error:
        raise TokenRefusedError(str(error).partition(". ")[0]) from error


class GcsProbe:
    """Asks now and then; several misses in a row mean that the cluster's head is gone."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._asked_at = time.monotonic()
        self._misses = 0
        self._lock = threading.Lock()  # two threads that ask at once miss once

    def lost(self) -> str | None:
        """Return what died, or None."""
        with self._lock:
            if self._misses < _MISSES and time.monotonic() - self._asked_at >= _EVERY_S:
                try:
                    probe(self._address)
                    self._misses = 0
                except OSError:
                    self._misses += 1
                self._asked_at = time.monotonic()
        return f"Ray's GCS at {self._address} does not answer" if self._misses >= _MISSES else None
