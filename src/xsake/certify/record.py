"""What a certificate says: one file per target, one outcome per case, written whole or not."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._schema import Frozen
from xsake.certify.case import Case
from xsake.certify.family import Facts
from xsake.errors import ArgumentError

Count = Annotated[int, Field(ge=0)]
Verdict = Literal["compiled", "refused", "crashed"]


class Cost(Frozen):
    """What the pass will do, counted from its layout and shapes; nothing is measured."""

    listed: Count = Field(description="blocks the layout lists, or at most lists if it is traced")
    computed: Count | None = Field(description="blocks computed; None if known at run time only")
    launches: Count = Field(description="kernel launches: a long list is split")
    steps: Count = Field(description="groups of blocks that the kernels take, at most if traced")
    balance: float | None = Field(
        description="steps of the busiest core over their mean; None if traced"
    )
    flops: Count = Field(description="of the matrix products")
    bytes_read: Count
    bytes_written: Count
    least_bytes: Count = Field(description="every argument and result once")


class Bound(Frozen):
    """No device of this kind can be faster; how much slower it is, nobody knows from this."""

    seconds: float = Field(ge=0)
    label: str = Field(description="what kind of number this is, in words")


class Answer(Frozen):
    """What the worker says about a case."""

    verdict: Verdict
    message: str | None = Field(
        default=None, description="the compiler's own words, or the last words of a crash"
    )
    facts: Facts | None = None
    cost: Cost | None = None


class Outcome(Frozen):
    """One case, and what came of it."""

    case: Case
    verdict: Verdict
    as_expected: bool
    message: str | None
    facts: Facts | None
    cost: Cost | None
    bound: Bound | None
    made_at: str = Field(description="UTC")
    commit: str | None
    dirty: bool | None
    source: str = Field(description="digest of the sources that were compiled")

    @property
    def commit_text(self) -> str:
        """The commit in few letters, and whether there were changes on top of it."""
        return f"{(self.commit or 'none')[:8]}{' with changes' if self.dirty else ''}"


class Certificate(Frozen):
    """What one vendor's compiler made of our kernels for one target. It never states a speed."""

    schema_version: Literal[2] = 2
    family: str
    target: str
    topology: str
    device_kind: str = Field(description="the compiler's own name for the device")
    made_at: str = Field(description="UTC, of the newest outcome")
    command: str = Field(description="that made the newest outcome")
    figures: bool = Field(description="whether the compiler was asked about memory and schedule")
    versions: dict[str, str]
    host_processor: str = Field(description="where the compiler ran; compile seconds are its own")
    outcomes: list[Outcome] = []

    @property
    def file_name(self) -> str:
        """Where it is kept, inside the folder of certificates."""
        return f"{self.family}_{self.target}.json"

    @property
    def surprises(self) -> list[Outcome]:
        """Outcomes that are not as expected."""
        return [outcome for outcome in self.outcomes if not outcome.as_expected]

    @property
    def commits(self) -> list[str]:
        """Commits that the outcomes were made at, the oldest first."""
        by_time = sorted(self.outcomes, key=lambda outcome: outcome.made_at)
        return list(dict.fromkeys(outcome.commit_text for outcome in by_time))

    def continues(self, other: "Certificate") -> bool:
        """Whether outcomes of `other` belong here too: same target, versions and question."""
        same = ("family", "target", "topology", "device_kind", "figures", "versions")
        return all(getattr(self, name) == getattr(other, name) for name in same)


def is_as_expected(case: Case, answer: Answer) -> bool:
    """A control counts only if it was refused for the reason that it was made for."""
    if case.expects == "compiles":
        return answer.verdict == "compiled"
    matches = re.search(case.because or "", answer.message or "", re.IGNORECASE) is not None
    return answer.verdict == "refused" and matches


def write(certificate: Certificate, folder: Path) -> Path:
    """Replace the file of this target in one step, so that a reader never sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / certificate.file_name
    atomic_write(path, certificate.model_dump_json(indent=1) + "\n")
    return path


def read(path: Path) -> Certificate:
    """A certificate from its file, checked."""
    try:
        return Certificate.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ArgumentError(
            "The file is not a certificate.",
            got=f"{path.name}: {place}: {first['msg']}",
            expected="JSON that fits schemas/certificate.schema.json",
            fix="Remove the file, or run `xsake certify` with --fresh.",
        ) from error


def read_all(folder: Path) -> list[Certificate]:
    """Every certificate of a folder, by file name."""
    return [read(path) for path in sorted(folder.glob("*.json"))]
