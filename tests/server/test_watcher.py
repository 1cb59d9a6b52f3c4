"""How often runs are looked at."""

import asyncio

import pytest

from xsake.server.hub import Hub
from xsake.server.settings import Settings
from xsake.server.watcher import Watcher


@pytest.mark.parametrize(("clients", "seconds"), [(0, 0.5), (20, 0.5), (200, 2.0)])
def test_many_clients_are_told_less_often(tmp_path, clients, seconds):
    async def paused() -> float:
        hub = Hub(most=300)
        watcher = Watcher(Settings(folders=(tmp_path,)), hub)
        streams = [hub.stream("a run") for _ in range(clients)]
        for stream in streams:
            await anext(stream)
        watcher.stop()
        return watcher.pause

    assert asyncio.run(paused()) == pytest.approx(seconds)
