"""Certificates: one file per target, one outcome per case, written atomically."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._schema import Frozen
from xsake.certify.case import CompileCase
from xsake.certify.family import CompileFacts
from xsake.errors import ArgumentError

Count = Annotated[int, Field(ge=0)]
Verdict = Literal["compiled", "refused", "crashed"]


class PassCost(Frozen):
    """Work of a pass, counted from its layout and shapes; not measured."""

    listed: Count = Field(description="blocks in the layout; the capacity if it is traced")
    computed: Count | None = Field(description="computed blocks; None if known at run time only")
    launches: Count = Field(description="kernel launches; a long list is split")
    steps: Count = Field(description="groups of blocks; an upper bound if traced")
    balance: float | None = Field(
        description="steps of the busiest core over their mean; None if traced"
    )
    flops: Count = Field(description="FLOPs of the matrix products")
    bytes_read: Count
    bytes_written: Count
    least_bytes: Count = Field(description="every argument and result once")


class TimeBound(Frozen):
    """Lower bound of the time on a device of this kind."""

    seconds: float = Field(ge=0)
    label: str = Field(description="description of the bound")


class CompileResult(Frozen):
    """Reply of the worker for a case."""

    verdict: Verdict
    message: str | None = Field(
        default=None, description="message of the compiler, or the end of the log after a crash"
    )
    facts: CompileFacts | None = None
    cost: PassCost | None = None


class Outcome(Frozen):
    """A case and its result."""

    case: CompileCase
    verdict: Verdict
    as_expected: bool
    message: str | None
    facts: CompileFacts | None
    cost: PassCost | None
    bound: TimeBound | None
    made_at: str = Field(description="UTC")
    commit: str | None
    dirty: bool | None
    source: str = Field(description="digest of the sources that were compiled")

    @property
    def commit_text(self) -> str:
        """Abbreviated commit, and whether there were uncommitted changes."""
        return f"{(self.commit or 'none')[:8]}{' with changes' if self.dirty else ''}"


class Certificate(Frozen):
    """Results of one vendor's compiler for one target. It never states a speed."""

    schema_version: Literal[2] = 2
    family: str
    target: str
    topology: str
    device_kind: str = Field(description="the compiler's name of the device")
    made_at: str = Field(description="UTC, of the newest outcome")
    command: str = Field(description="command of the newest outcome")
    figures: bool = Field(description="whether memory and schedule were recorded")
    versions: dict[str, str]
    host_processor: str = Field(description="CPU of the host that compiled")
    outcomes: list[Outcome] = []

    @property
    def file_name(self) -> str:
        """File name inside the folder of certificates."""
        return f"{self.family}_{self.target}.json"

    @property
    def unexpected(self) -> list[Outcome]:
        """Outcomes that are not as expected."""
        return [outcome for outcome in self.outcomes if not outcome.as_expected]

    @property
    def commits(self) -> list[str]:
        """Commits of the outcomes, oldest first."""
        by_time = sorted(self.outcomes, key=lambda outcome: outcome.made_at)
        return list(dict.fromkeys(outcome.commit_text for outcome in by_time))

    def is_compatible(self, other: "Certificate") -> bool:
        """Whether outcomes of `other` can be merged: same target, versions and figures."""
        same = ("family", "target", "topology", "device_kind", "figures", "versions")
        return all(getattr(self, name) == getattr(other, name) for name in same)


def is_as_expected(case: CompileCase, result: CompileResult) -> bool:
    """Whether a result is as expected; a control must be rejected for its expected reason."""
    if case.expects == "compiles":
        return result.verdict == "compiled"
    matches = re.search(case.because or "", result.message or "", re.IGNORECASE) is not None
    return result.verdict == "refused" and matches


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """Write the certificate of a target atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / certificate.file_name
    atomic_write(path, certificate.model_dump_json(indent=1) + "\n")
    return path


def read_certificate(path: Path) -> Certificate:
    """Read and validate a certificate."""
    try:
        return Certificate.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArgumentError(
            "The file is not a certificate.",
            got=f"{path.name}: {field}: {first['msg']}",
            expected="JSON that fits schemas/certificate.schema.json",
            fix="Remove the file, or run `xsake certify` with --no-resume.",
        ) from error


def read_certificates(folder: Path) -> list[Certificate]:
    """Read all certificates of a folder, sorted by file name."""
    return [read_certificate(path) for path in sorted(folder.glob("*.json"))]
