"""Clients of live updates that do not keep up, and how often many are updated."""

import asyncio
import json

import pytest

from xsake.server.runs import Poller
from xsake.server.settings import ServerSettings
from xsake.server.stream import Broadcaster


def test_one_that_does_not_read_misses_the_oldest_and_delays_none():
    async def run():
        broadcaster = Broadcaster(max_clients=2)
        quick, slow = broadcaster.stream("a run"), broadcaster.stream("a run")
        for stream in (quick, slow):
            await anext(stream)
        read = []
        for number in range(1000):
            broadcaster.publish("a run", "update", {"number": number})
            read.append(_number(await anext(quick)))
        waiting = [_number(await anext(slow)) for _ in range(1000 - broadcaster.dropped)]
        return read, waiting, broadcaster.dropped

    read, waiting, dropped = asyncio.run(run())
    assert read == list(range(1000))
    assert 0 < len(waiting) <= 64 and waiting == list(range(dropped, 1000))


def _number(event: bytes) -> int:
    return json.loads(event.decode().partition("data: ")[2])["number"]


@pytest.mark.parametrize(("clients", "seconds"), [(20, 0.5), (200, 2.0)])
def test_many_clients_are_updated_less_often(tmp_path, clients, seconds):
    async def run():
        broadcaster = Broadcaster(max_clients=300)
        poller = Poller(ServerSettings(folders=(tmp_path,)), broadcaster)
        streams = [broadcaster.stream("a run") for _ in range(clients)]
        for stream in streams:
            await anext(stream)
        poller.stop()
        return poller.pause

    assert asyncio.run(run()) == pytest.approx(seconds)
