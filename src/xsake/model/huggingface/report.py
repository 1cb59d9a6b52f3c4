"""Load report: status of every tensor of a checkpoint."""

import dataclasses
import re
from typing import Literal, get_args

from xsake.errors import CheckpointError

Outcome = Literal["used", "ignored", "missing", "unexpected", "mis-shaped", "unreadable"]
MAX_LISTED = 10
_FIXES = {
    "missing": "complete the download, or use the original config.json; a head tied to the "
    "embedding requires tie_word_embeddings: true",
    "unexpected": "use the original config.json: it describes a model without them",
    "mis-shaped": "use config.json and tensors of the same model",
    "unreadable": "convert the tensors to F32, F16 or BF16; quantized weights are not supported",
}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Status of one tensor.

    Args:
        name: in the file.
        outcome: status.
        how: "as is", "reshaped", "transposed" or "split"; the reason if it is ignored.
        parameters: of the decoder that use it.
        dtype: in the file, as a safetensors name.
        actual: shape in the file; None if it is missing.
        expected: shape according to config.json; None if it is unexpected.
    """

    name: str
    outcome: Outcome
    how: str = ""
    parameters: tuple[str, ...] = ()
    dtype: str = ""
    actual: tuple[int, ...] | None = None
    expected: tuple[int, ...] | None = None

    @property
    def shape(self) -> str:
        """Actual shape, and the expected one if it differs."""
        actual = "nothing" if self.actual is None else f"{self.dtype} {list(self.actual)}"
        if self.expected is None or self.expected == self.actual:
            return actual
        return f"{actual}, expected {list(self.expected)}"


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Status of all actual and expected tensors of a checkpoint; printable.

    Args:
        family: of the names.
        lines: one per tensor.
    """

    family: str
    lines: tuple[TensorRecord, ...]

    def filter(self, *outcomes: Outcome) -> tuple[TensorRecord, ...]:
        """Return the tensors with one of these outcomes."""
        return tuple(line for line in self.lines if line.outcome in outcomes)

    def raise_on_errors(self) -> None:
        """Raise CheckpointError unless all tensors are used or ignored."""
        wrong = self.filter("missing", "unexpected", "mis-shaped", "unreadable")
        if not wrong:
            return
        listed = [f"{line.name} ({line.outcome}): {line.shape}" for line in wrong[:MAX_LISTED]]
        if len(wrong) > MAX_LISTED:
            listed.append(f"and {len(wrong) - MAX_LISTED} more")
        outcomes = dict.fromkeys(line.outcome for line in wrong)
        raise CheckpointError(
            f"tensors of the checkpoint do not match its config.json: {len(wrong)} of "
            f"{len(self.lines)}", got="\n            ".join(listed),
            expected=f"exactly the tensors and shapes of this {self.family} model",
            fix="; ".join(_FIXES[outcome] for outcome in outcomes),
        )  # fmt: skip

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(self.filter(outcome))} {outcome}"
            for outcome in get_args(Outcome)
            if self.filter(outcome) or outcome in ("used", "missing", "unexpected")
        )
        rows = [
            (line.outcome, name, line.shape, line.how, ", ".join(line.parameters))
            for name, line in self._group_layers()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        written = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"{self.family}: {counts} tensors", *written])

    def _group_layers(self) -> list[tuple[str, TensorRecord]]:
        """Group lines that differ only in the layer number."""
        groups: dict[TensorRecord, list[int]] = {}
        for line in self.lines:
            number = _LAYER.search(line.name)
            same = dataclasses.replace(line, name=_LAYER.sub("{}", line.name, count=1))
            groups.setdefault(same, []).extend([int(number[0])] if number else [])
        return [
            (line.name.replace("{}", _format_ranges(numbers), 1) if numbers else line.name, line)
            for line, numbers in groups.items()
        ]


def _format_ranges(numbers: list[int]) -> str:
    """Return {0..3,5} for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    parts = ["..".join(map(str, run)) for run in runs]
    return parts[0] if len(numbers) == 1 else "{" + ",".join(parts) + "}"
