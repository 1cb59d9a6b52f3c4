"""Cases, results and certificates: one file per target, one outcome per case."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from xsake._io import atomic_write
from xsake._schema import Frozen, describe_first
from xsake.errors import ArgumentError, XsakeError
from xsake.kernels.block_sparse.types import TileSizes

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
PassName = Literal[
    "forward", "dq", "dkv", "selected_forward", "selected_backward", "paged_decode"
]  # fmt: skip
Verdict = Literal["compiled", "refused", "crashed"]
MAX_CHARACTERS = 2000  # of a message
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class CertifyError(XsakeError, RuntimeError):
    """An environment cannot be built, or a worker does not start."""

    code = "XSK-601"


class CompileCase(Frozen):
    """A compile that must succeed, or a negative control that the compiler must reject.

    Batch is 1. At budget 1 the layout lists every causally visible block; below it budgets differ
    between heads, as in calibrated plans, and the budget is their mean.
    """

    name: str = Field(description="unique; `--cases` matches it as a shell pattern")
    pass_name: PassName = Field(
        description="dq and dkv are two passes of one gradient; selected: one block list per "
        "token; paged_decode: a list of pages per kv head"
    )
    shape: str = Field(description="model that the heads come from, or the purpose of a control")
    tokens: Positive
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    q_tokens: Positive | None = Field(
        default=None, description="queries of attention over pages; None: all tokens"
    )
    is_int8: bool = Field(default=False, description="pages hold int8, with a factor for each")
    budget: float = Field(gt=0, le=1, description="computed / causally visible blocks")
    block: Positive = Field(description="tokens per block, for queries and keys, or per page")
    traced: bool = Field(default=False, description="the block list is an argument of the call")
    seed: int = Field(default=0, description="seed of the block lists")
    slots: Positive | None = Field(
        default=None, description="blocks per token, or pages; None: one list per row of blocks"
    )
    tiles: TileSizes | None = Field(default=None, description="None: chosen by the kernel")
    constants: dict[str, int] = Field(
        default_factory=dict,
        description="module constants, by dotted name, that a control overrides",
    )
    expects: Literal["compiles", "refused"] = "compiles"
    because: str | None = Field(
        default=None,
        description="pattern that the compiler's message must match for a control",
    )


@dataclass(frozen=True)
class CompileFacts:
    """Figures of one compile as JSON types; None if the compiler does not report them.

    Args:
        compile_seconds: time of lowering and compiling on the host.
        temp_bytes: temporary device memory outside of the kernels.
        vmem_bytes: fast vector (or shared) memory of the kernel.
        smem_bytes: scalar memory of the kernel.
        spills: spill stores and loads in the final schedule, in bytes for GPUs; summed over
            kernels.
        bundles: instruction bundles of the largest kernel.
        loop_bundles: bundles of the body of a grid step.
        details: family-specific figures: registers, slots, ...
    """

    compile_seconds: float
    temp_bytes: int | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    spills: int | None = None
    bundles: int | None = None
    loop_bundles: int | None = None
    details: dict[str, int | float | str] = field(default_factory=dict)


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
        """Whether outcomes of `other` can be merged: same target, versions and figures.

        The version of XSAKE may differ: every outcome has the digest of its sources.
        """
        same = ("family", "target", "topology", "device_kind", "figures")
        compilers, others = (x.versions | {"xsake": ""} for x in (self, other))
        return compilers == others and all(getattr(self, x) == getattr(other, x) for x in same)


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
        raise ArgumentError(
            "certificate-file", "The file is not a certificate.",
            got=f"{path.name}: {describe_first(error)}",
            expected="JSON that fits schemas/certificate.schema.json",
            fix="Remove the file, or run `xsake certify` with --no-resume.",
        ) from error  # fmt: skip


def read_certificates(folder: Path) -> list[Certificate]:
    """Read all certificates of a folder, sorted by file name."""
    return [read_certificate(path) for path in sorted(folder.glob("*.json"))]


def sanitize(message: str, names: dict[str, str]) -> str:
    """Replace folders by names, remove colors and truncate the middle of a message.

    Args:
        message: compiler message.
        names: replacements by folder.

    Example:
        >>> sanitize("error in /somewhere/lib/x.py", {"/somewhere": "<environment>"})
        'error in <environment>/lib/x.py'
    """
    plain = _COLOURS.sub("", message).strip()
    replacements = names | {str(Path(__file__).parents[1]): "xsake", str(Path.home()): "~"}
    for folder in sorted(replacements, key=len, reverse=True):
        plain = plain.replace(folder, replacements[folder])
    if len(plain) <= MAX_CHARACTERS:
        return plain
    head, tail = plain[: MAX_CHARACTERS * 2 // 3], plain[-MAX_CHARACTERS // 3 :]
    return f"{head}\n[... {len(plain) - len(head) - len(tail)} characters omitted ...]\n{tail}"
