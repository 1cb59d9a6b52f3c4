"""Live updates (SSE): one bounded queue per client; slow clients lose events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

_QUEUE_SIZE = 32  # events
HEARTBEAT_SECONDS = 15.0


class Broadcaster:
    """Publish events to subscribed clients; used from the server's event loop only.

    Args:
        max_clients: maximum number of clients.
    """

    def __init__(self, max_clients: int):
        self._max_clients = max_clients
        self._clients: dict[asyncio.Queue[bytes | None], str] = {}
        self.dropped = self.sent = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of clients is reached."""
        return len(self._clients) >= self._max_clients

    def publish(self, topic: str, event: str, data: dict[str, Any]) -> None:
        """Send an event to all clients of a topic; it is encoded once.

        Args:
            topic: such as the id of a run.
            event: name of the event.
            data: JSON payload.
        """
        text = f"event: {event}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
        for queue, subscribed in list(self._clients.items()):
            if subscribed != topic:
                continue
            if queue.full():
                queue.get_nowait()
                self.dropped += 1
            queue.put_nowait(text)
            self.sent += 1

    def close(self) -> None:
        """End all streams."""
        for queue in self._clients:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def stream(self, topic: str) -> AsyncIterator[bytes]:
        """Yield the events of a topic in the SSE format.

        Args:
            topic: such as the id of a run.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_SIZE)
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
