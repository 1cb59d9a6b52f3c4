"""The read-only JSON API: runs, their steps and heads, plans, benchmark rows and certificates."""

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
from xsake.server.guard import COOKIE, session_of
from xsake.server.hub import Hub
from xsake.server.index import View
from xsake.server.registry import MAX_ENTRIES, MAX_THINGS, Kind, Thing
from xsake.server.runs import Run, UnreadableRunError
from xsake.server.settings import Settings
from xsake.server.watcher import Watcher

Id = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]
Step = Annotated[int, Query(ge=0, lt=2**53)]
_MOST_SERIES, _MOST_POINTS, _MOST_ROWS = 64, 4096, 500
_JSON = "application/json"
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Detail} for status in (400, 401, 403, 404, 405, 413, 414, 421, 429, 503)
}


def router(settings: Settings, watcher: Watcher, hub: Hub) -> APIRouter:
    """All addresses under /api/v1.

    Args:
        settings: of the server.
        watcher: knows what there is.
        hub: tells what changes.
    """
    api = APIRouter(prefix="/api/v1", responses=_REFUSALS)
    _add_runs(api, watcher, hub)
    _add_documents(api, watcher)

    @api.get("/metrics")
    def metrics() -> list[MetricRow]:
        """What runs measure: names, units and meanings."""
        return [
            MetricRow(
                name=x.name, unit=x.unit, meaning=x.meaning, axes=list(x.axes), source=x.source
            )
            for x in METRICS.values()
        ]

    @api.get("/status")
    def status() -> Status:
        """How much is shown, and how much was dropped or left out."""
        runs, found = list(watcher.runs.values()), watcher.found
        return Status(
            runs=len(runs),
            runs_unreadable=sum(run.problem is not None for run in runs),
            dropped_lines=sum(run.dropped_lines for run in runs),
            dropped_values=sum(run.dropped_values for run in runs),
            runs_left_out=found.num_left_out["run"],
            documents_left_out=sum(found.num_left_out.values()) - found.num_left_out["run"],
            is_search_cut=found.is_cut,
            max_things=MAX_THINGS,
            max_entries=MAX_ENTRIES,
            problem=watcher.problem,
        )

    @api.post("/session", status_code=204)
    def session(request: Request) -> Response:
        """Trade the token, in the Authorization header, for a cookie that pages can use."""
        made = Response(status_code=204)
        if settings.token is not None:
            made.set_cookie(
                COOKIE, session_of(settings.token), httponly=True, samesite="strict",
                secure=request.url.scheme == "https", max_age=12 * 3600,
            )  # fmt: skip
        return made

    return api


def health(watcher: Watcher) -> APIRouter:
    """Whether the server lives, and whether it has looked at everything once."""
    api = APIRouter()

    @api.get("/health")
    async def is_alive() -> Health:
        """Always the same while the server answers."""
        return Health(status="ok", version=xsake.__version__)

    @api.get("/ready", responses={503: {"model": Health}})
    async def is_ready(response: Response) -> Health:
        """503 until all runs have been read once, and while they are not read on."""
        problem = watcher.problem
        response.status_code = 200 if problem is None else 503
        status = "ok" if problem is None else "stale" if watcher.is_started else "starting"
        return Health(status=status, version=xsake.__version__, reason=problem)

    return api


def _add_runs(api: APIRouter, watcher: Watcher, hub: Hub) -> None:
    @api.get("/runs")
    def runs() -> list[RunSummary]:
        """All runs, those that told something last first."""
        found = [run.summary() for run in list(watcher.runs.values())]
        found.sort(key=lambda summary: -summary["last_told"])
        return [RunSummary(**summary) for summary in found]

    @api.get("/runs/{run}")
    def details(run: Id) -> RunDetails:
        """One run: its newest numbers, its settings and which series it has."""
        return RunDetails(**_found(watcher.runs, run).details())

    @api.get("/runs/{run}/series", response_model=Curves)
    def series(
        run: Id,
        name: Annotated[list[str], Query(max_length=_MOST_SERIES)],
        begin: Step = 0,
        end: Step = 2**53 - 1,
        points: Annotated[int, Query(ge=2, le=_MOST_POINTS)] = 1000,
    ) -> JSONResponse:
        """Some series between two steps, as many points as a screen can show.

        A point that stands for several steps has their least, mean and most.
        """
        if any(len(one) > 64 for one in name):
            raise HTTPException(400, "names of series are short")
        view = _readable(_found(watcher.runs, run), name, begin, max(begin, end), points)
        return _curves(view, name)

    @api.get("/runs/{run}/heads/{metric}")
    def heads(run: Id, metric: Annotated[str, Path(pattern="^[a-z_]{1,32}$")]) -> Heads:
        """A metric by layer and head, as it was told last."""
        found = _found(watcher.runs, run).matrices.get(metric)
        if found is None:
            raise HTTPException(404, "the run has not told this")
        unit = METRICS[metric].unit
        values = [[None if x != x else x for x in row] for row in found[1].tolist()]
        return Heads(metric=metric, unit=unit, step=found[0], values=values)

    @api.get(
        "/runs/{run}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def events(run: Id) -> StreamingResponse:
        """Live updates of a run, as server-sent events."""
        _found(watcher.runs, run)
        if hub.is_full:
            raise HTTPException(503, "too many clients want live updates")
        return StreamingResponse(hub.stream(run), media_type="text/event-stream")


def _add_documents(api: APIRouter, watcher: Watcher) -> None:
    @api.get("/plans")
    def plans() -> list[Document]:
        """All plans."""
        return _listed(watcher, "plan")

    @api.get("/plans/{plan}", response_model=dict[str, Any])
    def plan(plan: Id) -> Response:
        """A plan, as it is saved."""
        return _document(_thing(watcher, "plan", plan))

    @api.get("/certificates")
    def certificates() -> list[Document]:
        """All certificates."""
        return _listed(watcher, "certificate")

    @api.get("/certificates/{certificate}", response_model=dict[str, Any])
    def certificate(certificate: Id) -> Response:
        """A certificate, as it is saved."""
        return _document(_thing(watcher, "certificate", certificate))

    @api.get("/benchmarks")
    def benchmarks() -> list[Document]:
        """All files of benchmark rows."""
        return _listed(watcher, "rows")

    @api.get("/benchmarks/{rows}", response_model=Rows)
    def rows(
        rows: Id,
        begin: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        count: Annotated[int, Query(ge=1, le=_MOST_ROWS)] = 100,
    ) -> Response:
        """Some rows of a file; fewer than `count` where they are very long."""
        thing = _thing(watcher, "rows", rows)
        with _refusing():
            texts, is_last = read_rows(thing.path, begin, count)
        about = {"id": thing.id, "name": thing.name, "begin": begin, "is_last": is_last}
        head = json.dumps(about).encode().removesuffix(b"}")
        return Response(head + b', "rows": [' + b",".join(texts) + b"]}", media_type=_JSON)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except DocumentError as error:
        raise HTTPException(404, str(error)) from error


def _found(runs: dict[str, Run], number: str) -> Run:
    if number not in runs:
        raise HTTPException(404, "there is no such run")
    return runs[number]


def _readable(run: Run, *asked: Any) -> View:
    try:
        return run.view(*asked)
    except UnreadableRunError as error:
        raise HTTPException(404, f"the run cannot be read now: {error}") from error


def _curves(view: View, names: list[str]) -> JSONResponse:
    """As `Curves` says it, which would take longer to check than all else: it may be large."""
    least, mean, most = (_numbers(x.T) for x in (view.least, view.mean, view.most))
    series = {
        name: {"least": least[i], "mean": mean[i], "most": most[i]} for i, name in enumerate(names)
    }
    steps = view.steps.tolist()
    return JSONResponse({"steps": steps, "resolution": view.resolution, "series": series})


def _listed(watcher: Watcher, kind: Kind) -> list[Document]:
    things = watcher.things[kind].values()
    return sorted((Document(id=x.id, name=x.name) for x in things), key=lambda x: x.name)


def _thing(watcher: Watcher, kind: Kind, number: str) -> Thing:
    if number not in watcher.things[kind]:
        raise HTTPException(404, "there is no such document")
    return watcher.things[kind][number]


def _document(thing: Thing) -> Response:
    with _refusing():
        return Response(read_json_object(thing.path), media_type=_JSON)


def _numbers(values: Float[np.ndarray, "C N"]) -> list[list[float | None]]:
    """With the seven digits that the index has, and nothing where there is no number."""
    exact = values.astype(np.float64)
    size = np.abs(np.where(np.isfinite(exact) & (exact != 0), exact, 1))
    scale = 10.0 ** (6 - np.floor(np.log10(size)))
    rounded = np.where(scale < 1e300, np.round(exact * scale) / scale, exact).tolist()
    if not np.isnan(exact).any():
        return rounded
    return [[None if x != x else x for x in row] for row in rounded]
