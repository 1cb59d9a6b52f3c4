"""`xsake generate`: generate text from prompts."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer

from xsake.cli.errors import exit_codes
from xsake.cli.load import import_extra, load_candidate, parse_density
from xsake.cli.options import AsJson, ModelDtype, ModelFolder
from xsake.cli.progress import echo
from xsake.errors import PROSE, ArgumentError, escape_controls

_FILE = "File with one prompt; a trailing line break is removed; repeatable."
_MASK = 'Additional mask, such as "window(1023, 0) | sinks(4)".'
_MIN_P = "Minimum probability relative to the most likely token."
_PAGE_BUDGET = "Share of the KV pages that decoding reads by the plan, such as 25%; else all."
_PLAN = "Plan for prefill, written by `xsake calibrate`."
_TOP_P = "Sample from the nucleus with this probability."


def run_generate(
    model: ModelFolder,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt; repeatable.")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help=_FILE)] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy decoding.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help=_TOP_P)] = None,
    min_p: Annotated[float | None, typer.Option(help=_MIN_P)] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: penalize tokens that have occurred.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    mask: Annotated[str | None, typer.Option(help=_MASK)] = None,
    plan: Annotated[Path | None, typer.Option(help=_PLAN)] = None,
    page_budget: Annotated[str | None, typer.Option(help=_PAGE_BUDGET)] = None,
    dtype: ModelDtype = "float32",
    as_json: AsJson = False,
) -> None:
    """Generate text from one prompt, or from a batch of prompts.

    A single prompt is streamed; several are printed at the end. Only new text is printed; timing
    goes to stderr. Exit code 2 if the command cannot run, 130 after Ctrl-C, which prints the
    tokens so far.
    """
    console = rich.console.Console(stderr=True, quiet=as_json)
    with exit_codes(interrupted="Interrupted."):
        texts = _read_prompts(prompt, prompt_file)
        generation = import_extra("xsake.model.generate")
        from xsake.model import DenseAttention
        from xsake.model.huggingface import load
        from xsake.model.tokenizer import Tokenizer

        with console.status("loading and compiling") as status:
            candidate = load_candidate(mask, plan)
            tokenizer = Tokenizer.load(model)
            options = generation.GenerationOptions(
                max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                min_p=min_p, repetition_penalty=repetition_penalty, seed=seed,
                end_ids=tokenizer.end_ids,
            )  # fmt: skip
            prompts = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
            decoder = load(model, compute_dtype=dtype, param_dtype=dtype).model
            printer = _Printer(texts, tokenizer, status.stop, as_json=as_json)
            attend = DenseAttention() if candidate is None else candidate.attend
            decode_attend = _plan_decoding(attend, page_budget)
            try:
                result = generation.generate(
                    decoder, prompts, options, attend=attend, decode_attend=decode_attend,
                    on_token=printer.add,
                )  # fmt: skip
            except KeyboardInterrupt:
                printer.finish(None)
                raise
    printer.finish(result)
    console.print(_format_timing(result.timing), style="dim", highlight=False)


def _plan_decoding(attend: Any, budget: str | None) -> Any:
    """Return the attention function of decoding by the plan of prefill; None: as prefill."""
    from xsake.hads import PlanAttention, PlanDecoding

    if budget is None:
        return None
    if not isinstance(attend, PlanAttention):
        raise ArgumentError(
            "page-budget-without-plan", "a budget of pages needs a plan",
            got=f"--page-budget {budget}", expected="--plan plan.json as well",
            fix="write a plan with `xsake calibrate`",
        )  # fmt: skip
    return PlanDecoding(attend.plan, parse_density(budget))


def _read_prompts(texts: list[str] | None, files: list[Path] | None) -> list[str]:
    prompts = list(texts or [])
    for path in files or []:
        try:
            prompts.append(path.read_text(encoding="utf-8").removesuffix("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(
                "prompt-file",
                "the prompt cannot be read",
                got=f"{path}: {error}",
                expected="a UTF-8 text file",
                fix="pass the text with --prompt",
            ) from error
    if not prompts:
        fix = 'add --prompt "Once upon a time"'
        raise ArgumentError("no-prompt", "no prompt", expected="--prompt or --prompt-file", fix=fix)
    return prompts


class _Printer:
    """Stream the text of a single prompt, and collect the tokens of all prompts."""

    def __init__(self, texts: list[str], tokenizer: Any, stop_spinner: Any, *, as_json: bool):
        self._texts, self._tokenizer, self._stop_spinner = texts, tokenizer, stop_spinner
        self._as_json = as_json
        self._stream = tokenizer.stream() if len(texts) == 1 and not as_json else None
        self._tokens: list[list[int]] = [[] for _ in texts]
        self._has_ended = [False] * len(texts)

    def add(self, row: int, token: int | None) -> None:
        """Add the new token of a row; None: the row has ended."""
        if token is None:
            self._has_ended[row] = True
            return
        self._tokens[row].append(token)
        if self._stream is not None:
            self._stop_spinner()  # the spinner and the text would share a line
            _write(self._stream.push(token))

    def finish(self, result: Any) -> None:
        """Print the remaining output; `result` is None after an interruption."""
        self._stop_spinner()
        texts = [self._tokenizer.decode(tokens) for tokens in self._tokens]
        if self._as_json:
            echo(json.dumps(self._report(texts, result), indent=1, ensure_ascii=False))
        elif self._stream is not None:
            _write(self._stream.finish() + "\n")
        else:
            for row, (prompt, text) in enumerate(zip(self._texts, texts, strict=True)):
                typer.secho(f"--- {row + 1}: {prompt[-60:]!r}", dim=True)
                _write(text + "\n")

    def _report(self, texts: list[str], result: Any) -> dict[str, Any]:
        if result is None:
            ends = [(None, "end" if ended else "interrupted") for ended in self._has_ended]
            timing = None
        else:
            ends = [(row.logprobs, row.finish) for row in result.rows]
            rate = {"tokens_per_second": result.timing.tokens_per_second}
            timing = dataclasses.asdict(result.timing) | rate
        columns = zip(self._texts, texts, self._tokens, ends, strict=True)
        names = "prompt", "text", "tokens", "logprobs", "finish"
        rows = [
            dict(zip(names, (prompt, text, tokens, *end), strict=True))
            for prompt, text, tokens, end in columns
        ]
        return {"rows": rows, "timing": timing}


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
