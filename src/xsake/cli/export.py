"""`xsake export`: a run's checkpoint as a Hugging Face model; the work is done elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._io import require_local
from xsake.cli.exits import exit_codes
from xsake.cli.screen import echo
from xsake.errors import ArgumentError


def run_export(
    run: Annotated[Path, typer.Argument(help="checkpoint.folder of a run; it may be going on.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to be made.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Default: the newest that is sound.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="model_type to write; default: what fits, gpt2 or llama.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the checkpoint that is there.")
    ] = False,
) -> None:
    """Write a checkpoint of `xsake train` as a model that transformers and `xsake` load.

    The tokenizer goes along if the run's data folder is still there. Exit code 0 if all is
    written, 2 if it cannot be.
    """
    with exit_codes():
        require_local(run, out)
        from xsake import _json
        from xsake.training.checkpoints import CheckpointStore
        from xsake.training.checkpoints.export import export_checkpoint
        from xsake.training.config import MOST_BYTES, TrainingConfig

        path = run / "config.json"
        if not path.is_file():
            raise ArgumentError(
                "this is no folder of a run",
                got=f"{run} without config.json",
                expected="the checkpoint.folder of an `xsake train` configuration",
            )
        config = TrainingConfig.from_json(_json.read(path, max_bytes=MOST_BYTES))
        decoder, (tokens, tokenizer) = config.model.decoder, _tokenizer(config.data.folder)
        store = CheckpointStore(run / "steps", is_read_only=True)
        written = export_checkpoint(
            store, out, config=decoder, step=step, token_ids=tokens, tokenizer_from=tokenizer,
            family=family or ("gpt2" if decoder.has_learned_positions else "llama"),
            is_replacing=replace,
        )  # fmt: skip
        store.close()
    with_what = "with" if tokenizer else "without"
    echo(f"step {written} written to {out}, {with_what} a tokenizer")


def _tokenizer(data: Path) -> tuple[Any, Path | None]:
    """What the generator has to know, and where the tokenizer is; nothing if the data is gone."""
    from xsake.model.huggingface.configs import TokenIds
    from xsake.model.tokenizer import TOKENIZER
    from xsake.training.data.index import INDEX, read_index, require_tokenizer

    if not (data / INDEX).is_file():
        return TokenIds(), None
    index = read_index(data)
    ids = TokenIds(bos=index.tokenizer.end_id, eos=(index.tokenizer.end_id,))
    if not (data / TOKENIZER).is_file():
        return ids, None
    require_tokenizer(data, index)
    return ids, data
