"""Read-only JSON API: runs, series, heads, plans, benchmark rows and certificates."""

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from jaxtyping import Float
from pydantic import BaseModel

import xsake
from xsake.observability.metrics import METRICS
from xsake.server.artifacts import (
    MAX_ARTIFACTS,
    MAX_ENTRIES,
    Artifact,
    ArtifactType,
    DocumentError,
    read_document,
    read_rows,
)
from xsake.server.metrics_index import SeriesView
from xsake.server.runs import Poller, Run, RunDetails, RunSummary, UnreadableRunError
from xsake.server.security import COOKIE, session_cookie
from xsake.server.settings import ServerSettings
from xsake.server.stream import Broadcaster

_MAX_SERIES, _MAX_POINTS, _MAX_ROWS = 64, 4096, 500
Id = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]
Step = Annotated[int, Query(ge=0, lt=2**53)]


class Health(BaseModel):
    """Health of the server."""

    status: Literal["ok", "starting", "stale"]
    version: str
    reason: str | None = None


class Status(BaseModel):
    """Counts of shown, unreadable and omitted data."""

    runs: int
    runs_unreadable: int
    dropped_lines: int
    dropped_values: int
    runs_left_out: int
    documents_left_out: int
    is_search_cut: bool
    max_things: int
    max_entries: int
    problem: str | None


class MetricRow(BaseModel):
    """Definition of a metric."""

    name: str
    unit: str
    meaning: str
    axes: list[str]
    source: str


class Curve(BaseModel):
    """Downsampled series."""

    least: list[float | None]
    mean: list[float | None]
    most: list[float | None]


class Curves(BaseModel):
    """Series of a run over the same steps."""

    steps: list[int]
    resolution: int
    series: dict[str, Curve]


class Heads(BaseModel):
    """Latest values of a metric by layer and head."""

    metric: str
    unit: str
    step: int
    values: list[list[float | None]]


class Document(BaseModel):
    """A plan, a file of benchmark rows, or a certificate."""

    id: str
    name: str


class Rows(Document):
    """Page of benchmark rows."""

    begin: int
    rows: list[dict[str, Any]]
    is_last: bool


class Detail(BaseModel):
    """Error message."""

    detail: str


def make_router(settings: ServerSettings, poller: Poller, broadcaster: Broadcaster) -> APIRouter:
    """Return the routes under /api/v1, /health and /ready."""
    statuses = (400, 401, 403, 404, 405, 413, 414, 421, 429, 503)
    api = APIRouter(prefix="/api/v1", responses={status: {"model": Detail} for status in statuses})
    _add_runs(api, poller, broadcaster)
    _add_documents(api, poller)

    @api.get("/metrics")
    def metrics() -> list[MetricRow]:
        """List metrics with units and descriptions."""
        return [MetricRow(**dataclasses.asdict(metric)) for metric in METRICS.values()]

    @api.get("/status")
    def status() -> Status:
        """Report counts of runs, dropped lines and omitted documents."""
        runs, scanned = list(poller.runs.values()), poller.scanned
        return Status(
            runs=len(runs), runs_unreadable=sum(run.problem is not None for run in runs),
            dropped_lines=sum(run.dropped_lines for run in runs),
            dropped_values=sum(run.dropped_values for run in runs),
            runs_left_out=scanned.num_omitted["run"],
            documents_left_out=sum(scanned.num_omitted.values()) - scanned.num_omitted["run"],
            is_search_cut=scanned.is_truncated, max_things=MAX_ARTIFACTS, max_entries=MAX_ENTRIES,
            problem=poller.problem,
        )  # fmt: skip

    @api.post("/session", status_code=204)
    def session(request: Request) -> Response:
        """Exchange the token of the Authorization header for a session cookie."""
        response = Response(status_code=204)
        if settings.token is not None:
            response.set_cookie(
                COOKIE, session_cookie(settings.token), httponly=True, samesite="strict",
                secure=request.url.scheme == "https", max_age=12 * 3600,
            )  # fmt: skip
        return response

    root = APIRouter()
    root.include_router(api)

    @root.get("/health")
    async def is_alive() -> Health:
        """Liveness."""
        return Health(status="ok", version=xsake.__version__)

    @root.get("/ready", responses={503: {"model": Health}})
    async def is_ready(response: Response) -> Health:
        """Readiness: 503 until all runs have been read once, and while polling is stalled."""
        problem = poller.problem
        response.status_code = 200 if problem is None else 503
        status = "ok" if problem is None else "stale" if poller.is_started else "starting"
        return Health(status=status, version=xsake.__version__, reason=problem)

    return root


def _add_runs(api: APIRouter, poller: Poller, broadcaster: Broadcaster) -> None:
    def find(run_id: str) -> Run:
        if run_id not in poller.runs:
            raise HTTPException(404, "unknown run")
        return poller.runs[run_id]

    @api.get("/runs")
    def runs() -> list[RunSummary]:
        """List runs, most recently updated first."""
        summaries = [run.summary() for run in list(poller.runs.values())]
        return sorted(summaries, key=lambda summary: -summary.last_update_time)

    @api.get("/runs/{run}")
    def details(run: Id) -> RunDetails:
        """Return the latest metrics, the configuration and the series names of a run."""
        return find(run).details()

    @api.get("/runs/{run}/series", response_model=Curves)
    def series(
        run: Id,
        name: Annotated[list[str], Query(max_length=_MAX_SERIES)],
        begin: Step = 0,
        end: Step = 2**53 - 1,
        points: Annotated[int, Query(ge=2, le=_MAX_POINTS)] = 1000,
    ) -> JSONResponse:
        """Return downsampled series between two steps.

        A point for several steps has their minimum (least), mean and maximum (most).
        """
        if any(len(one) > 64 for one in name):
            raise HTTPException(400, "a series name is too long")
        try:
            view = find(run).view(name, begin, max(begin, end), points)
        except UnreadableRunError as error:
            raise HTTPException(404, f"the run is unreadable: {error}") from error
        return _send_curves(view, name)

    @api.get("/runs/{run}/heads/{metric}")
    def heads(run: Id, metric: Annotated[str, Path(pattern="^[a-z_]{1,32}$")]) -> Heads:
        """Return the latest values of a metric by layer and head."""
        latest = find(run).matrices.get(metric)
        if latest is None:
            raise HTTPException(404, "the run has no such metric")
        values = [[None if x != x else x for x in row] for row in latest[1].tolist()]
        return Heads(metric=metric, unit=METRICS[metric].unit, step=latest[0], values=values)

    @api.get(
        "/runs/{run}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def events(run: Id) -> StreamingResponse:
        """Stream live updates of a run as server-sent events."""
        find(run)
        if broadcaster.is_full:
            raise HTTPException(503, "too many clients of live updates")
        return StreamingResponse(broadcaster.stream(run), media_type="text/event-stream")


def _add_documents(api: APIRouter, poller: Poller) -> None:
    def list_all(type: ArtifactType) -> list[Document]:
        artifacts = poller.scanned.artifacts[type].values()
        return sorted((Document(id=x.id, name=x.name) for x in artifacts), key=lambda x: x.name)

    def find(type: ArtifactType, artifact_id: str) -> Artifact:
        if artifact_id not in poller.scanned.artifacts[type]:
            raise HTTPException(404, "unknown document")
        return poller.scanned.artifacts[type][artifact_id]

    @api.get("/plans")
    def plans() -> list[Document]:
        """List plans."""
        return list_all("plan")

    @api.get("/plans/{plan}", response_model=dict[str, Any])
    def plan(plan: Id) -> Response:
        """Return a plan as stored."""
        return _answer(lambda: read_document(find("plan", plan).path))

    @api.get("/certificates")
    def certificates() -> list[Document]:
        """List certificates."""
        return list_all("certificate")

    @api.get("/certificates/{certificate}", response_model=dict[str, Any])
    def certificate(certificate: Id) -> Response:
        """Return a certificate as stored."""
        return _answer(lambda: read_document(find("certificate", certificate).path))

    @api.get("/benchmarks")
    def benchmarks() -> list[Document]:
        """List files of benchmark rows."""
        return list_all("rows")

    @api.get("/benchmarks/{rows}", response_model=Rows)
    def rows(
        rows: Id,
        begin: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 100,
    ) -> Response:
        """Return a page of rows; fewer than `count` if they are very long."""
        artifact = find("rows", rows)

        def read() -> bytes:
            texts, is_last = read_rows(artifact.path, begin, count)
            about = {"id": artifact.id, "name": artifact.name, "begin": begin, "is_last": is_last}
            head = json.dumps(about).encode().removesuffix(b"}")
            return head + b', "rows": [' + b",".join(texts) + b"]}"

        return _answer(read)


def _answer(read: Callable[[], bytes]) -> Response:
    try:
        return Response(read(), media_type="application/json")
    except DocumentError as error:
        raise HTTPException(404, str(error)) from error


def _send_curves(view: SeriesView, names: list[str]) -> JSONResponse:
    """Build a `Curves` response; validation is skipped because it would dominate the time."""
    least, mean, most = (round_values(x.T) for x in (view.minimum, view.mean, view.maximum))
    series = {
        name: {"least": least[i], "mean": mean[i], "most": most[i]} for i, name in enumerate(names)
    }
    steps = view.steps.tolist()
    return JSONResponse({"steps": steps, "resolution": view.resolution, "series": series})


def round_values(values: Float[np.ndarray, "C N"]) -> list[list[float | None]]:
    """Round to the seven digits of the index; NaN becomes None."""
    exact = values.astype(np.float64)
    size = np.abs(np.where(np.isfinite(exact) & (exact != 0), exact, 1))
    scale = 10.0 ** (6 - np.floor(np.log10(size)))
    rounded = np.where(scale < 1e300, np.round(exact * scale) / scale, exact).tolist()
    if not np.isnan(exact).any():
        return rounded
    return [[None if x != x else x for x in row] for row in rounded]
