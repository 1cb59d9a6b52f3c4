"""`xsake data`: build and inspect tokenized datasets."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import rich.console
import typer

from xsake._io import require_local
from xsake._progress import Progress
from xsake.cli.errors import exit_codes
from xsake.cli.load import import_extra, parse_density
from xsake.cli.options import App, AsJson, TextFiles
from xsake.cli.progress import ProgressBar, echo
from xsake.errors import ArgumentError

_TOKENIZER = "Folder of a Hugging Face checkpoint, or its tokenizer.json."
_TRAIN = "Train a byte-level BPE tokenizer with this vocabulary size on the texts."
_END = "Appended to every document; default: the tokenizer's."
_INVALID = "Documents that are not UTF-8 and lines without a text: stop, or skip them."

data_app = App(no_args_is_help=True, help="Build or inspect tokenized datasets.")


@data_app.command("build")
def build(
    text: TextFiles,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder; new or empty.")],
    tokenizer: Annotated[Path | None, typer.Argument(help=_TOKENIZER, show_default=False)] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(help=_TRAIN, show_default=False, metavar="TOKENS")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard.")] = 2**26,
    validation: Annotated[str, typer.Option(help="Share of documents for validation.")] = "1%",
    end_token: Annotated[str | None, typer.Option(help=_END)] = None,
    invalid: Annotated[Literal["refuse", "skip"], typer.Option(help=_INVALID)] = "refuse",
    as_json: AsJson = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Delete an earlier build in the folder.")
    ] = False,
) -> None:
    """Tokenize texts into shards for training.

    Requires TOKENIZER or --train-tokenizer. Documents are assigned to a split by a hash of their
    text. An interrupted build resumes; the dataset is readable once the build is complete. Exit
    code 0 on success, 2 if the command cannot run, 130 after Ctrl-C.
    """
    started = time.monotonic()
    with exit_codes():
        require_local(*text, out, tokenizer)
        data = import_extra("xsake.training.build_data")
        if (tokenizer is None) == (train_tokenizer is None):
            raise ArgumentError(
                "tokenizer-source",
                "exactly one tokenizer source is required",
                got="both" if tokenizer else "none",
                expected="TOKENIZER or --train-tokenizer",
            )
        source = tokenizer or data.NewTokenizer(train_tokenizer)
        settings = data.BuildSettings(
            shard_tokens=shard_tokens,
            validation=parse_density(validation, "--validation"),
            end_token=end_token,
            invalid=invalid,
        )
        with ProgressBar(rich.console.Console(quiet=as_json), "reading texts") as bar:
            show = lambda event: _show_progress(bar, event)
            built = data.build(source, text, out, settings, overwrite=no_resume, on_progress=show)
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
    as_json: AsJson = False,
) -> None:
    """Show the contents of a data folder, or the text of one of its windows.

    refused.json of a run lists the windows of skipped updates. Exit code 0, or 2 if the folder is
    incomplete.
    """
    with exit_codes(interrupted="Interrupted."):
        require_local(folder)
        index = import_extra("xsake.training.data").read_index(folder)
        if window is not None:
            echo(_decode_window(folder, window, context, split))
            return
        _verify_shards(folder, index, "full" if verify else "size")
    if as_json:
        echo(index.to_json())
        return
    sources = f"{'sources':<12}{_pluralize(len(index.sources), 'file')} of text"
    checked = "all digests match" if verify else "all files exist with the right size"
    lines = *_format_summary(index), *_format_skips(index), sources, f"{'checked':<12}{checked}"
    echo("\n".join(lines))


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


def _decode_window(folder: Path, window: int, context: int, split: Any) -> str:
    from xsake.model.tokenizer import Tokenizer
    from xsake.training.data import Windows

    windows = Windows(folder, context=context, split=split)
    if window >= len(windows):
        raise ArgumentError(
            "window-index",
            "window index out of range",
            got=window,
            expected=f"0 to {len(windows) - 1} of {split} with a context of {context}",
        )
    tokens = windows.read(np.array([window], np.int64))[0]
    return Tokenizer.load(folder).decode(tokens, keep_special_tokens=True)


def _show_progress(bar: ProgressBar, event: Any) -> None:
    """Show the current activity; without a terminal print one line per finished shard."""
    left, shard = event.remaining_seconds, event.finished
    label = f"{event.tokens:,} tokens, {event.doing}" if event.tokens else event.doing
    bar.update(Progress(event.done, event.total or 1, label, remaining_seconds=left))
    if shard is not None and not bar.console.is_terminal:
        to_go = "" if left is None else f", {left:.0f} s remaining"
        line = f"{shard.split} file {shard.number + 1}: {shard.shard.tokens:,} tokens{to_go}"
        bar.console.print(line, soft_wrap=True, highlight=False)


def _format_summary(index: Any) -> list[str]:
    lines = []
    for name in ("train", "validation"):
        split = index.split(name)
        numbers = f"{split.tokens:>15,} tokens, {_pluralize(split.documents, 'document')}"
        lines.append(f"{name:<12}{numbers}, {_pluralize(len(split.shards), 'file')}")
    tokenizer = index.tokenizer
    origin = "" if tokenizer.asked_vocabulary is None else ", trained on the train documents"
    end = f"{tokenizer.end_token} ({tokenizer.end_id}) ends documents"
    return [*lines, f"{'tokenizer':<12}{tokenizer.vocabulary:>15,} tokens, {end}{origin}"]


def _format_skips(index: Any) -> list[str]:
    if not index.skipped:
        return []
    documents = _pluralize(sum(file.documents for file in index.skipped), "invalid document")
    files = _pluralize(len(index.skipped), "file")
    return [f"{'skipped':<12}{documents} of {files}; {index.skipped[0].first}"]


def _format_notes(built: Any) -> list[str]:
    """Describe skipped documents, reused files and other deviations."""
    index, asked = built.index, built.index.tokenizer.asked_vocabulary
    notes = _format_skips(index)
    if index.validation and not index.split("validation").documents:
        notes.append("The validation split is empty: too few documents.")
    if asked is not None and index.tokenizer.vocabulary < asked:
        notes.append(f"The texts are too short for a vocabulary of {asked:,} tokens.")
    if built.is_new and built.kept:
        notes.append(f"Verified and reused from an earlier run: {_pluralize(built.kept, 'file')}.")
    if built.rewritten:
        files = _pluralize(built.rewritten, "file")
        notes.append(f"Rewritten, damaged or after a damaged one: {files}.")
    return notes


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
