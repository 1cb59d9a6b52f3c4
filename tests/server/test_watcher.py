"""How often runs are looked at."""

import asyncio

import pytest

from xsake.server.hub import Broadcaster
from xsake.server.settings import ServerSettings
from xsake.server.watcher import Poller


@pytest.mark.parametrize(("clients", "seconds"), [(0, 0.5), (20, 0.5), (200, 2.0)])
def test_many_clients_are_told_less_often(tmp_path, clients, seconds):
    async def paused() -> float:
        hub = Broadcaster(max_clients=300)
        watcher = Poller(ServerSettings(folders=(tmp_path,)), hub)
        streams = [hub.stream("a run") for _ in range(clients)]
        for stream in streams:
            await anext(stream)
        watcher.stop()
        return watcher.pause

    assert asyncio.run(paused()) == pytest.approx(seconds)
