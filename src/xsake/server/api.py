"""Read-only JSON API: runs, series, heads, plans, benchmark rows and certificates."""

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from jaxtyping import Float

import xsake
from xsake.observability.metrics import METRICS
from xsake.server.answers import (
    Curves,
    Detail,
    Document,
    Heads,
    Health,
    MetricRow,
    Rows,
    RunDetails,
    RunSummary,
    Status,
)
from xsake.server.documents import DocumentError, read_json_object, read_rows
from xsake.server.guard import COOKIE, session_cookie
from xsake.server.hub import Broadcaster
from xsake.server.index import SeriesView
from xsake.server.registry import MAX_ARTIFACTS, MAX_ENTRIES, Artifact, ArtifactType
from xsake.server.runs import Run, UnreadableRunError
from xsake.server.settings import ServerSettings
from xsake.server.watcher import Poller

Id = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]
Step = Annotated[int, Query(ge=0, lt=2**53)]
_MAX_SERIES, _MAX_POINTS, _MAX_ROWS = 64, 4096, 500
_JSON = "application/json"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Detail} for status in (400, 401, 403, 404, 405, 413, 414, 421, 429, 503)
}


def router(settings: ServerSettings, poller: Poller, broadcaster: Broadcaster) -> APIRouter:
    """Return the routes under /api/v1.

    Args:
        settings: of the server.
        poller: runs and documents.
        broadcaster: live updates.
    """
    api = APIRouter(prefix="/api/v1", responses=_ERRORS)
    _add_runs(api, poller, broadcaster)
    _add_documents(api, poller)

    @api.get("/metrics")
    def metrics() -> list[MetricRow]:
        """List metrics with units and descriptions."""
        return [
            MetricRow(
                name=x.name, unit=x.unit, meaning=x.meaning, axes=list(x.axes), source=x.source
            )
            for x in METRICS.values()
        ]

    @api.get("/status")
    def status() -> Status:
        """Report counts of runs, dropped lines and omitted documents."""
        runs, scanned = list(poller.runs.values()), poller.scanned
        return Status(
            runs=len(runs),
            runs_unreadable=sum(run.problem is not None for run in runs),
            dropped_lines=sum(run.dropped_lines for run in runs),
            dropped_values=sum(run.dropped_values for run in runs),
            runs_left_out=scanned.num_omitted["run"],
            documents_left_out=sum(scanned.num_omitted.values()) - scanned.num_omitted["run"],
            is_search_cut=scanned.is_truncated,
            max_things=MAX_ARTIFACTS,
            max_entries=MAX_ENTRIES,
            problem=poller.problem,
        )

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

    return api


def health(poller: Poller) -> APIRouter:
    """Return the liveness and readiness routes."""
    api = APIRouter()

    @api.get("/health")
    async def is_alive() -> Health:
        """Liveness."""
        return Health(status="ok", version=xsake.__version__)

    @api.get("/ready", responses={503: {"model": Health}})
    async def is_ready(response: Response) -> Health:
        """Readiness: 503 until all runs have been read once, and while polling is stalled."""
        problem = poller.problem
        response.status_code = 200 if problem is None else 503
        status = "ok" if problem is None else "stale" if poller.is_started else "starting"
        return Health(status=status, version=xsake.__version__, reason=problem)

    return api


def _add_runs(api: APIRouter, poller: Poller, broadcaster: Broadcaster) -> None:
    @api.get("/runs")
    def runs() -> list[RunSummary]:
        """List runs, most recently updated first."""
        summaries = [run.summary() for run in list(poller.runs.values())]
        summaries.sort(key=lambda summary: -summary["last_update_time"])
        return [RunSummary(**summary) for summary in summaries]

    @api.get("/runs/{run}")
    def details(run: Id) -> RunDetails:
        """Return the latest metrics, the configuration and the series names of a run."""
        return RunDetails(**_get_run(poller.runs, run).details())

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
        view = _read_view(_get_run(poller.runs, run), name, begin, max(begin, end), points)
        return _curves(view, name)

    @api.get("/runs/{run}/heads/{metric}")
    def heads(run: Id, metric: Annotated[str, Path(pattern="^[a-z_]{1,32}$")]) -> Heads:
        """Return the latest values of a metric by layer and head."""
        latest = _get_run(poller.runs, run).matrices.get(metric)
        if latest is None:
            raise HTTPException(404, "the run has no such metric")
        unit = METRICS[metric].unit
        values = [[None if x != x else x for x in row] for row in latest[1].tolist()]
        return Heads(metric=metric, unit=unit, step=latest[0], values=values)

    @api.get(
        "/runs/{run}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def events(run: Id) -> StreamingResponse:
        """Stream live updates of a run as server-sent events."""
        _get_run(poller.runs, run)
        if broadcaster.is_full:
            raise HTTPException(503, "too many clients of live updates")
        return StreamingResponse(broadcaster.stream(run), media_type="text/event-stream")


def _add_documents(api: APIRouter, poller: Poller) -> None:
    @api.get("/plans")
    def plans() -> list[Document]:
        """List plans."""
        return _list_artifacts(poller, "plan")

    @api.get("/plans/{plan}", response_model=dict[str, Any])
    def plan(plan: Id) -> Response:
        """Return a plan as stored."""
        return _send_document(_get_artifact(poller, "plan", plan))

    @api.get("/certificates")
    def certificates() -> list[Document]:
        """List certificates."""
        return _list_artifacts(poller, "certificate")

    @api.get("/certificates/{certificate}", response_model=dict[str, Any])
    def certificate(certificate: Id) -> Response:
        """Return a certificate as stored."""
        return _send_document(_get_artifact(poller, "certificate", certificate))

    @api.get("/benchmarks")
    def benchmarks() -> list[Document]:
        """List files of benchmark rows."""
        return _list_artifacts(poller, "rows")

    @api.get("/benchmarks/{rows}", response_model=Rows)
    def rows(
        rows: Id,
        begin: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 100,
    ) -> Response:
        """Return a page of rows; fewer than `count` if they are very long."""
        artifact = _get_artifact(poller, "rows", rows)
        with _not_found_on_error():
            texts, is_last = read_rows(artifact.path, begin, count)
        about = {"id": artifact.id, "name": artifact.name, "begin": begin, "is_last": is_last}
        head = json.dumps(about).encode().removesuffix(b"}")
        return Response(head + b', "rows": [' + b",".join(texts) + b"]}", media_type=_JSON)


@contextlib.contextmanager
def _not_found_on_error() -> Iterator[None]:
    try:
        yield
    except DocumentError as error:
        raise HTTPException(404, str(error)) from error


def _get_run(runs: dict[str, Run], run_id: str) -> Run:
    if run_id not in runs:
        raise HTTPException(404, "unknown run")
    return runs[run_id]


def _read_view(run: Run, *arguments: Any) -> SeriesView:
    try:
        return run.view(*arguments)
    except UnreadableRunError as error:
        raise HTTPException(404, f"the run is unreadable: {error}") from error


def _curves(view: SeriesView, names: list[str]) -> JSONResponse:
    """Build a `Curves` response; validation is skipped because it dominates the time."""
    least, mean, most = (_round_values(x.T) for x in (view.minimum, view.mean, view.maximum))
    series = {
        name: {"least": least[i], "mean": mean[i], "most": most[i]} for i, name in enumerate(names)
    }
    steps = view.steps.tolist()
    return JSONResponse({"steps": steps, "resolution": view.resolution, "series": series})


def _list_artifacts(poller: Poller, type: ArtifactType) -> list[Document]:
    artifacts = poller.artifacts[type].values()
    return sorted((Document(id=x.id, name=x.name) for x in artifacts), key=lambda x: x.name)


def _get_artifact(poller: Poller, type: ArtifactType, artifact_id: str) -> Artifact:
    if artifact_id not in poller.artifacts[type]:
        raise HTTPException(404, "unknown document")
    return poller.artifacts[type][artifact_id]


def _send_document(artifact: Artifact) -> Response:
    with _not_found_on_error():
        return Response(read_json_object(artifact.path), media_type=_JSON)


def _round_values(values: Float[np.ndarray, "C N"]) -> list[list[float | None]]:
    """Round to the seven digits of the index; NaN becomes None."""
    exact = values.astype(np.float64)
    size = np.abs(np.where(np.isfinite(exact) & (exact != 0), exact, 1))
    scale = 10.0 ** (6 - np.floor(np.log10(size)))
    rounded = np.where(scale < 1e300, np.round(exact * scale) / scale, exact).tolist()
    if not np.isnan(exact).any():
        return rounded
    return [[None if x != x else x for x in row] for row in rounded]
