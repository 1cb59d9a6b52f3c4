"""Clients of live updates that do not keep up."""

import asyncio
import json

from xsake.server.hub import Broadcaster


def test_one_that_does_not_read_misses_the_oldest_and_holds_nobody_up():
    async def told() -> tuple[list[int], list[int], int]:
        hub = Broadcaster(max_clients=2)
        quick, slow = hub.stream("a run"), hub.stream("a run")
        for stream in (quick, slow):
            await anext(stream)
        read = []
        for number in range(1000):
            hub.publish("a run", "update", {"number": number})
            read.append(_number(await anext(quick)))
        waiting = [_number(await anext(slow)) for _ in range(1000 - hub.dropped)]
        return read, waiting, hub.dropped

    read, waiting, dropped = asyncio.run(told())
    assert read == list(range(1000))
    assert 0 < len(waiting) <= 64 and waiting == list(range(dropped, 1000))


def _number(event: bytes) -> int:
    return json.loads(event.decode().partition("data: ")[2])["number"]
