"""Evaluation report and its JSON file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._schema import Frozen
from xsake.errors import ArgumentError

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


def write_report(report: EvaluationReport, path: Path) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, report.model_dump_json(indent=1) + "\n")


def read_report(path: Path) -> EvaluationReport:
    """Read and validate a report."""
    try:
        return EvaluationReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise ArgumentError(
            "invalid evaluation report",
            got=f"{path.name}: {str(error).splitlines()[0]}",
            expected="JSON that matches schemas/evaluation.schema.json",
        ) from error
