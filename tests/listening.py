"""Where processes listen, as the kernel sees it."""

import psutil


def listening_addresses(pid: int | None = None) -> list[str]:
    """The addresses at which a process (None: this one) and those below it listen, one entry a socket."""
    process = psutil.Process(pid)
    return sorted(
        connection.laddr.ip
        for one in (process, *process.children(recursive=True))
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )
