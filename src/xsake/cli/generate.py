"""`xsake generate`: its arguments, and text shown as it comes; the work is done elsewhere."""

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
_MASK = 'On top of the model\'s own attention, such as "window(1023, 0) | sinks(4)".'
_PLAN = "Prompts are read by a plan, as `xsake calibrate` makes it; new tokens look at everything."
_FILE = "Its text is a prompt, less the line break at its end; may be given several times."


def run_generate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to go on from; may be given several times.")
    ] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help=_FILE)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens added to a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest with this probability together.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens with this share of the likeliest's.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that were there become less likely.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same.")] = 0,
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights and activations.")
    ] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Let a model go on from a text, or from several at once.

    One prompt's text appears as it comes; several are printed when all are done. What is printed
    is new text only; figures go to stderr. Exit code 2 if the command cannot run, 130 after
    Ctrl-C, which prints what there is.
    """
    rules = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    console = rich.console.Console(stderr=True, quiet=as_json)
    screen = None
    try:
        prompts = _prompts(prompt, prompt_file)
        with console.status("loading and compiling") as status:
            task = _Task.of(model, prompts, rules, attend=_attend(mask, plan), dtype=dtype)
            screen = _Screen(task, status, streams=len(prompts) == 1 and not as_json)
            found = task.run(screen.show)
    except KeyboardInterrupt as stop:
        if screen is not None:
            screen.finish(as_json)
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(code=INTERRUPTED) from stop
    except XsakeError as error:
        echo(str(error), err=True)
        raise typer.Exit(code=CANNOT_RUN) from error
    screen.finish(as_json, found)
    console.print(_figures(found.timing), style="dim", highlight=False)


@dataclasses.dataclass(frozen=True)
class _Task:
    """A generation that is ready to run."""

    texts: list[str]
    prompts: list[Any]  # token ids
    tokenizer: Any
    model: Any
    options: Any
    attend: Any

    @classmethod
    def of(
        cls, folder: Path, texts: list[str], rules: dict[str, Any], *, attend: Any, dtype: str
    ) -> "_Task":
        generation = _library()
        from xsake.model.huggingface import load
        from xsake.model.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder)
        options = generation.GenerationOptions(**rules, end_ids=tokenizer.end_ids)
        prompts = [tokenizer.encode(text, adds_special=True) for text in texts]
        model = load(folder, compute_dtype=dtype, param_dtype=dtype).model
        return cls(texts, prompts, tokenizer, model, options, attend)

    def run(self, on_tokens) -> Any:
        return _library().generate(
            self.model, self.prompts, self.options, attend=self.attend, on_tokens=on_tokens
        )


def _attend(mask: str | None, plan: Path | None) -> Any:
    """How layers look at each other."""
    _library()
    from xsake.hads import Planned, SparsityPlan
    from xsake.masks.expression import parse
    from xsake.model import Dense, Masked

    if mask is not None and plan is not None:
        raise ArgumentError(
            "prompts are read by a mask or by a plan", got="--mask and --plan", fix="leave one out"
        )
    if plan is not None:
        return Planned(SparsityPlan.load(plan))
    return Dense() if mask is None else Masked(parse(mask))


class _Screen:
    """Shows the text of a single prompt as it comes, and remembers the tokens of all."""

    def __init__(self, task: _Task, status: rich.status.Status, *, streams: bool):
        self._task, self._status = task, status
        self._stream = task.tokenizer.streaming() if streams else None
        self._tokens: list[list[int]] = [[] for _ in task.texts]
        self._has_ended = [False] * len(task.texts)

    def show(self, new: tuple[int | None, ...]) -> None:
        """Take the new token of every row."""
        for row, token in enumerate(new):
            if token is None:
                self._has_ended[row] = True
            else:
                self._tokens[row].append(token)
        if self._stream is not None and new[0] is not None:
            self._status.stop()  # the spinner and the text would share a line
            _write(self._stream.push(new[0]))

    def finish(self, as_json: bool, found: Any = None) -> None:
        """Print what is not on the screen yet; `found` is None after an interruption."""
        self._status.stop()
        if as_json:
            echo(json.dumps(self._report(found), indent=1, ensure_ascii=False))
        elif self._stream is not None:
            _write(self._stream.finish() + "\n")
        else:
            for row, prompt in enumerate(self._task.texts):
                typer.secho(f"--- {row + 1}: {prompt[-60:]!r}", dim=True)
                _write(self._text(row) + "\n")

    def _text(self, row: int) -> str:
        return self._task.tokenizer.decode(self._tokens[row])

    def _report(self, found: Any) -> dict[str, Any]:
        rows = [
            {
                "prompt": self._task.texts[row],
                "text": self._text(row),
                "tokens": self._tokens[row],
                "logprobs": None if found is None else found.rows[row].logprobs,
                "finish": self._reason(row) if found is None else found.rows[row].finish,
            }
            for row in range(len(self._tokens))
        ]
        timing = None
        if found is not None:
            rate = {"tokens_per_second": found.timing.tokens_per_second}
            timing = dataclasses.asdict(found.timing) | rate
        return {"rows": rows, "timing": timing}

    def _reason(self, row: int) -> str:
        return "end" if self._has_ended[row] else "interrupted"


def _library() -> ModuleType:
    """What does the work, which needs more than the base install."""
    try:
        from xsake.model import generate
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models need more packages", got=error.name, fix='pip install "xsake[model]"'
        ) from error
    return generate


def _prompts(texts: list[str] | None, files: list[Path] | None) -> list[str]:
    found = list(texts or [])
    for path in files or []:
        try:
            found.append(path.read_text(encoding="utf-8").removesuffix("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                "the prompt cannot be read",
                got=f"{path}: {error}",
                expected="a UTF-8 text file",
                fix="give the text itself with --prompt",
            ) from error
    if not found:
        raise ArgumentError(
            "there is nothing to go on from",
            expected="--prompt or --prompt-file",
            fix='add --prompt "Once upon a time"',
        )
    return found


def _write(text: str) -> None:
    typer.echo(escape_controls(text, keep=PROSE) if _is_terminal() else text, nl=False)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _figures(timing: Any) -> str:
    rate = timing.tokens_per_second
    parts = [
        f"{timing.prompt_tokens} prompt tokens in {timing.prefill_seconds:.2f} s",
        "" if rate is None else f"then {rate:.1f} tokens/s",
        f"compiled in {timing.compile_seconds:.1f} s",
    ]
    return ", ".join(part for part in parts if part)
