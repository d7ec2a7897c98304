"""Whether a Ray cluster still answers: Ray itself retries in silence for a minute, and then ends the driver."""

from __future__ import annotations

import socket
import threading
import time

_TIMEOUT_S = 3.0
_EVERY_S = 3.0
_MISSES = 3


def probe(address: str) -> None:
    """Connect to `host:port` and hang up. Raises OSError when nothing answers, ValueError for a port that is none."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # "auto", or a form that Ray checks at once
    if int(port) not in range(1, 1 << 16):
        raise ValueError(f"no port {port}")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S).close()


class GcsProbe:
    """Asks now and then; several misses in a row mean that the cluster's head is gone."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._asked_at = time.monotonic()
        self._misses = 0
        self._lock = threading.Lock()  # two threads that ask at once miss once

    def lost(self) -> str | None:
        """What died, or None."""
        with self._lock:
            if self._misses < _MISSES and time.monotonic() - self._asked_at >= _EVERY_S:
                try:
                    probe(self._address)
                    self._misses = 0
                except OSError:
                    self._misses += 1
                self._asked_at = time.monotonic()
        return f"Ray's GCS at {self._address} does not answer" if self._misses >= _MISSES else None
