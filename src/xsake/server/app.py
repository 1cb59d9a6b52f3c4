"""ASGI application: API, live updates, Prometheus metrics and pages."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

import xsake
from xsake.server.api import make_router
from xsake.server.artifacts import BUILT_IN, Site, read_site
from xsake.server.prometheus import MetricsCollector
from xsake.server.runs import Poller
from xsake.server.security import IS_AUTHENTICATED, SecurityMiddleware
from xsake.server.settings import ServerSettings
from xsake.server.stream import Broadcaster


class Dashboard:
    """ASGI application of the dashboard."""

    def __init__(self, settings: ServerSettings):
        self.broadcaster = Broadcaster(settings.max_clients)
        self.poller = Poller(settings, self.broadcaster)
        showcase = None if settings.showcase is None else read_site(settings.showcase, "/")
        app = FastAPI(
            title="XSAKE dashboard", version=xsake.__version__, lifespan=self._lifespan,
            openapi_url="/api/v1/openapi.json", docs_url=None, redoc_url=None,
        )  # fmt: skip
        hashes = () if showcase is None else showcase.script_hashes
        self._middleware = SecurityMiddleware(app, settings, hashes)
        collector = MetricsCollector(self.poller, self.broadcaster, self._middleware)
        app.include_router(make_router(settings, self.poller, self.broadcaster))
        app.add_exception_handler(RequestValidationError, _reject_invalid)

        @app.get("/metrics", include_in_schema=False)
        def metrics() -> Response:
            return Response(collector.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

        _add_files(app, showcase)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        await self._middleware(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.poller.start(asyncio.get_running_loop())
        supervision = asyncio.create_task(self.poller.supervise())
        try:
            yield
        finally:
            supervision.cancel()
            self.broadcaster.close()
            await asyncio.to_thread(self.poller.stop)


def _add_files(app: FastAPI, showcase: Site | None) -> None:
    """Add static files; /live.json states that the API is available and what `/` serves."""
    page = read_site(BUILT_IN, "/page/").files
    live = json.dumps({"is_live": True, "has_showcase": showcase is not None})
    files = {"/": page["/page/"]} if showcase is None else showcase.files
    files = {**files, "/live.json": (live.encode(), "application/json"), **page}

    @app.api_route("/{address:path}", methods=["GET", "HEAD"], include_in_schema=False)
    def file(request: Request) -> Response:
        path = request.url.path
        found = files.get(path) or files.get(f"{path}.html") or files.get(f"{path}/")
        if path == "/" and not request.scope.get(IS_AUTHENTICATED):
            found = page["/page/"]  # the login form
        if found is None:
            return JSONResponse({"detail": "not found"}, 404)
        return Response(found[0], media_type=found[1])


async def _reject_invalid(request: Request, error: Exception) -> JSONResponse:
    """Return the invalid parameters of a request, without their values."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    names = sorted({".".join(map(str, problem["loc"]))[:64] for problem in problems})
    return JSONResponse({"detail": f"invalid: {', '.join(names)[:512]}"}, 400)
