"""`xsake export`: write a checkpoint of a run as a Hugging Face model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._io import require_local
from xsake.cli.errors import exit_codes
from xsake.cli.progress import echo
from xsake.errors import ArgumentError

_FAMILY = "model_type to write; default: gpt2 or llama, by model."


def run_export(
    run: Annotated[Path, typer.Argument(help="checkpoint.folder of a run, which may be active.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step; default: the newest valid checkpoint.")
    ] = None,
    family: Annotated[str | None, typer.Option(help=_FAMILY)] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite the output folder.")
    ] = False,
) -> None:
    """Write a checkpoint of `xsake train` in the Hugging Face format.

    Copies the tokenizer if the data folder of the run still exists. Exit code 0 on success, 2 if
    the command cannot run.
    """
    with exit_codes():
        require_local(run, out)
        from xsake import _json
        from xsake.training.checkpointing import CheckpointStore
        from xsake.training.config import MAX_BYTES, TrainingConfig
        from xsake.training.export import export_checkpoint

        path = run / "config.json"
        if not path.is_file():
            raise ArgumentError(
                "run-folder",
                "not the folder of a run",
                got=f"{run} without config.json",
                expected="the checkpoint.folder of an `xsake train` configuration",
            )
        config = TrainingConfig.from_json(_json.read(path, max_bytes=MAX_BYTES))
        decoder, (tokens, tokenizer) = config.model.decoder, _find_tokenizer(config.data.folder)
        store = CheckpointStore(run / "steps", is_read_only=True)
        written = export_checkpoint(
            store, out, config=decoder, step=step, token_ids=tokens, tokenizer_from=tokenizer,
            family=family or ("gpt2" if decoder.has_learned_positions else "llama"),
            is_replacing=replace,
        )  # fmt: skip
        store.close()
    echo(f"step {written} written to {out}, {'with' if tokenizer else 'without'} a tokenizer")


def _find_tokenizer(data: Path) -> tuple[Any, Path | None]:
    """Return token ids for generation and the tokenizer's folder; empty if the data is missing."""
    from xsake.model.huggingface.configs import TokenIds
    from xsake.model.tokenizer import TOKENIZER
    from xsake.training.data import INDEX, read_index, require_tokenizer

    if not (data / INDEX).is_file():
        return TokenIds(), None
    index = read_index(data)
    ids = TokenIds(bos=index.tokenizer.end_id, eos=(index.tokenizer.end_id,))
    if not (data / TOKENIZER).is_file():
        return ids, None
    require_tokenizer(data, index)
    return ids, data
