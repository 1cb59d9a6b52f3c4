"""Exit codes and messages of errors that end a command; what each command refuses."""

import errno

import pytest
import typer

from xsake.cli.errors import exit_codes
from xsake.errors import ArgumentError
from xsake.training.processes import RendezvousError, exit_code

FILES = "Too many files are open: shard-7.bin"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OSError(errno.EMFILE, "Too many open files", "shard-7.bin"), 2, FILES),
        (OSError(errno.ENFILE, "Too many open files", "shard-7.bin"), 2, FILES),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 2, "A file cannot be written"),
        (ArgumentError("wrong", "wrong"), 2, "XSK-102"),
        (RendezvousError("late", "late"), 1, "XSK-"),  # a restart may succeed
    ],
)
def test_errors_have_a_code_and_a_message(error, code, text, capsys):
    with pytest.raises(typer.Exit) as raised, exit_codes():
        raise error
    shown = capsys.readouterr().err
    assert raised.value.exit_code == code and shown.startswith(text)
    assert ("ulimit -n" in shown) == (text == FILES)
    if not isinstance(error, OSError):
        assert exit_code(error) == code


CALIBRATE = "calibrate {model} --text {texts} -o {out}/plan.json --context 96 --block 8"
EVALUATE = "evaluate {model} --text {texts} -o {out}/report.json --context 32 --no-far-copy"
NEAR = "window(left=15,right=0)"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{CALIBRATE} --policy kl --budget 20%", "is smaller than the forced blocks"),
        (f"{CALIBRATE} --policy original --budget 20%", "is smaller than the forced blocks"),
        (f"{CALIBRATE} --budget much", "invalid density"),
        (f"{CALIBRATE} --budget 140%", "a share of the visible blocks"),
        (f"{CALIBRATE} --policy entropy --budget 60%", "omit --budget"),
        (f"{CALIBRATE} --policy top_p --set p", "invalid --set"),
        (f"{CALIBRATE} --context 5000", "at least 5000 tokens"),
        (f"{CALIBRATE} --context 24 --budget 1", "too short for block selection"),
        (f"{CALIBRATE} --devices 99", "too few devices"),
        (f"{EVALUATE} --mask windw(3)", "XSK-201"),
        (f"{EVALUATE} --mask none.json", "none.json"),
        (f"{EVALUATE} --layout none.json", "none.json"),
        (f"{EVALUATE} --mask {NEAR} --layout none.json", "one of --mask, --layout, --plan"),
        (f"{EVALUATE} --text none.txt", "text not found"),
        (f"{EVALUATE} --context many", "invalid --context"),
        (f"{EVALUATE} --context 5000", "at least 5000 tokens"),
        ("evaluate {out} --text {texts}", "XSK-"),
        ("generate {model}", "no prompt"),
        ("generate {model} --prompt-file no-such-file", "prompt cannot be read"),
        ("generate {model} --prompt a --temperature -1", "temperature is out of range"),
        ("generate {out} --prompt a", "tokenizer.json is missing"),
        ("bench attention --shape unknown", "unknown shape"),
        ("bench attention --tokens many", "invalid --tokens"),
        ("bench attention --densities much", "invalid density"),
        ("bench decode --num-threads 4096", "too few CPU cores"),
        ("bench compare none.jsonl none.jsonl", "none.jsonl"),
        ("certify v9", "v5e"),
        ("plan show {texts}", "XSK-102"),
        ("plan diff {texts} none.json", "XSK-102"),
        ("report none.json", "none.json"),
    ],
)
def test_what_cannot_run_says_why_and_writes_nothing(
    run, quick, checkpoint, texts, tmp_path, command, words
):
    quick.stops_after = 0
    names = {"model": checkpoint, "texts": texts, "out": tmp_path}
    done = run(*(word.format(**names) for word in command.split()))
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]
