"""A Ray cluster of several machines in name: raylets on this one, each with an address and a CPU of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from processes import ProcessWatch

RAY = Path(sys.executable).with_name("ray")
_OF_A_NODE = ("--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats")


class Raylets:
    """A context manager: a head, and further raylets that `join` and are killed; nothing of them outlives the block."""

    def __init__(self, *, head_cpus: int = 1) -> None:
        self._watch = ProcessWatch()
        self._folder = Path(tempfile.mkdtemp(prefix="rlt", dir="/tmp"))  # Ray's sockets need short names
        self._nodes, self._followed = 0, False
        self._joined: list[str] = []
        self._head_cpus = head_cpus
        self._settings = {
            "RAY_AUTH_MODE": "token",  # the head is reachable from outside
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def __enter__(self) -> Self:
        try:
            self._start("--head", "--port=0", f"--temp-dir={self._folder}/r", "--include-dashboard=false",
                        f"--num-cpus={self._head_cpus}")  # fmt: skip
            self._address = (self._folder / "r/ray_current_cluster").read_text().strip()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        return {**self._settings, "RAY_ADDRESS": self._address}

    def processes(self) -> dict[int, str]:
        return self._watch.alive()

    def join(self, cpus: int = 1) -> str:
        """Start a raylet; returns its address, which no other one has."""
        self._nodes += 1
        address = f"127.0.0.{self._nodes + 1}"
        self._joined.append(address)
        self._start(f"--address={self._address}", f"--node-ip-address={address}", f"--num-cpus={cpus}")
        return address

    def raylet(self, address: str) -> int:
        (found,) = [
            pid
            for pid, title in self._watch.alive().items()
            if "/raylet/raylet " in title and f"--node_ip_address={address} " in title
        ]
        return found

    def kill(self, address: str) -> None:
        os.kill(self.raylet(address), signal.SIGKILL)
        self._joined.remove(address)

    def kill_joined(self) -> None:
        for address in [*self._joined]:
            self.kill(address)

    def close(self) -> None:
        if self._followed:
            self._watch.kill_all()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *arguments: str) -> None:
        starting = subprocess.Popen(
            [str(RAY), "start", *arguments, *_OF_A_NODE],
            env={**os.environ, **self._settings, **self._watch.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not self._followed:
            self._watch.follow(starting.pid)
            self._followed = True
        _, errors = starting.communicate(timeout=300)
        assert starting.returncode == 0, errors
