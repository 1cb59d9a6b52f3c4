"""`xsake generate`: generate text from prompts."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import rich.console
import rich.status
import typer

from xsake.cli.screen import echo
from xsake.errors import PROSE, ArgumentError, MissingExtraError, XsakeError, escape_controls

CANNOT_RUN, INTERRUPTED = 2, 130  # exit codes
_MASK = 'Additional mask, such as "window(1023, 0) | sinks(4)".'
_PLAN = "Plan for prefill, written by `xsake calibrate`; decoding is dense."
_FILE = "File with one prompt; a trailing line break is removed; repeatable."


def run_generate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; repeatable.")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help=_FILE)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy decoding.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the nucleus with this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Minimum probability relative to the most likely token.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: penalize tokens that have occurred.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of weights and activations.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Generate text from one prompt, or from a batch of prompts.

    A single prompt is streamed; several are printed at the end. Only new text is printed; timing
    goes to stderr. Exit code 2 if the command cannot run, 130 after Ctrl-C, which prints the
    tokens so far.
    """
    options = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    console = rich.console.Console(stderr=True, quiet=as_json)
    printer = None
    try:
        prompts = _read_prompts(prompt, prompt_file)
        with console.status("loading and compiling") as status:
            attend = _build_attention(mask, plan)
            task = _GenerationTask.load(model, prompts, options, attend=attend, dtype=dtype)
            printer = _GenerationPrinter(task, status, streams=len(prompts) == 1 and not as_json)
            generated = task.run(printer.show)
    except KeyboardInterrupt as stop:
        if printer is not None:
            printer.finish(as_json)
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(code=INTERRUPTED) from stop
    except XsakeError as error:
        echo(str(error), err=True)
        raise typer.Exit(code=CANNOT_RUN) from error
    printer.finish(as_json, generated)
    console.print(_format_timing(generated.timing), style="dim", highlight=False)


@dataclasses.dataclass(frozen=True)
class _GenerationTask:
    """Loaded model, tokenizer and prompts of one generation."""

    texts: list[str]
    prompts: list[Any]  # token ids
    tokenizer: Any
    model: Any
    options: Any
    attend: Any

    @classmethod
    def load(
        cls, folder: Path, texts: list[str], settings: dict[str, Any], *, attend: Any, dtype: str
    ) -> "_GenerationTask":
        generation = _import_generate()
        from xsake.model.huggingface import load
        from xsake.model.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder)
        options = generation.GenerationOptions(**settings, end_ids=tokenizer.end_ids)
        prompts = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
        model = load(folder, compute_dtype=dtype, param_dtype=dtype).model
        return cls(texts, prompts, tokenizer, model, options, attend)

    def run(self, on_tokens) -> Any:
        return _import_generate().generate(
            self.model, self.prompts, self.options, attend=self.attend, on_tokens=on_tokens
        )


def _build_attention(mask: str | None, plan: Path | None) -> Any:
    """Return the attention used for prompts."""
    _import_generate()
    from xsake.hads import PlanAttention, SparsityPlan
    from xsake.masks.parser import parse
    from xsake.model import DenseAttention, MaskedAttention

    if mask is not None and plan is not None:
        raise ArgumentError("--mask and --plan exclude each other", got="both", fix="remove one")
    if plan is not None:
        return PlanAttention(SparsityPlan.load(plan))
    return DenseAttention() if mask is None else MaskedAttention(parse(mask))


class _GenerationPrinter:
    """Stream the text of a single prompt, and collect the tokens of all prompts."""

    def __init__(self, task: _GenerationTask, status: rich.status.Status, *, streams: bool):
        self._task, self._status = task, status
        self._stream = task.tokenizer.stream() if streams else None
        self._tokens: list[list[int]] = [[] for _ in task.texts]
        self._has_ended = [False] * len(task.texts)

    def show(self, new: tuple[int | None, ...]) -> None:
        """Add the new token of every row."""
        for row, token in enumerate(new):
            if token is None:
                self._has_ended[row] = True
            else:
                self._tokens[row].append(token)
        if self._stream is not None and new[0] is not None:
            self._status.stop()  # the spinner and the text would share a line
            _write(self._stream.push(new[0]))

    def finish(self, as_json: bool, generated: Any = None) -> None:
        """Print the remaining output; `generated` is None after an interruption."""
        self._status.stop()
        if as_json:
            echo(json.dumps(self._report(generated), indent=1, ensure_ascii=False))
        elif self._stream is not None:
            _write(self._stream.finish() + "\n")
        else:
            for row, prompt in enumerate(self._task.texts):
                typer.secho(f"--- {row + 1}: {prompt[-60:]!r}", dim=True)
                _write(self._text(row) + "\n")

    def _text(self, row: int) -> str:
        return self._task.tokenizer.decode(self._tokens[row])

    def _report(self, generated: Any) -> dict[str, Any]:
        rows = [
            {
                "prompt": self._task.texts[row],
                "text": self._text(row),
                "tokens": self._tokens[row],
                "logprobs": None if generated is None else generated.rows[row].logprobs,
                "finish": self._finish_reason(row, generated),
            }
            for row in range(len(self._tokens))
        ]
        timing = None
        if generated is not None:
            rate = {"tokens_per_second": generated.timing.tokens_per_second}
            timing = dataclasses.asdict(generated.timing) | rate
        return {"rows": rows, "timing": timing}

    def _finish_reason(self, row: int, generated: Any) -> str:
        if generated is not None:
            return generated.rows[row].finish
        return "end" if self._has_ended[row] else "interrupted"


def _import_generate() -> ModuleType:
    """Import `xsake.model.generate`, which needs the `model` extra."""
    try:
        from xsake.model import generate
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models need optional packages", got=error.name, fix='pip install "xsake[model]"'
        ) from error
    return generate


def _read_prompts(texts: list[str] | None, files: list[Path] | None) -> list[str]:
    prompts = list(texts or [])
    for path in files or []:
        try:
            prompts.append(path.read_text(encoding="utf-8").removesuffix("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                "the prompt cannot be read",
                got=f"{path}: {error}",
                expected="a UTF-8 text file",
                fix="pass the text with --prompt",
            ) from error
    if not prompts:
        raise ArgumentError(
            "no prompt",
            expected="--prompt or --prompt-file",
            fix='add --prompt "Once upon a time"',
        )
    return prompts


def _write(text: str) -> None:
    typer.echo(escape_controls(text, keep=PROSE) if _is_terminal() else text, nl=False)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _format_timing(timing: Any) -> str:
    rate = timing.tokens_per_second
    parts = [
        f"{timing.prompt_tokens} prompt tokens in {timing.prefill_seconds:.2f} s",
        "" if rate is None else f"then {rate:.1f} tokens/s",
        f"compiled in {timing.compile_seconds:.1f} s",
    ]
    return ", ".join(part for part in parts if part)
