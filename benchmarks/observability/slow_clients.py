"""Clients of live updates that read slowly, or not at all."""

import select
import socket
import threading
from typing import Any

from benchmarks.observability.serving import Served


class SlowClients:
    """So many connections to the live updates of a server's only run, while the body lasts.

    Args:
        server: that is asked.
        count: of the connections.
        seconds: between two reads of a few bytes; 0 reads whatever comes.
    """

    def __init__(self, server: Served, count: int, *, seconds: float):
        self._server, self._count, self._seconds = server, count, seconds
        self._lines: list[socket.socket] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.received = 0

    def __enter__(self) -> "SlowClients":
        number = self._server.run()["id"]
        host, _, port = self._server.place.removeprefix("http://").partition(":")
        text = f"GET /api/v1/runs/{number}/events HTTP/1.1\r\nHost: {host}\r\n"
        text += f"Authorization: Bearer {self._server.token}\r\n\r\n"
        for _ in range(self._count):
            line = socket.socket()
            # A small receive window: the server notices early that the client does not read.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.settimeout(60)
            line.connect((host, int(port)))
            line.sendall(text.encode())
            assert b" 200 " in line.recv(64), "not let in"
            self._lines.append(line)
        self._thread.start()
        return self

    def _read(self) -> None:
        size = 64 if self._seconds else 65536
        while not self._stopped.wait(self._seconds):
            ready, _, _ = select.select(self._lines, [], [], 0.5)
            for line in ready:
                self.received += len(line.recv(size))

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join()
        for line in self._lines:
            line.close()


def wait_for_none(server: Served, seconds: float = 60.0) -> None:
    """Until the server has forgotten all clients.

    Args:
        server: that is asked.
        seconds: that it may take.
    """
    is_none = lambda: b"\nxsake_server_clients 0.0\n" in server.ask("/metrics")[2]
    server.until(is_none, "no client", seconds)
