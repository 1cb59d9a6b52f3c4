"""`xsake data`: builds files of tokens for training, and shows them; the work is done elsewhere."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import rich.console
import typer

from xsake._io import require_local
from xsake.cli.exits import exit_codes
from xsake.cli.screen import MovingLine, echo, escape_markup
from xsake.cli.subject import evaluation_library
from xsake.errors import ArgumentError

_TOKENIZER = "Folder of a Hugging Face checkpoint, or its tokenizer.json."
_TEXT = "A .txt, .raw or .jsonl file, or a folder of .txt files; may be given several times."
_TRAIN = "Train a byte-level BPE tokenizer of so many tokens on the texts, and use it."
_INVALID = "A document that is not UTF-8, or a line without a text: stop, or leave it out."

data_app = typer.Typer(no_args_is_help=True)


@data_app.callback()
def about() -> None:
    """Make tokens of texts for training, or show what was made."""


@data_app.command("build")
def build(
    text: Annotated[list[Path], typer.Option(help=_TEXT)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the data; new or empty.")],
    tokenizer: Annotated[Path | None, typer.Argument(help=_TOKENIZER, show_default=False)] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(help=_TRAIN, show_default=False, metavar="TOKENS")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a file.")] = 2**26,
    validation: Annotated[str, typer.Option(help="Share of documents kept for it.")] = "1%",
    end_token: Annotated[
        str | None, typer.Option(help="Stands after every document; default: the tokenizer's.")
    ] = None,
    invalid: Annotated[Literal["refuse", "skip"], typer.Option(help=_INVALID)] = "refuse",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the index and nothing else.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace what an earlier build has left in the folder.")
    ] = False,
) -> None:
    """Make tokens of texts, as training reads them.

    Give a TOKENIZER, or --train-tokenizer. Documents are split by a hash of their text, so that
    the same text is always on the same side. An interrupted build goes on where it stopped, and
    nothing can be read before all is done. Exit code 0 if all is done, 2 if the command cannot
    run, 130 after Ctrl-C.
    """
    console = rich.console.Console(quiet=as_json)
    started = time.monotonic()
    with exit_codes():
        require_local(*text, out, tokenizer)
        evaluation_library()
        from xsake.training import data

        source = _source(tokenizer, train_tokenizer)
        settings = data.Settings(
            shard_tokens=shard_tokens,
            validation=_share(validation),
            end_token=end_token,
            invalid=invalid,
        )
        with _Screen(console, "reading texts") as screen:
            built = data.build(source, text, out, settings, fresh=fresh, watch=screen.show)
    if as_json:
        echo(built.index.to_json())
        return
    echo("\n".join([*_summary(built.index), *_notes(built)]))
    if built.is_new:
        echo(f"{time.monotonic() - started:.0f} s; written to {out}")
    else:
        echo(f"Nothing to do: {out} holds this data, and every file is sound.")


@data_app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A folder that `xsake data build` made.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file, and compare its digest.")
    ] = False,
    window: Annotated[
        int | None, typer.Option(min=0, help="Print the text of this window.", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="With --window: its tokens.")] = 512,
    split: Annotated[
        Literal["train", "validation"], typer.Option(help="With --window: of which part.")
    ] = "train",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the index and nothing else.")
    ] = False,
) -> None:
    """Show what a data folder holds, or the text of one of its windows.

    --window prints the text of one of them, for a --context; refused.json of a run names those of
    refused updates. Exit code 0, or 2 if the folder is not whole.
    """
    with exit_codes(interrupted="Interrupted."):
        require_local(folder)
        evaluation_library()
        from xsake.training import data

        index = data.read_index(folder)
        if window is not None:
            echo(_text_of(folder, window, context, split))
            return
        _require_sound(folder, index, "full" if verify else "size")
    if as_json:
        echo(index.to_json())
        return
    lines = [
        *_summary(index),
        *_skipped(index),
        f"{'made from':<12}{_counted(len(index.sources), 'file')} of text",
    ]
    checked = "every byte is as it was written" if verify else "all files are there, whole in size"
    echo("\n".join([*lines, f"{'checked':<12}{checked}"]))


def _source(tokenizer: Path | None, vocabulary: int | None) -> Any:
    from xsake.training import data

    if vocabulary is not None and tokenizer is None:
        return data.NewTokenizer(vocabulary)
    if tokenizer is not None and vocabulary is None:
        return tokenizer
    raise ArgumentError(
        "tokens are made by a tokenizer, a given or a new one",
        got="both" if tokenizer else "none",
        expected="a TOKENIZER or --train-tokenizer, not both",
    )


def _share(words: str) -> float:
    """A share, written as 1% or 0.01."""
    try:
        number = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError as error:
        raise ArgumentError("--validation takes a share", got=words, expected="1%, 0.01") from error
    return round(number, 9)


def _require_sound(folder: Path, index: Any, verify: Literal["full", "size"]) -> None:
    from xsake.training.data.index import BYTES_OF, SPLITS, require_tokenizer, shard_path
    from xsake.training.data.shards import require_sound

    if verify == "full":
        require_tokenizer(folder, index)
    for name in SPLITS:
        for number, shard in enumerate(index.split(name).shards):
            path = shard_path(folder, name, number)
            require_sound(path, shard, BYTES_OF[index.dtype], verify)


def _text_of(folder: Path, window: int, context: int, split: Literal["train", "validation"]) -> str:
    from xsake.model.tokenizer import Tokenizer
    from xsake.training import data

    windows = data.Windows(folder, context=context, split=split)
    if window >= len(windows):
        raise ArgumentError(
            "there is no such window",
            got=window,
            expected=f"0 to {len(windows) - 1} of {split} with a context of {context}",
        )
    tokens = windows.read(np.array([window], np.int64))[0]
    return Tokenizer.load(folder).decode(tokens, shows_special=True)


def _summary(index: Any) -> list[str]:
    lines = []
    for name in ("train", "validation"):
        split = index.split(name)
        numbers = f"{split.tokens:>15,} tokens, {_counted(split.documents, 'document')}"
        lines.append(f"{name:<12}{numbers}, {_counted(len(split.shards), 'file')}")
    tokenizer = index.tokenizer
    kind = "" if tokenizer.asked_vocabulary is None else ", trained on the train documents"
    end = f"{tokenizer.end_token} ({tokenizer.end_id}) ends documents"
    lines.append(f"{'tokenizer':<12}{tokenizer.vocabulary:>15,} tokens, {end}{kind}")
    return lines


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _skipped(index: Any) -> list[str]:
    """How many documents were left out, and the first of them."""
    if not index.skipped:
        return []
    documents = _counted(sum(file.documents for file in index.skipped), "invalid document")
    files = _counted(len(index.skipped), "file")
    return [f"{'skipped':<12}{documents} of {files}; {index.skipped[0].first}"]


def _notes(built: Any) -> list[str]:
    """What the caller should know, and would not expect."""
    index, asked = built.index, built.index.tokenizer.asked_vocabulary
    notes = _skipped(index)
    if index.validation and not index.split("validation").documents:
        notes.append("No document fell into the validation share: there are too few.")
    if asked is not None and index.tokenizer.vocabulary < asked:
        notes.append(f"The texts are too short for a vocabulary of {asked:,} tokens.")
    if built.is_new and built.kept:
        notes.append(f"Kept and checked from an earlier run: {_counted(built.kept, 'file')}.")
    if built.again:
        notes.append(
            f"Written again, damaged or after a damaged one: {_counted(built.again, 'file')}."
        )
    return notes


class _Screen(MovingLine):
    """Progress: one moving line on a terminal, a line per file elsewhere."""

    def show(self, progress: Any) -> None:
        """What is being done, and how long the rest will take."""
        left = progress.remaining_seconds
        to_go = "" if left is None else f", about {left:.0f} s to go"
        words = f"[dim]{escape_markup(progress.doing)}[/]"
        if progress.tokens:
            words = f"{progress.tokens:,} tokens{to_go} {words}"
        self.update(progress.done, progress.total or 1, words)
        if progress.finished is not None and not self.console.is_terminal:
            done = progress.finished
            line = f"{done.split} file {done.number + 1}: {done.shard.tokens:,} tokens"
            self.console.print(f"{line}[dim]{to_go}[/]", soft_wrap=True, highlight=False)
