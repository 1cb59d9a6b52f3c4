"""What an evaluation says, complete enough to be repeated; the file is written whole or not."""

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
    """A file that documents came from."""

    name: str
    bytes: Count
    sha256: str
    documents: Count


class WeightFile(Frozen):
    """A file of weights."""

    name: str
    bytes: Count
    sha256: str | None = Field(description="None where the files are too large to be read twice")


class ModelIdentity(Frozen):
    """Which model it was."""

    name: str = Field(description="of its folder")
    digest: str = Field(description="of everything below, and of file times where nothing is read")
    config_sha256: str
    tokenizer_sha256: str | None
    weights: tuple[WeightFile, ...]


class CandidateIdentity(Frozen):
    """What dense attention was compared with."""

    description: str
    digest: str
    tokens: int | None = Field(description="the only length it serves; None: any")


class Estimate(Frozen):
    """A number with its 95 % bootstrap interval over documents."""

    value: float
    low: float | None = Field(description="None with fewer than two documents")
    high: float | None


class SpanResult(Frozen):
    """Means over predicted tokens at positions `start` to `end`, `end` not included."""

    start: Count
    end: Count
    tokens: Count = Field(description="predictions, over all windows")
    dense_nll: float = Field(description="nats per token")
    candidate_nll: float | None = None
    kl: float | None = Field(default=None, description="KL(dense || candidate), nats per token")
    agreement: Share | None = Field(default=None, description="same token most likely")


class Comparison(Frozen):
    """The candidate beside dense attention on the same tokens; intervals are paired."""

    budget: float | None = Field(description="computed / causally visible blocks, if known")
    perplexity: Estimate
    perplexity_difference: Estimate = Field(description="candidate - dense")
    nll_difference: Estimate = Field(description="candidate - dense, nats per token")
    kl: Estimate = Field(description="KL(dense || candidate) of next-token distributions, nats")
    agreement: Estimate = Field(description="share of positions with the same most likely token")


class ContextResult(Frozen):
    """Windows of one length, each read on its own from its first token."""

    context: Count = Field(description="tokens of a window; all but the first are predicted")
    windows: Count
    documents: tuple[str, ...] = Field(description="names: file, number in it, start of its digest")
    too_short: Count = Field(description="documents left out because they have fewer tokens")
    perplexity: Estimate = Field(description="dense: exp of the mean NLL of all predicted tokens")
    comparison: Comparison | None
    by_position: tuple[SpanResult, ...]
    seconds: Seconds = Field(description="compilation included; no measure of speed")


class FarCopySample(Frozen):
    """One passage: NLL of its two copies, nats per token; None without a candidate."""

    where: str = Field(description="document and token where the passage begins")
    first_dense_nll: float
    second_dense_nll: float
    first_candidate_nll: float | None = None
    second_candidate_nll: float | None = None


class FarCopyResult(Frozen):
    """A passage and its copy with `gap` tokens of other text between, mean over the samples."""

    gap: Count
    passage: Count = Field(description="tokens of a copy; all but its first are counted")
    samples: tuple[FarCopySample, ...]
    first: SpanResult = Field(description="the first copy")
    second: SpanResult = Field(description="the second copy: low if the model can look back")
    seconds: Seconds


class Report(Frozen):
    """What came out of `xsake evaluate`, and everything that it depends on."""

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
    notes: tuple[str, ...] = Field(description="what was left out or should be known")
    seconds: Seconds = Field(description="of scoring, earlier parts of an interrupted run included")
    versions: dict[str, str]
    source: str = Field(description="digest of the sources that compute the numbers")
    commit: str | None
    dirty: bool | None
    processor: str


def write(report: Report, path: Path) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, report.model_dump_json(indent=1) + "\n")


def read(path: Path) -> Report:
    """A report from its file, checked."""
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise ArgumentError(
            "the file is not a report of an evaluation",
            got=f"{path.name}: {str(error).splitlines()[0]}",
            expected="JSON that fits schemas/evaluation.schema.json",
        ) from error
