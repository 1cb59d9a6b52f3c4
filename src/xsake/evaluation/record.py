"""Evaluation report and its JSON file, model identity, and the cache of results."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import JsonlLog, atomic_write
from xsake._schema import Frozen
from xsake.errors import ArgumentError

MAX_HASHED_BYTES = 10**9  # larger weights take as long to hash as the first window
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class TextFile(Frozen):
    """File of documents."""

    name: str
    bytes: Count
    sha256: str
    documents: Count


class WeightFile(Frozen):
    """File of weights."""

    name: str
    bytes: Count
    sha256: str | None = Field(description="None for files that are too large to hash")


class ModelIdentity(Frozen):
    """Identity of the evaluated model."""

    name: str = Field(description="of its folder")
    digest: str = Field(description="of all fields below, and of file times without hashes")
    config_sha256: str
    tokenizer_sha256: str | None
    weights: tuple[WeightFile, ...]


class CandidateIdentity(Frozen):
    """Attention that is compared with dense attention."""

    description: str
    digest: str
    tokens: int | None = Field(description="the only supported length; None: any")


class Estimate(Frozen):
    """Number with its 95 % bootstrap interval over documents."""

    value: float
    low: float | None = Field(description="None with fewer than two documents")
    high: float | None


class SpanResult(Frozen):
    """Means over predicted tokens at positions `start` to `end`, exclusive."""

    start: Count
    end: Count
    tokens: Count = Field(description="number of predictions of all windows")
    dense_nll: float = Field(description="nats per token")
    candidate_nll: float | None = None
    kl: float | None = Field(default=None, description="KL(dense || candidate), nats per token")
    agreement: Share | None = Field(default=None, description="share of equal top-1 tokens")


class DenseComparison(Frozen):
    """Candidate compared with dense attention on the same tokens; intervals are paired."""

    budget: float | None = Field(description="computed / causally visible blocks, if known")
    perplexity: Estimate
    perplexity_difference: Estimate = Field(description="candidate - dense")
    nll_difference: Estimate = Field(description="candidate - dense, nats per token")
    kl: Estimate = Field(description="KL(dense || candidate) of next-token distributions, nats")
    agreement: Estimate = Field(description="share of equal top-1 tokens")


class ContextResult(Frozen):
    """Results of windows of one length, each evaluated independently."""

    context: Count = Field(description="tokens of a window; all but the first are predicted")
    windows: Count
    documents: tuple[str, ...] = Field(
        description="names: file, number in it, start of the text's digest"
    )
    too_short: Count = Field(description="skipped documents with fewer tokens")
    perplexity: Estimate = Field(description="dense: exp of the mean NLL of all predicted tokens")
    comparison: DenseComparison | None
    by_position: tuple[SpanResult, ...]
    seconds: Seconds = Field(description="compilation included; not a benchmark")


class FarCopySample(Frozen):
    """NLL of the two copies of one passage, nats per token; None without a candidate."""

    where: str = Field(description="document and first token of the passage")
    first_dense_nll: float
    second_dense_nll: float
    first_candidate_nll: float | None = None
    second_candidate_nll: float | None = None


class FarCopyResult(Frozen):
    """Results of the far-copy probe at one gap, mean over samples."""

    gap: Count
    passage: Count = Field(description="tokens of a copy; all but the first are counted")
    samples: tuple[FarCopySample, ...]
    first: SpanResult = Field(description="the first copy")
    second: SpanResult = Field(description="the second copy: low with long-range attention")
    seconds: Seconds


class EvaluationReport(Frozen):
    """Report of `xsake evaluate` with everything that the results depend on."""

    schema_version: Literal[1] = 1
    made_at: str = Field(description="UTC")
    model: ModelIdentity
    texts: tuple[TextFile, ...]
    dtype: str = Field(description="of weights and activations")
    seed: int
    document_limit: int | None
    windows_per_document: Count
    candidate: CandidateIdentity | None
    contexts: tuple[ContextResult, ...]
    far_copy: tuple[FarCopyResult, ...]
    notes: tuple[str, ...] = Field(description="skipped parts and warnings")
    seconds: Seconds = Field(description="of scoring, including cached results")
    versions: dict[str, str]
    source: str = Field(description="digest of the source code that determines the results")
    commit: str | None
    dirty: bool | None
    processor: str


def write_report(report: Frozen, path: Path) -> None:
    """Write the file of a report atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, report.model_dump_json(indent=1) + "\n")


def read_report(path: Path) -> EvaluationReport:
    """Read and validate a report."""
    try:
        return EvaluationReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise ArgumentError(
            "evaluation-report",
            "invalid evaluation report",
            got=f"{path.name}: {str(error).splitlines()[0]}",
            expected="JSON that matches schemas/evaluation.schema.json",
        ) from error


def identify(folder: Path) -> ModelIdentity:
    """Identify a Hugging Face checkpoint by digests of its files; sizes only above 1 GB."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        is_small = sum(file.stat().st_size for file in files) <= MAX_HASHED_BYTES
        weights = tuple(
            WeightFile(
                name=file.name,
                bytes=file.stat().st_size,
                sha256=_sha256(file) if is_small else None,
            )
            for file in files
        )
        config, tokenizer = _sha256(folder / "config.json"), folder / "tokenizer.json"
        tokenizer_digest = _sha256(tokenizer) if tokenizer.exists() else None
        # Sizes do not change with further training, modification times do.
        times = [] if is_small else [file.stat().st_mtime_ns for file in files]
    except OSError as error:
        raise ArgumentError(
            "model-file-unreadable", "cannot read a model file", got=error
        ) from error
    parts = [config, tokenizer_digest, [weight.model_dump() for weight in weights], times]
    return ModelIdentity(
        name=folder.resolve().name,
        digest=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        config_sha256=config,
        tokenizer_sha256=tokenizer_digest,
        weights=weights,
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class CachedResult(Frozen):
    """Result of one trial: sums over its spans by score; `key` digests all that it depends on."""

    key: str
    seconds: Seconds
    sums: dict[str, list[float]] = Field(default_factory=dict)
    text: str | None = Field(default=None, description="that was generated")


class ResultCache:
    """Results by key, in memory and optionally in an append-only file, for resuming.

    Incomplete lines of interrupted writes are ignored.

    Args:
        path: a .jsonl file; None: in memory.
        overwrite: delete existing results.
    """

    def __init__(self, path: Path | None = None, *, overwrite: bool = False):
        self._path, self._results = path, {}
        if path is None:
            return
        self._log = JsonlLog(path)
        try:
            if overwrite:
                path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as error:
            raise _write_error(path, error) from error
        for line in lines:
            try:
                entry = CachedResult.model_validate_json(line)
            except ValidationError:
                continue
            self._results[entry.key] = entry

    def find(self, key: str) -> CachedResult | None:
        """Return the result of a key, or None."""
        return self._results.get(key)

    def add(self, entry: CachedResult) -> None:
        """Add a result; it is synced to disk when this returns."""
        self._results[entry.key] = entry
        if self._path is not None:
            try:
                self._log.append(entry.model_dump_json(), sync=True)
            except OSError as error:
                raise _write_error(self._path, error) from error


def _write_error(path: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        "results-unwritable",
        "cannot write the results",
        got=f"{path}: {error.strerror}",
        expected="a writable folder",
        fix="choose another path with -o",
    )
