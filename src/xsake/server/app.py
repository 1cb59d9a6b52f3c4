"""The application: the API, live updates, metrics for Prometheus and the page, behind the guard."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

import xsake
from xsake.server.api import health, router
from xsake.server.exposition import Counts, text_of
from xsake.server.files import BUILT_IN, File, Site, read_site
from xsake.server.guard import IS_KNOWN, Guard, policy
from xsake.server.hub import Hub
from xsake.server.settings import Settings
from xsake.server.watcher import Watcher


class Dashboard:
    """The ASGI application of a dashboard.

    Args:
        settings: how it is served.
    """

    def __init__(self, settings: Settings):
        self.hub = Hub(settings.clients)
        self.watcher = Watcher(settings, self.hub)
        page = read_site(BUILT_IN, "/page/")
        showcase = None if settings.showcase is None else read_site(settings.showcase, "/")
        self.api = self._made(settings, page, showcase)
        hashes = () if showcase is None else showcase.script_hashes
        self._guard = Guard(self.api, settings, policy(hashes))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One connection."""
        await self._guard(scope, receive, send)

    @property
    def counts(self) -> Counts:
        """What the server counts of itself."""
        guard, watcher = self._guard, self.watcher
        last = watcher.last_round
        return Counts(
            len(self.hub), self.hub.dropped, guard.answered, guard.refused,
            runs_left_out=watcher.found.num_left_out["run"],
            is_search_cut=watcher.found.is_cut,
            watcher_failures=watcher.num_failures,
            last_round=None if last is None else time.time() - (time.monotonic() - last),
        )  # fmt: skip

    def _made(self, settings: Settings, page: Site, showcase: Site | None) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.watcher.start(asyncio.get_running_loop())
            supervision = asyncio.create_task(self.watcher.supervise())
            try:
                yield
            finally:
                supervision.cancel()
                self.hub.close()
                await asyncio.to_thread(self.watcher.stop)

        app = FastAPI(
            title="XSAKE dashboard", version=xsake.__version__, lifespan=lifespan,
            openapi_url="/api/v1/openapi.json", docs_url=None, redoc_url=None,
        )  # fmt: skip
        app.include_router(router(settings, self.watcher, self.hub))
        app.include_router(health(self.watcher))
        app.add_exception_handler(RequestValidationError, _refused)

        @app.get("/metrics", include_in_schema=False)
        def metrics() -> Response:
            text = text_of(list(self.watcher.runs.values()), self.counts)
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

        files = _addresses(page, showcase)

        @app.api_route("/{address:path}", methods=["GET", "HEAD"], include_in_schema=False)
        def file(request: Request) -> Response:
            path = request.url.path
            found = files.get(path) or files.get(f"{path}.html") or files.get(f"{path}/")
            if path == "/" and not request.scope.get(IS_KNOWN):
                found = files["/page/"]  # who has not shown the token yet can show it there
            if found is None:
                return JSONResponse({"detail": "there is nothing here"}, 404)
            return Response(found.content, media_type=found.kind)

        return app


def _addresses(page: Site, showcase: Site | None) -> dict[str, File]:
    """Files by address; pages are told that runs can be asked for, and whether `/` is theirs."""
    own = {"/": page.files["/page/"]} if showcase is None else showcase.files
    told = json.dumps({"is_live": True, "has_showcase": showcase is not None})
    return {**own, "/live.json": File(told.encode(), "application/json"), **page.files}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, without repeating it."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    places = sorted({".".join(map(str, problem["loc"]))[:64] for problem in problems})
    return JSONResponse({"detail": f"cannot be used: {', '.join(places)[:512]}"}, 400)
