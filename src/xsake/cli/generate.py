"""`xsake generate`: generate text from prompts."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer

from xsake._progress import Progress
from xsake.cli.errors import RESUMABLE, exit_codes
from xsake.cli.generation_job import AttentionChoice, GenerationJob, read_lines
from xsake.cli.options import AsJson, ModelDtype, ModelFolder, NoResume
from xsake.cli.progress import ProgressBar, echo, escape_markup
from xsake.errors import PROSE, ArgumentError, escape_controls

_BATCH_SIZE = "Most prompts that are decoded together."
_CHAT = "Prompts are messages of a user: apply the checkpoint's chat template."
_CONFIG = "Take options that are not given from generation_config.json of the checkpoint."
_DRAFT = "Lossless: number of tokens that the plan drafts before dense attention verifies them."
_FILE = "File with one prompt; a trailing line break is removed; repeatable."
_INPUT = 'Prompts: a .jsonl file with {"prompt": ...} or {"messages": [...]} in each line.'
_LOGPROBS = "Write log-probabilities to --output."
_MASK = 'Additional mask, such as "window(1023, 0) | sinks(4)".'
_MAX_NEW_TOKENS = "Maximum number of new tokens. Default: 128."
_MIN_P = "Minimum probability relative to the most likely token."
_OUTPUT = "Write outputs of --input to this .jsonl file; a run that was interrupted resumes."
_PAGE_BUDGET = "Share of the KV pages that decoding reads by the plan, such as 25%; else all."
_PENALTY = "Above 1: penalize tokens that have occurred."
_PLAN = "Plan for prefill, written by `xsake calibrate`."
_STOP = "Text that ends the output; repeatable."
_SYSTEM = "System message of --chat."
_TEMPERATURE = "0: greedy decoding. Default: 0.8."
_TOP_P = "Sample from the nucleus with this probability."


def run_generate(
    model: ModelFolder,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; repeatable.")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help=_FILE)] = None,
    input: Annotated[Path | None, typer.Option(help=_INPUT)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT)] = None,
    chat: Annotated[bool, typer.Option("--chat", help=_CHAT)] = False,
    system: Annotated[str | None, typer.Option(help=_SYSTEM)] = None,
    generation_config: Annotated[bool, typer.Option("--generation-config", help=_CONFIG)] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help=_MAX_NEW_TOKENS)] = None,
    temperature: Annotated[float | None, typer.Option(help=_TEMPERATURE)] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help=_TOP_P)] = None,
    min_p: Annotated[float | None, typer.Option(help=_MIN_P)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help=_PENALTY)] = None,
    stop: Annotated[list[str] | None, typer.Option(help=_STOP)] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help=_BATCH_SIZE)] = 8,
    logprobs: Annotated[bool, typer.Option("--logprobs", help=_LOGPROBS)] = False,
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    page_budget: Annotated[str | None, typer.Option(help=_PAGE_BUDGET)] = None,
    draft_tokens: Annotated[int | None, typer.Option(min=1, help=_DRAFT)] = None,
    dtype: ModelDtype = "float32",
    as_json: AsJson = False,
    no_resume: NoResume = False,
) -> None:
    """Generate text from prompts.

    A single prompt is streamed; several are printed at the end. Only new text is printed; timing
    goes to stderr. With --input and --output, each output is written as it ends, and the file is
    in order at the end. Exit code 2 if the command cannot run, 130 after Ctrl-C, which prints the
    tokens so far.
    """
    console = rich.console.Console(stderr=True, quiet=as_json)
    given = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
        "stop": tuple(stop) if stop else None, "seed": seed,
    }  # fmt: skip
    with exit_codes(interrupted="Interrupted." if output is None else RESUMABLE):
        _check_flags(input, output, chat=chat, system=system, logprobs=logprobs)
        opening = None if not chat else [("system", system)] if system is not None else []
        job = GenerationJob.prepare(
            model, read_lines(prompt, prompt_file, input),
            {name: value for name, value in given.items() if value is not None},
            AttentionChoice(mask, plan, page_budget, draft_tokens),
            has_config=generation_config, opening=opening, dtype=dtype, batch_size=batch_size,
        )  # fmt: skip
        if output is None:
            timing = _print_outputs(job, console, as_json=as_json)
        else:
            timing = _write_outputs(
                job, output, console, has_logprobs=logprobs, overwrite=no_resume
            )
    if timing is not None:
        console.print(_format_timing(timing), style="dim", highlight=False)


def _check_flags(
    source: Path | None, output: Path | None, *, chat: bool, system: str | None, logprobs: bool
) -> None:
    for option, is_given, needed, is_there in (
        ("--system", system is not None, "--chat", chat),
        ("--logprobs", logprobs, "--output", output is not None),
    ):
        if is_given and not is_there:
            raise ArgumentError(
                "option-alone", f"{option} needs {needed}", got=f"{option} without {needed}",
                fix=f"add {needed}",
            )  # fmt: skip
    if source is not None and output is not None and source.resolve() == output.resolve():
        raise ArgumentError(
            "output-is-input", "--output is the file of --input", got=output,
            fix="choose another --output",
        )  # fmt: skip


def _print_outputs(job: GenerationJob, console: rich.console.Console, *, as_json: bool) -> Any:
    """Print the outputs of all prompts; return the timing."""
    with console.status("loading and compiling") as status:
        printer = _Printer(job, status.stop, as_json=as_json)
        try:
            result = job.run(
                range(len(job.lines)), on_token=printer.add_token, on_text=printer.add_text,
                on_finish=printer.add_row,
            )  # fmt: skip
        except KeyboardInterrupt:
            printer.finish(None)
            raise
    printer.finish(result.timing)
    return result.timing


def _write_outputs(
    job: GenerationJob, path: Path, console: rich.console.Console, *, has_logprobs: bool,
    overwrite: bool,
) -> Any:  # fmt: skip
    """Write the outputs that the file does not have; return the timing, None without any."""
    from xsake.model.prompt_file import OutputFile, OutputLine

    digest, total = job.digest(logprobs=has_logprobs), len(job.lines)
    file = OutputFile(path, digest, total, overwrite=overwrite)
    missing, started, timing = file.missing, time.monotonic(), None

    def write(number: int, row: Any) -> None:
        file.add(
            OutputLine(
                index=number, id=job.lines[number].id, text=row.text, tokens=row.tokens,
                logprobs=row.logprobs if has_logprobs else None, finish=row.finish, job=digest,
            )
        )  # fmt: skip
        left, seconds = total - len(file), time.monotonic() - started
        remaining = seconds / (len(missing) - left) * left
        label = f"{len(row.tokens)} tokens, {row.finish}"
        bar.show(Progress(total - left, total, label, True, seconds, remaining))

    with ProgressBar(console, "loading and compiling", item="prompt") as bar:
        if missing:
            timing = job.run(missing, on_finish=write).timing
    file.finish()
    kept = total - len(missing)
    earlier = f", {kept} of an earlier run" if kept else ""
    console.print(f"{total} outputs{earlier}; written to {escape_markup(path)}", soft_wrap=True)
    return timing


class _Printer:
    """Stream the text of a single prompt, and collect the outputs of all prompts."""

    def __init__(self, job: GenerationJob, stop_spinner: Any, *, as_json: bool):
        self._prompts = [line.content for line in job.lines]
        self._stop_spinner, self._as_json = stop_spinner, as_json
        self._is_streaming = len(self._prompts) == 1 and not as_json
        self._tokens: list[list[int]] = [[] for _ in self._prompts]
        self._texts = [""] * len(self._prompts)
        self._rows: dict[int, Any] = {}

    def add_token(self, row: int, token: int | None) -> None:
        """Add the new token of a row; None: the row has ended."""
        if token is not None:
            self._tokens[row].append(token)

    def add_text(self, row: int, text: str) -> None:
        """Add new text of a row."""
        self._texts[row] += text
        if self._is_streaming:
            self._stop_spinner()  # the spinner and the text would share a line
            _write(text)

    def add_row(self, row: int, output: Any) -> None:
        """Add the output of a row that has ended."""
        self._rows[row] = output

    def finish(self, timing: Any) -> None:
        """Print the remaining output; `timing` is None after an interruption."""
        self._stop_spinner()
        if self._as_json:
            rows = [self._report(row) for row in range(len(self._prompts))]
            rate = {} if timing is None else {"tokens_per_second": timing.tokens_per_second}
            report = {"rows": rows, "timing": timing and dataclasses.asdict(timing) | rate}
            echo(json.dumps(report, indent=1, ensure_ascii=False))
        elif self._is_streaming:
            _write("\n")
        else:
            for row, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True)):
                typer.secho(f"--- {row + 1}: {prompt[-60:]!r}", dim=True)
                _write(text + "\n")

    def _report(self, row: int) -> dict[str, Any]:
        ended = self._rows.get(row)
        return {
            "prompt": self._prompts[row],
            "text": self._texts[row],
            "tokens": self._tokens[row],
            "logprobs": None if ended is None else ended.logprobs,
            "finish": "interrupted" if ended is None else ended.finish,
        }


def _write(text: str) -> None:
    typer.echo(escape_controls(text, keep=PROSE) if _is_terminal() else text, nl=False)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _format_timing(timing: Any) -> str:
    rate = timing.tokens_per_second
    parts = [
        f"{timing.prompt_tokens} prompt tokens in {timing.prefill_seconds:.2f} s",
        "" if rate is None else f"then {rate:.1f} tokens/s",
        f"{timing.accepted_tokens} of {timing.drafted_tokens} drafted tokens accepted"
        if timing.drafted_tokens
        else "",
        f"compiled in {timing.compile_seconds:.1f} s",
    ]
    return ", ".join(part for part in parts if part)
