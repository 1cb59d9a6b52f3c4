"""Benchmark rows: one measurement with its environment as one line of JSON; their comparison."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from xsake._io import JsonlLog
from xsake._schema import Frozen, describe_first
from xsake.benchmarking.runner import CLEAR_SPREAD, Spread
from xsake.errors import ArgumentError

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
PRODUCT = "bare product of as many flops"
HEADS: dict[str, tuple[int, int, int]] = {
    "square": (12, 12, 64),
    "smollm2-135m": (9, 3, 64),
    "llama-3-8b/4": (8, 2, 128),
    "qwen3-0.6b": (16, 8, 128),
    "gemma-3-1b": (4, 1, 256),
}
"""Query heads, kv heads and head dimension of models; `/4`: a quarter of the heads."""
PEERS = frozenset({"NumPy", "ejkernel", "jax", "jnp", "tokamax", "torch", "transformers"})


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


def model_shape(name: str, tokens: int) -> Shape:
    """Return the self-attention shape of a model over `tokens` positions, batch 1.

    Example:
        >>> model_shape("smollm2-135m", 4096).q_heads
        9
    """
    if name not in HEADS:
        raise ArgumentError("bench-shape", "unknown shape", got=name, expected=", ".join(HEADS))
    heads, kv_heads, head_dim = HEADS[name]
    shape = Shape.square(tokens, heads=heads, head_dim=head_dim)
    return shape.model_copy(update={"kv_heads": kv_heads})


class _Quartiles(Frozen):
    median: Seconds
    q25: Seconds
    q75: Seconds

    @model_validator(mode="after")
    def _check_order(self) -> "_Quartiles":
        if not self.q25 <= self.median <= self.q75:
            raise ValueError(f"quartiles out of order: {self.q25=} {self.median=} {self.q75=}")
        return self

    @property
    def spread(self) -> Spread:
        """The same numbers as a `Spread`."""
        return Spread(self.median, self.q25, self.q75)


class TimingStats(_Quartiles):
    """Seconds of one call."""


class Ratio(_Quartiles):
    """Seconds of this side / seconds of the baseline, per round of one interleaved run."""

    baseline: str = Field(description="`side` of the same run")


class BenchmarkRow(Frozen):
    """One measurement of one side of one experiment."""

    schema_version: Literal[1] = 1
    experiment: str = Field(description="module in benchmarks/ that wrote the row")
    run: str = Field(description="identifier of the interleaved run")
    side: str = Field(description="name of the side inside its run")
    implementation: str = Field(description="library and function")
    is_own: bool = Field(default=True, description="whether XSAKE was measured; false for a peer")
    direction: Literal["forward", "forward+backward", "dq", "dkv", "build"] = "forward"
    shape: Shape
    dtype: str = "float32"
    mask: str = Field(description="of the attention")
    layout: str = Field(description="origin of the block layout, 'none' for dense calls")
    budget: float | None = Field(
        default=None, ge=0, description="computed / causally visible blocks"
    )
    block_q: Positive | None = None
    block_kv: Positive | None = None
    threads: Positive
    device: str = "cpu"
    compile_seconds: float | None = Field(
        default=None, ge=0, description="until the first result, compilation included"
    )
    seconds: TimingStats | None = None
    failure: str | None = Field(default=None, description="reason if nothing was measured")
    flops: Count | None = Field(
        default=None,
        description="of the matrix products of the listed blocks, without recomputation",
    )
    repeats: Count = Field(default=0, description="timed rounds")
    ratios: tuple[Ratio, ...] = ()
    temp_bytes: Count | None = Field(
        default=None, description="temporary memory by the compiler's analysis"
    )
    peak_bytes: Count | None = Field(default=None, description="resident memory above the start")
    compilations: Count | None = Field(
        default=None, description="number of compilations after the first"
    )
    counts: dict[str, Count] | None = Field(
        default=None, description="static counts of the compiled program, by name"
    )
    max_error: float | None = Field(
        default=None,
        ge=0,
        description="maximum error compared with float64, relative to the largest value",
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
    load_average: float = Field(ge=0, description="one minute, at the start of the run")

    @model_validator(mode="before")
    @classmethod
    def _infer_is_own(cls, row: object) -> object:
        """Set `is_own` of rows of 0.1.0, which lack it, by the library in `implementation`."""
        if isinstance(row, dict) and "is_own" not in row:
            names = str(row.get("implementation", "")).replace("(", " ").split()
            libraries = {name.split(".")[0] for name in names}
            row = {**row, "is_own": libraries.isdisjoint(PEERS)}
        return row

    def ratio_to(self, baseline: str) -> Spread:
        """Return the ratio to `baseline`; raise if the row has none."""
        for ratio in self.ratios:
            if ratio.baseline == baseline:
                return ratio.spread
        expected = [ratio.baseline for ratio in self.ratios]
        raise ArgumentError(
            "row-ratio", "the row has no ratio to this", got=baseline, expected=expected
        )


def append_rows(path: Path, rows: Iterable[BenchmarkRow]) -> None:
    """Append rows to a `.jsonl` file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    JsonlLog(path).append(*(row.model_dump_json() for row in rows))


def read_rows(path: Path) -> list[BenchmarkRow]:
    """Read and validate all rows of a `.jsonl` file; the error names the first invalid line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows += [BenchmarkRow.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            raise ArgumentError(
                "benchmark-row",
                "invalid benchmark row",
                got=f"{path.name}, line {number}: {describe_first(error)}",
                expected="one BenchmarkRow as JSON per line",
            ) from error
    return rows


@dataclasses.dataclass(frozen=True)
class TimeChange:
    """One side in two files of rows; times are relative to a matrix product.

    Absolute times of two runs are not comparable: machine and load differ. Every run times the
    same matrix product, so each side is compared by its time over that product's.
    """

    experiment: str
    side: str
    size: str
    before: Spread
    after: Spread

    @property
    def factor(self) -> Spread:
        """Time after / time before, with the quartiles of both runs combined."""
        before, after = self.before, self.after
        medians = after.median / before.median
        return Spread(medians, after.q25 / before.q75, after.q75 / before.q25)

    def is_slower(self, limit: float) -> bool:
        """Return whether the lower quartile is above the limit."""
        return self.factor.q25 > limit

    @property
    def is_clear(self) -> bool:
        """Whether the spread of both runs is small enough for a comparison."""
        return max(self.before.relative, self.after.relative) <= CLEAR_SPREAD


def compare_rows(before: Iterable[BenchmarkRow], after: Iterable[BenchmarkRow]) -> list[TimeChange]:
    """Compare the newest rows of the sides that both files have, in the order of `after`."""
    old, new = _newest(before), _newest(after)
    return [TimeChange(*key[:3], old[key], new[key]) for key in new if key in old]


def _newest(rows: Iterable[BenchmarkRow]) -> dict[tuple[str, str, str, str], Spread]:
    newest: dict[tuple[str, str, str, str], Spread] = {}
    for row in sorted(rows, key=lambda row: row.utc):
        if row.seconds is not None and any(x.baseline == PRODUCT for x in row.ratios):
            shape = row.shape
            heads = f"{shape.q_heads}/{shape.kv_heads} x {shape.head_dim}"
            size = f"{shape.kv_tokens} tokens, {heads}, {row.dtype}"
            newest[row.experiment, row.side, size, row.direction] = row.ratio_to(PRODUCT)
    return newest
