"""Live updates: every client has a short queue, and one that does not keep up misses some."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

_WAITING = 32  # events of a client that does not read
HEARTBEAT_SECONDS = 15.0


class Hub:
    """Clients that are told what changes; lives in the server's event loop.

    Args:
        most: clients at once.
    """

    def __init__(self, most: int):
        self._most = most
        self._clients: dict[asyncio.Queue[bytes | None], str] = {}
        self.dropped = self.sent = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def is_full(self) -> bool:
        """Whether nobody else can be told."""
        return len(self._clients) >= self._most

    def publish(self, topic: str, event: str, data: dict[str, Any]) -> None:
        """Tell all clients of a topic; encoded once for all of them.

        Args:
            topic: such as the id of a run.
            event: its name.
            data: as JSON.
        """
        text = f"event: {event}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
        for queue, wanted in list(self._clients.items()):
            if wanted != topic:
                continue
            if queue.full():
                queue.get_nowait()
                self.dropped += 1
            queue.put_nowait(text)
            self.sent += 1

    def close(self) -> None:
        """No more events: all streams end."""
        for queue in self._clients:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def stream(self, topic: str) -> AsyncIterator[bytes]:
        """The events of a topic, from now on, as a client receives them.

        Args:
            topic: such as the id of a run.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._clients[queue] = topic
        try:
            yield b"retry: 2000\n: hello\n\n"
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        text = await queue.get()
                except TimeoutError:
                    text = b": still here\n\n"
                if text is None:
                    return
                yield text
        finally:
            self._clients.pop(queue, None)
