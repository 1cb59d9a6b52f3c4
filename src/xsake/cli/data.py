"""`xsake data`: build and inspect tokenized datasets."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import rich.console
import typer

from xsake._io import require_local
from xsake.cli.aliases import App
from xsake.cli.exits import exit_codes
from xsake.cli.screen import ProgressBar, echo, escape_markup
from xsake.cli.subject import import_evaluation
from xsake.errors import ArgumentError

_TOKENIZER = "Folder of a Hugging Face checkpoint, or its tokenizer.json."
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; repeatable."
_TRAIN = "Train a byte-level BPE tokenizer with this vocabulary size on the texts."
_INVALID = "Documents that are not UTF-8 and lines without a text: stop, or skip them."

data_app = App(no_args_is_help=True)


@data_app.callback()
def about() -> None:
    """Build or inspect tokenized datasets."""


@data_app.command("build")
def build(
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder; new or empty.")],
    tokenizer: Annotated[Path | None, typer.Argument(help=_TOKENIZER, show_default=False)] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(help=_TRAIN, show_default=False, metavar="TOKENS")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard.")] = 2**26,
    validation: Annotated[str, typer.Option(help="Share of documents for validation.")] = "1%",
    end_token: Annotated[
        str | None, typer.Option(help="Appended to every document; default: the tokenizer's.")
    ] = None,
    invalid: Annotated[Literal["refuse", "skip"], typer.Option(help=_INVALID)] = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="Print the index as JSON.")] = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Delete an earlier build in the folder.")
    ] = False,
) -> None:
    """Tokenize texts into shards for training.

    Requires TOKENIZER or --train-tokenizer. Documents are assigned to a split by a hash of their
    text. An interrupted build resumes; the dataset is readable once the build is complete. Exit
    code 0 on success, 2 if the command cannot run, 130 after Ctrl-C.
    """
    console = rich.console.Console(quiet=as_json)
    started = time.monotonic()
    with exit_codes():
        require_local(*text, out, tokenizer)
        import_evaluation()
        from xsake.training import build_data as data

        source = _select_tokenizer(tokenizer, train_tokenizer)
        settings = data.BuildSettings(
            shard_tokens=shard_tokens,
            validation=_parse_fraction(validation),
            end_token=end_token,
            invalid=invalid,
        )
        with BuildProgressBar(console, "reading texts") as bar:
            built = data.build(
                source, text, out, settings, overwrite=no_resume, on_progress=bar.show
            )
    if as_json:
        echo(built.index.to_json())
        return
    echo("\n".join([*_format_summary(built.index), *_format_notes(built)]))
    if built.is_new:
        echo(f"{time.monotonic() - started:.0f} s; written to {out}")
    else:
        echo(f"Nothing to do: {out} already holds this dataset, and every file is valid.")


@data_app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="Folder written by `xsake data build`.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the digest of every file.")
    ] = False,
    window: Annotated[
        int | None, typer.Option(min=0, help="Print the text of this window.", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="With --window: its length in tokens.")] = 512,
    split: Annotated[
        Literal["train", "validation"], typer.Option(help="With --window: its split.")
    ] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print the index as JSON.")] = False,
) -> None:
    """Show the contents of a data folder, or the text of one of its windows.

    refused.json of a run lists the windows of skipped updates. Exit code 0, or 2 if the folder is
    incomplete.
    """
    with exit_codes(interrupted="Interrupted."):
        require_local(folder)
        import_evaluation()
        from xsake.training import data

        index = data.read_index(folder)
        if window is not None:
            echo(_decode_window(folder, window, context, split))
            return
        _verify_shards(folder, index, "full" if verify else "size")
    if as_json:
        echo(index.to_json())
        return
    lines = [
        *_format_summary(index),
        *_describe_skips(index),
        f"{'sources':<12}{_pluralize(len(index.sources), 'file')} of text",
    ]
    checked = "all digests match" if verify else "all files exist with the right size"
    echo("\n".join([*lines, f"{'checked':<12}{checked}"]))


def _select_tokenizer(tokenizer: Path | None, vocabulary: int | None) -> Any:
    from xsake.training import build_data as data

    if vocabulary is not None and tokenizer is None:
        return data.NewTokenizer(vocabulary)
    if tokenizer is not None and vocabulary is None:
        return tokenizer
    raise ArgumentError(
        "exactly one tokenizer source is required",
        got="both" if tokenizer else "none",
        expected="TOKENIZER or --train-tokenizer",
    )


def _parse_fraction(text: str) -> float:
    """Parse a fraction written as 1% or 0.01."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise ArgumentError("invalid --validation", got=text, expected="1% or 0.01") from error
    return round(number, 9)


def _verify_shards(folder: Path, index: Any, verify: Literal["full", "size"]) -> None:
    from xsake.training.data import (
        ITEMSIZE,
        SPLITS,
        require_intact,
        require_tokenizer,
        shard_path,
    )

    if verify == "full":
        require_tokenizer(folder, index)
    for name in SPLITS:
        for number, shard in enumerate(index.split(name).shards):
            path = shard_path(folder, name, number)
            require_intact(path, shard, ITEMSIZE[index.dtype], verify)


def _decode_window(
    folder: Path, window: int, context: int, split: Literal["train", "validation"]
) -> str:
    from xsake.model.tokenizer import Tokenizer
    from xsake.training import data

    windows = data.Windows(folder, context=context, split=split)
    if window >= len(windows):
        raise ArgumentError(
            "window index out of range",
            got=window,
            expected=f"0 to {len(windows) - 1} of {split} with a context of {context}",
        )
    tokens = windows.read(np.array([window], np.int64))[0]
    return Tokenizer.load(folder).decode(tokens, keep_special_tokens=True)


def _format_summary(index: Any) -> list[str]:
    lines = []
    for name in ("train", "validation"):
        split = index.split(name)
        numbers = f"{split.tokens:>15,} tokens, {_pluralize(split.documents, 'document')}"
        lines.append(f"{name:<12}{numbers}, {_pluralize(len(split.shards), 'file')}")
    tokenizer = index.tokenizer
    origin = "" if tokenizer.asked_vocabulary is None else ", trained on the train documents"
    end = f"{tokenizer.end_token} ({tokenizer.end_id}) ends documents"
    lines.append(f"{'tokenizer':<12}{tokenizer.vocabulary:>15,} tokens, {end}{origin}")
    return lines


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _describe_skips(index: Any) -> list[str]:
    """Report the number of skipped documents and the first of them."""
    if not index.skipped:
        return []
    documents = _pluralize(sum(file.documents for file in index.skipped), "invalid document")
    files = _pluralize(len(index.skipped), "file")
    return [f"{'skipped':<12}{documents} of {files}; {index.skipped[0].first}"]


def _format_notes(built: Any) -> list[str]:
    """Describe skipped documents, reused files and other deviations."""
    index, asked = built.index, built.index.tokenizer.asked_vocabulary
    notes = _describe_skips(index)
    if index.validation and not index.split("validation").documents:
        notes.append("The validation split is empty: too few documents.")
    if asked is not None and index.tokenizer.vocabulary < asked:
        notes.append(f"The texts are too short for a vocabulary of {asked:,} tokens.")
    if built.is_new and built.kept:
        notes.append(f"Verified and reused from an earlier run: {_pluralize(built.kept, 'file')}.")
    if built.rewritten:
        notes.append(
            f"Rewritten, damaged or after a damaged one: {_pluralize(built.rewritten, 'file')}."
        )
    return notes


class BuildProgressBar(ProgressBar):
    """Progress bar on a terminal; otherwise one line per file."""

    def show(self, progress: Any) -> None:
        """Show the current activity and the remaining time."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f", {left:.0f} s remaining"
        text = f"[dim]{escape_markup(progress.doing)}[/]"
        if progress.tokens:
            text = f"{progress.tokens:,} tokens{to_go} {text}"
        self.update(progress.done, progress.total or 1, text)
        if progress.finished is not None and not self.console.is_terminal:
            done = progress.finished
            line = f"{done.split} file {done.number + 1}: {done.shard.tokens:,} tokens"
            self.console.print(f"{line}[dim]{to_go}[/]", soft_wrap=True, highlight=False)
