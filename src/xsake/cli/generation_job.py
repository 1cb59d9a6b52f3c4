"""What `xsake generate` generates: prompts, options and attention functions."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xsake.cli.load import import_extra, load_candidate, parse_density
from xsake.errors import ArgumentError


def read_lines(texts: list[str] | None, files: list[Path] | None, path: Path | None) -> list[Any]:
    """Return the prompts of all options as `PromptLine`s.

    Args:
        texts: prompts.
        files: with one prompt each.
        path: of a .jsonl file.
    """
    prompt_file = import_extra("xsake.model.prompt_file")
    lines = [prompt_file.PromptLine(prompt=text) for text in texts or []]
    for file in files or []:
        try:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                "prompt-file",
                "the prompt cannot be read",
                got=f"{file}: {error}",
                expected="a UTF-8 text file",
                fix="pass the text with --prompt",
            ) from error
        lines.append(prompt_file.PromptLine(prompt=text))
    lines += prompt_file.read_prompts(path) if path is not None else ()
    if not lines:
        raise ArgumentError(
            "no-prompt", "no prompt", expected="--prompt, --prompt-file or --input",
            fix='add --prompt "Once upon a time"',
        )  # fmt: skip
    return lines


class AttentionChoice(NamedTuple):
    """Options that choose the attention functions."""

    mask: str | None
    plan: Path | None
    page_budget: str | None
    draft_tokens: int | None = None

    def load(self) -> dict[str, Any]:
        """Return arguments of `generate`: attention functions, and a draft."""
        from xsake.hads import PlanAttention, PlanDecoding
        from xsake.model import DenseAttention
        from xsake.model.speculation import Draft

        candidate = load_candidate(self.mask, self.plan)
        attend = DenseAttention() if candidate is None else candidate.attend
        if self.page_budget is None:
            if self.draft_tokens is not None:
                raise ArgumentError(
                    "draft-without-page-budget", "a draft needs a budget of pages",
                    got=f"--draft-tokens {self.draft_tokens}",
                    expected="--plan and --page-budget as well", fix="add --page-budget 20%",
                )  # fmt: skip
            return {"attend": attend}
        if not isinstance(attend, PlanAttention):
            raise ArgumentError(
                "page-budget-without-plan", "a budget of pages needs a plan",
                got=f"--page-budget {self.page_budget}", expected="--plan plan.json as well",
                fix="write a plan with `xsake calibrate`",
            )  # fmt: skip
        sparse = PlanDecoding(attend.plan, parse_density(self.page_budget))
        if self.draft_tokens is None:
            return {"attend": attend, "decode_attend": sparse}
        return {"attend": DenseAttention(), "draft": Draft(sparse, self.draft_tokens)}

    def describe(self) -> list[str | int | None]:
        """Return the options, with digests in the place of files."""
        mask, plan = self.mask, self.plan
        return [
            _digest(Path(mask).read_bytes()) if mask and mask.endswith(".json") else mask,
            None if plan is None else _digest(plan.read_bytes()),
            self.page_budget,
            *(() if self.draft_tokens is None else (self.draft_tokens,)),
        ]


@dataclasses.dataclass(frozen=True)
class GenerationJob:
    """Prompts, and all that their outputs depend on.

    Args:
        folder: of the checkpoint.
        lines: prompts as they were given.
        prompts: their tokens.
        tokenizer: of the checkpoint.
        options: `GenerationOptions`.
        choice: of the attention functions.
        attention: arguments of `generate` that choose attention.
        dtype: of weights and activations.
        batch_size: most prompts that are decoded together; outputs do not depend on it, up to
            rounding.
    """

    folder: Path
    lines: list[Any]
    prompts: list[Any]
    tokenizer: Any
    options: Any
    choice: AttentionChoice
    attention: dict[str, Any]
    dtype: str
    batch_size: int

    @classmethod
    def prepare(
        cls, folder: Path, lines: list[Any], given: dict[str, Any], choice: AttentionChoice, *,
        has_config: bool, opening: list[tuple[str, str]] | None, dtype: str, batch_size: int,
    ) -> "GenerationJob":  # fmt: skip
        """Read everything but the model.

        Args:
            folder: of the checkpoint.
            lines: prompts.
            given: options of generation.
            choice: of the attention functions.
            has_config: whether other options come from generation_config.json.
            opening: messages before a prompt that is a text; None: such a prompt is not a message.
            dtype: of weights and activations.
            batch_size: most prompts that are decoded together.
        """
        options_type = import_extra("xsake.model.generate").GenerationOptions
        from xsake.model.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder)
        given = given | {"end_ids": tokenizer.end_ids}
        make = (
            options_type.from_folder if has_config else lambda _, **options: options_type(**options)
        )
        return cls(
            folder, lines, _encode(lines, tokenizer, folder, opening), tokenizer,
            make(folder, **given), choice, choice.load(), dtype, batch_size,
        )  # fmt: skip

    def run(self, numbers: Sequence[int], **callbacks: Any) -> Any:
        """Generate the outputs of some lines.

        Args:
            numbers: of the lines.
            callbacks: of `generate`.
        """
        from xsake.model import generate
        from xsake.model.huggingface import load

        decoder = load(self.folder, compute_dtype=self.dtype, param_dtype=self.dtype).model
        return generate.generate(
            decoder, [self.prompts[number] for number in numbers], self.options, **self.attention,
            batch_size=self.batch_size, numbers=numbers, tokenizer=self.tokenizer, **callbacks,
        )  # fmt: skip

    def digest(self, **others: Any) -> str:
        """Return the digest of all that the outputs depend on.

        Args:
            others: that change the outputs' form.
        """
        from xsake.evaluation import identify

        parts = [
            identify(self.folder).digest, [line.id for line in self.lines],
            [prompt.tolist() for prompt in self.prompts], dataclasses.asdict(self.options),
            self.choice.describe(), self.dtype, others,
        ]  # fmt: skip
        return _digest(json.dumps(parts).encode())


def _encode(
    lines: list[Any], tokenizer: Any, folder: Path, opening: list[tuple[str, str]] | None
) -> list[Any]:
    """Return the tokens of all prompts; those of chats by the checkpoint's template."""
    from xsake.model.chat import ChatTemplate

    template, prompts = None, []
    for line in lines:
        messages = line.dialog
        if messages is None and opening is not None:
            messages = [*opening, ("user", line.prompt)]
        if messages is None:
            prompts.append(tokenizer.encode(line.prompt, add_special_tokens=True))
            continue
        template = template or ChatTemplate.load(folder)
        text = template.render([{"role": role, "content": content} for role, content in messages])
        prompts.append(tokenizer.encode(text))
    return prompts


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
