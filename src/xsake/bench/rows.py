"""The row type: one measurement as one line of JSON, complete enough to be repeated."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from xsake._io import JsonlLog
from xsake._schema import Frozen
from xsake.bench.runner import Spread
from xsake.errors import ArgumentError

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
PEERS = frozenset({"ejkernel", "jax", "jnp", "tokamax", "torch"})


class Shape(Frozen):
    """Sizes of one attention call; public arrays are `[B, T, H, D]`."""

    batch: Positive = 1
    q_tokens: Positive
    kv_tokens: Positive
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive

    @classmethod
    def square(cls, tokens: int, *, heads: int = 12, head_dim: int = 64) -> "Shape":
        """Self-attention of `heads` equal heads over `tokens` positions, batch 1."""
        return cls(
            q_tokens=tokens, kv_tokens=tokens, q_heads=heads, kv_heads=heads, head_dim=head_dim
        )


class _Quartiles(Frozen):
    median: Seconds
    q25: Seconds
    q75: Seconds

    @model_validator(mode="after")
    def _ordered(self) -> "_Quartiles":
        if not self.q25 <= self.median <= self.q75:
            raise ValueError(f"quartiles out of order: {self.q25=} {self.median=} {self.q75=}")
        return self

    @property
    def spread(self) -> Spread:
        """The same numbers as a `Spread`, which knows whether they are clear."""
        return Spread(self.median, self.q25, self.q75)


class Timing(_Quartiles):
    """Seconds of one call."""


class Ratio(_Quartiles):
    """This side's seconds over the baseline's, taken round by round in one interleaved run."""

    baseline: str = Field(description="the side it is compared with: a `side` of the same run")


class BenchmarkRow(Frozen):
    """One measurement of one side of one experiment."""

    schema_version: Literal[1] = 1
    experiment: str = Field(description="module under benchmarks/ that wrote the row")
    run: str = Field(description="the same for all rows of one interleaved run")
    side: str = Field(description="name of the contender inside its run")
    implementation: str = Field(description="library and function that did the work")
    is_own: bool = Field(
        default=True, description="whether the measured code is XSAKE's; false for a peer"
    )
    direction: Literal["forward", "forward+backward", "dq", "dkv", "build"] = "forward"
    shape: Shape
    dtype: str = "float32"
    mask: str = Field(description="token rule")
    layout: str = Field(description="how the block list was made, or 'none' for dense calls")
    budget: float | None = Field(
        default=None, ge=0, description="computed / causally visible blocks"
    )
    block_q: Positive | None = None
    block_kv: Positive | None = None
    threads: Positive
    device: str = "cpu"
    compile_seconds: float | None = Field(
        default=None, ge=0, description="from the request to the first result, compilation included"
    )
    seconds: Timing | None = None
    failure: str | None = Field(default=None, description="why nothing could be measured")
    flops: Count | None = Field(
        default=None, description="of the products that the listed blocks need, none of them twice"
    )
    repeats: Count = Field(default=0, description="timed rounds")
    ratios: tuple[Ratio, ...] = ()
    temp_bytes: Count | None = Field(default=None, description="the compiler's own temporary bytes")
    peak_bytes: Count | None = Field(default=None, description="resident memory above the start")
    compilations: Count | None = Field(
        default=None, description="compilations counted after the first"
    )
    counts: dict[str, Count] | None = Field(
        default=None, description="static counts of what was compiled, by name; nothing was timed"
    )
    max_error: float | None = Field(
        default=None,
        ge=0,
        description="largest error against float64, relative to the largest value",
    )
    is_correct: bool | None = Field(
        default=None, description="max_error within the stated tolerance"
    )
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    seed: int
    utc: str
    cpu: str
    load_average: float = Field(ge=0, description="of the machine, one minute, when the run began")

    @model_validator(mode="before")
    @classmethod
    def _name_the_owner(cls, given: object) -> object:
        """Rows of 0.1.0 do not say whose code ran: the library in `implementation` does."""
        if isinstance(given, dict) and "is_own" not in given:
            words = str(given.get("implementation", "")).replace("(", " ").split()
            libraries = {word.split(".")[0] for word in words}
            given = {**given, "is_own": libraries.isdisjoint(PEERS)}
        return given

    def ratio_to(self, baseline: str) -> Spread:
        """Spread of the ratio to `baseline`; raises when that side was not in the run."""
        for ratio in self.ratios:
            if ratio.baseline == baseline:
                return ratio.spread
        raise ArgumentError(
            "No ratio to that side in this row.",
            got=baseline,
            expected=[ratio.baseline for ratio in self.ratios],
        )


def append_rows(path: Path, rows: Iterable[BenchmarkRow]) -> None:
    """Add rows to a `.jsonl` file, one JSON object per line; earlier rows stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    JsonlLog(path).append(*(row.model_dump_json() for row in rows))


def read_rows(path: Path) -> list[BenchmarkRow]:
    """All rows of a `.jsonl` file, checked; the error names the first bad line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(BenchmarkRow.model_validate_json(line))
        except ValidationError as error:
            raise ArgumentError(
                "A line is not a benchmark row.",
                got=f"{path.name}, line {number}: {error.errors()[0]['msg']}",
                expected="one BenchmarkRow as JSON per line",
            ) from error
    return rows
