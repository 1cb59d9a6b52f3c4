"""Response models of the API."""

from typing import Any, Literal

from pydantic import BaseModel

from xsake.server.runs import State


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


class RunSummary(BaseModel):
    """Summary of a run."""

    id: str
    name: str
    folder: str
    state: State
    step: int
    steps: int | None
    last_update_time: float
    loss: float | None
    tokens_per_second: float | None
    is_indexed: bool
    problem: str | None
    dropped_lines: int
    dropped_values: int


class RunDetails(RunSummary):
    """Details of a run."""

    latest: dict[str, float | bool | None]
    heads: list[str]
    series: list[str]
    goodput: float | None
    skipped_total: int
    config: dict[str, Any] | None


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


class Rows(BaseModel):
    """Page of benchmark rows."""

    id: str
    name: str
    begin: int
    rows: list[dict[str, Any]]
    is_last: bool


class Detail(BaseModel):
    """Error message."""

    detail: str
