"""ASGI application: API, live updates, Prometheus metrics and pages."""

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
from xsake.server.exposition import ServerCounters, render
from xsake.server.files import BUILT_IN, PageFile, Site, read_site
from xsake.server.guard import IS_AUTHENTICATED, SecurityMiddleware, content_security_policy
from xsake.server.hub import Broadcaster
from xsake.server.settings import ServerSettings
from xsake.server.watcher import Poller


class Dashboard:
    """ASGI application of the dashboard.

    Args:
        settings: of the server.
    """

    def __init__(self, settings: ServerSettings):
        self.broadcaster = Broadcaster(settings.max_clients)
        self.poller = Poller(settings, self.broadcaster)
        page = read_site(BUILT_IN, "/page/")
        showcase = None if settings.showcase is None else read_site(settings.showcase, "/")
        self.api = self._build_app(settings, page, showcase)
        hashes = () if showcase is None else showcase.script_hashes
        self._middleware = SecurityMiddleware(self.api, settings, content_security_policy(hashes))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        await self._middleware(scope, receive, send)

    @property
    def counters(self) -> ServerCounters:
        """Counters of the server."""
        middleware, poller = self._middleware, self.poller
        last = poller.last_round
        return ServerCounters(
            len(self.broadcaster), self.broadcaster.dropped,
            middleware.answered, middleware.rejected,
            runs_left_out=poller.scanned.num_omitted["run"],
            is_search_cut=poller.scanned.is_truncated,
            watcher_failures=poller.num_failures,
            last_round=None if last is None else time.time() - (time.monotonic() - last),
        )  # fmt: skip

    def _build_app(self, settings: ServerSettings, page: Site, showcase: Site | None) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.poller.start(asyncio.get_running_loop())
            supervision = asyncio.create_task(self.poller.supervise())
            try:
                yield
            finally:
                supervision.cancel()
                self.broadcaster.close()
                await asyncio.to_thread(self.poller.stop)

        app = FastAPI(
            title="XSAKE dashboard", version=xsake.__version__, lifespan=lifespan,
            openapi_url="/api/v1/openapi.json", docs_url=None, redoc_url=None,
        )  # fmt: skip
        app.include_router(router(settings, self.poller, self.broadcaster))
        app.include_router(health(self.poller))
        app.add_exception_handler(RequestValidationError, _reject_invalid)

        @app.get("/metrics", include_in_schema=False)
        def metrics() -> Response:
            text = render(list(self.poller.runs.values()), self.counters)
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

        files = _route_files(page, showcase)

        @app.api_route("/{address:path}", methods=["GET", "HEAD"], include_in_schema=False)
        def file(request: Request) -> Response:
            path = request.url.path
            page = files.get(path) or files.get(f"{path}.html") or files.get(f"{path}/")
            if path == "/" and not request.scope.get(IS_AUTHENTICATED):
                page = files["/page/"]  # the login form
            if page is None:
                return JSONResponse({"detail": "not found"}, 404)
            return Response(page.content, media_type=page.media_type)

        return app


def _route_files(page: Site, showcase: Site | None) -> dict[str, PageFile]:
    """Map paths to files; /live.json states that the API is available and what `/` serves."""
    files = {"/": page.files["/page/"]} if showcase is None else showcase.files
    live = json.dumps({"is_live": True, "has_showcase": showcase is not None})
    return {**files, "/live.json": PageFile(live.encode(), "application/json"), **page.files}


async def _reject_invalid(request: Request, error: Exception) -> JSONResponse:
    """Return the invalid parameters of a request, without their values."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    names = sorted({".".join(map(str, problem["loc"]))[:64] for problem in problems})
    return JSONResponse({"detail": f"invalid: {', '.join(names)[:512]}"}, 400)
