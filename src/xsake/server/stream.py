"""Live updates (SSE): one bounded queue per client; slow clients lose events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

_QUEUE_SIZE = 32  # events
_HEARTBEAT_SECONDS = 15.0


class Broadcaster:
    """Publish events to subscribed clients; used from the server's event loop only."""

    def __init__(self, max_clients: int):
        self._max_clients = max_clients
        self._clients: dict[asyncio.Queue[bytes | None], str] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of clients is reached."""
        return len(self._clients) >= self._max_clients

    def publish(self, topic: str, event: str, data: dict[str, Any]) -> None:
        """Send an event to all clients of a topic; it is encoded once."""
        text = f"event: {event}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
        for queue in [queue for queue, other in self._clients.items() if other == topic]:
            if queue.full():
                queue.get_nowait()
                self.dropped += 1
            queue.put_nowait(text)

    def close(self) -> None:
        """End all streams."""
        for queue in self._clients:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def stream(self, topic: str) -> AsyncIterator[bytes]:
        """Yield the events of a topic, such as the id of a run, in the SSE format."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_SIZE)
        self._clients[queue] = topic
        try:
            text: bytes | None = b"retry: 2000\n: hello\n\n"
            while text is not None:
                yield text
                try:
                    text = await asyncio.wait_for(queue.get(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    text = b": still here\n\n"
        finally:
            self._clients.pop(queue, None)
