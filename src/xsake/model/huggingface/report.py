"""What became of every tensor of a checkpoint: used and how, missing, unexpected, set aside."""

import dataclasses
import re
from typing import Literal

from xsake.errors import CheckpointError

Outcome = Literal["used", "set aside", "missing", "unexpected", "mis-shaped", "unreadable"]
SHOWN = 10
_FIXES = {
    "missing": "finish the download, or take config.json from the checkpoint itself; a head that "
    "is the embedding again needs tie_word_embeddings: true",
    "unexpected": "take config.json from the checkpoint itself: it describes a model without them",
    "mis-shaped": "take config.json and the tensors from the same model",
    "unreadable": "convert the tensors to F32, F16 or BF16; quantised weights are not supported",
}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class TensorLine:
    """One tensor.

    Args:
        name: in the file.
        outcome: what became of it.
        how: "as is", "reshaped", "transposed" or "split"; why, if it is set aside.
        parameters: of the decoder, that it was used for.
        dtype: in the file, as safetensors spells it.
        found: its shape in the file, None if it is not there.
        expected: its shape according to config.json, None if nothing was expected.
    """

    name: str
    outcome: Outcome
    how: str = ""
    parameters: tuple[str, ...] = ()
    dtype: str = ""
    found: tuple[int, ...] | None = None
    expected: tuple[int, ...] | None = None

    @property
    def shape(self) -> str:
        """What is there, and what should be where that differs."""
        found = "nothing" if self.found is None else f"{self.dtype} {list(self.found)}"
        if self.expected is None or self.expected == self.found:
            return found
        return f"{found}, expected {list(self.expected)}"


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Every tensor that a checkpoint has or should have; `print` it.

    Args:
        family: whose names they are.
        lines: one for each tensor.
    """

    family: str
    lines: tuple[TensorLine, ...]

    def of(self, *outcomes: Outcome) -> tuple[TensorLine, ...]:
        """The tensors that met with these outcomes."""
        return tuple(line for line in self.lines if line.outcome in outcomes)

    def raise_problems(self) -> None:
        """Refuse the checkpoint unless all its tensors are used or known to be harmless."""
        wrong = self.of("missing", "unexpected", "mis-shaped", "unreadable")
        if not wrong:
            return
        listed = [f"{line.name} ({line.outcome}): {line.shape}" for line in wrong[:SHOWN]]
        if len(wrong) > SHOWN:
            listed.append(f"and {len(wrong) - SHOWN} more")
        outcomes = dict.fromkeys(line.outcome for line in wrong)
        raise CheckpointError(
            f"tensors of the checkpoint do not fit its config.json: {len(wrong)} of "
            f"{len(self.lines)}",
            got="\n            ".join(listed),
            expected=f"exactly the tensors of this {self.family} model, in its shapes",
            fix="; ".join(_FIXES[outcome] for outcome in outcomes),
        )

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(self.of(outcome))} {outcome}"
            for outcome in (
                "used",
                "set aside",
                "missing",
                "unexpected",
                "mis-shaped",
                "unreadable",
            )
            if self.of(outcome) or outcome in ("used", "missing", "unexpected")
        )
        rows = [
            (line.outcome, name, line.shape, line.how, ", ".join(line.parameters))
            for name, line in self._grouped()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        written = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.family}: {counts} tensors", *written])

    def _grouped(self) -> list[tuple[str, TensorLine]]:
        """Lines that differ in nothing but the layer's number, together."""
        groups: dict[TensorLine, list[int]] = {}
        for line in self.lines:
            number = _LAYER.search(line.name)
            same = dataclasses.replace(line, name=_LAYER.sub("{}", line.name, count=1))
            groups.setdefault(same, []).extend([int(number[0])] if number else [])
        return [
            (line.name.replace("{}", _ranges(numbers), 1) if numbers else line.name, line)
            for line, numbers in groups.items()
        ]


def _ranges(numbers: list[int]) -> str:
    """{0..3,5} for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    words = ["..".join(map(str, run)) for run in runs]
    return words[0] if len(numbers) == 1 else "{" + ",".join(words) + "}"
