"""`xsake data` as its user sees it: built, gone on with, shown, and refused with a reason."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from tests.training.data_sample import END, files_of, letters, save_texts, save_tokenizer
from xsake.cli.data import data_app
from xsake.training.build_data import Vocabulary
from xsake.training.data import read_index


def invoke(*arguments):
    return CliRunner().invoke(data_app, list(map(str, arguments)), env={"COLUMNS": "160"})


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def text(tmp_path):
    return save_texts(tmp_path / "texts.txt", letters(60))


@pytest.fixture
def folder(tmp_path, tokenizer, text):
    made = tmp_path / "made"
    done = invoke("build", tokenizer, "--text", text, "-o", made, "--shard-tokens", 700)
    assert done.exit_code == 0, done.output
    return made


def test_a_build_tells_what_it_made(tmp_path, tokenizer, text):
    out = tmp_path / "data"
    command = ["build", tokenizer, "--text", text, "-o", out, "--validation", "20%"]
    done = invoke(*command, "--shard-tokens", 700)
    assert done.exit_code == 0, done.output
    index = json.loads((out / "index.json").read_text())
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    assert train["documents"] + validation["documents"] == 60 and validation["documents"] > 5
    lines = done.output.splitlines()
    assert lines[0].startswith("train file 1: 700 tokens")
    assert f"{train['tokens']:,} tokens, {train['documents']} documents, 3 files" in done.output
    assert "257 tokens, <|endoftext|> (256) ends documents" in done.output
    assert lines[-1].endswith(f" s; written to {out}")
    again = invoke(*command, "--shard-tokens", 700)
    assert again.exit_code == 0
    assert (
        f"Nothing to do: {out} already holds this dataset, and every file is valid." in again.output
    )


def test_json_is_all_that_is_printed(tmp_path, tokenizer, text):
    out = tmp_path / "data"
    done = invoke("build", tokenizer, "--text", text, "-o", out, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads((out / "index.json").read_text())
    assert json.loads(invoke("show", out, "--json").stdout) == json.loads(done.stdout)


@pytest.mark.parametrize(
    ("vocabulary", "texts", "words"),
    [
        (
            300,
            letters(60),
            "300 tokens, <|endoftext|> (0) ends documents, trained on the train doc",
        ),
        (60000, letters(60), "The texts are too short for a vocabulary of 60,000 tokens."),
        (300, ["a single document"], "The validation split is empty"),
    ],
)
def test_a_tokenizer_is_trained_and_what_the_texts_lack_is_told(tmp_path, vocabulary, texts, words):
    text = save_texts(tmp_path / "texts.txt", texts)
    flags = "--train-tokenizer", vocabulary, "--text", text, "-o", tmp_path / "data"
    done = invoke("build", *flags)
    assert done.exit_code == 0 and words in done.output


def test_ctrl_c_leaves_with_130_and_the_same_command_goes_on(
    tmp_path, tokenizer, text, monkeypatch
):
    straight, out = tmp_path / "straight", tmp_path / "data"
    command = ["build", tokenizer, "--text", text, "--shard-tokens", 100, "-o"]
    assert invoke(*command, straight).exit_code == 0
    encode, lots = Vocabulary.encode, iter([True, True, False])

    def press_ctrl_c(self, texts):
        if not next(lots):
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr("xsake.training.build_data.MAX_PIECE_CHARS", 300)
    assert invoke(*command, straight, "--no-resume").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "encode", press_ctrl_c)
        done = invoke(*command, out)
    assert done.exit_code == 130 and "to resume" in done.stderr
    shown = invoke("show", out)
    assert shown.exit_code == 2 and "build of the data was interrupted" in shown.stderr
    done = invoke(*command, out)
    assert done.exit_code == 0, done.output
    assert "Verified and reused from an earlier run: " in done.output
    assert files_of(out) == files_of(straight)


def test_damaged_files_of_an_interrupted_build_are_told(tmp_path, tokenizer, text, monkeypatch):
    out = tmp_path / "data"
    command = ["build", tokenizer, "--text", text, "--shard-tokens", 100, "-o", out]
    with monkeypatch.context() as patch:
        patch.setattr("xsake.training.build_data.write_index", _press_ctrl_c)
        assert invoke(*command).exit_code == 130
    (out / "train-00001.bin").write_bytes(b"")
    done = invoke(*command)
    assert done.exit_code == 0 and "Rewritten, damaged or after a damaged" in done.output
    assert invoke("show", out, "--verify").exit_code == 0


def _press_ctrl_c(*_):
    raise KeyboardInterrupt


def test_a_folder_is_shown(folder):
    done = invoke("show", folder)
    assert done.exit_code == 0, done.output
    assert "1,954 tokens, 58 documents, 3 files\n" in done.output
    assert "79 tokens, 2 documents, 1 file\n" in done.output
    assert "1 file of text" in done.output and "all files exist with the right size" in done.output
    assert "all digests match" in invoke("show", folder, "--verify").output


@pytest.mark.parametrize(
    ("name", "words"),
    [("train-00000.bin", "a shard is damaged"), ("tokenizer.json", "the tokenizer does not match")],
)
def test_verify_reads_every_byte(folder, name, words):
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    assert invoke("show", folder).exit_code == 0
    done = invoke("show", folder, "--verify")
    assert done.exit_code == 2 and words in done.stderr


def test_a_missing_file_is_named_without_verify(folder):
    (folder / "train-00000.bin").unlink()
    done = invoke("show", folder)
    assert done.exit_code == 2 and "a shard is missing" in done.stderr
    assert "train-00000.bin" in done.stderr and "--no-resume" in done.stderr


def test_the_text_of_a_window_is_shown(folder, tokenizer, tmp_path):
    done = invoke("show", folder, "--window", 0, "--context", 40)
    assert done.exit_code == 0, done.output
    assert any(f"{document}{END}".startswith(done.output[:20]) for document in letters(60))
    following = invoke("show", folder, "--window", 1, "--context", 40)
    assert following.output[0] == done.output[40]  # one token is in both
    done = invoke("show", folder, "--window", 10**6)
    assert done.exit_code == 2 and "window index out of range" in done.stderr
    text = save_texts(tmp_path / "evil.txt", ["red \x1b[31m " * 20])
    invoke("build", tokenizer, "--text", text, "-o", tmp_path / "evil")
    done = invoke("show", tmp_path / "evil", "--window", 0, "--context", 12)
    assert done.exit_code == 0 and "\x1b" not in done.output
    assert "red \\u001b[31m" in done.output


def test_documents_that_cannot_be_used_are_skipped_only_if_asked(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good words" * 20 + b"\n<|endoftext|>\nbad \xff\n<|endoftext|>\nmore")
    arguments = (tokenizer, "--text", path, "--validation", "0")
    done = invoke("build", *arguments, "-o", tmp_path / "none")
    assert done.exit_code == 2 and "a.txt, line 3: byte 0xff" in done.stderr
    assert "--invalid skip" in done.stderr and not (tmp_path / "none" / "index.json").exists()
    done = invoke("build", *arguments, "-o", tmp_path / "data", "--invalid", "skip")
    assert done.exit_code == 0, done.output
    (skipped,) = read_index(tmp_path / "data").skipped
    assert (skipped.name, skipped.documents) == ("a.txt", 1)
    for output in (done.output, invoke("show", tmp_path / "data").output):
        assert "1 invalid document of 1 file" in output and "line 3: byte 0xff" in output


def test_an_index_cannot_command_the_terminal(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "evil")
    index = json.loads((folder / "index.json").read_text())
    index["sources"][0]["name"] = "\x9b2J\u202e"
    (tmp_path / "evil" / "index.json").write_text(json.dumps(index, ensure_ascii=False))
    done = invoke("show", tmp_path / "evil", "--json")
    assert "\x9b" not in done.output and "\u202e" not in done.output
    assert json.loads(done.output)["sources"][0]["name"] == "\x9b2J\u202e"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train-tokenizer", "300"), "exactly one tokenizer source"),
        (("--validation", "some"), "invalid --validation"),
        (("--shard-tokens", "0"), "size of a shard is out of range"),
        (("--end-token", "<none>"), "such as <|endoftext|>"),
    ],
)
def test_what_cannot_run_says_why_and_leaves_with_2(tmp_path, tokenizer, text, flags, words):
    done = invoke("build", tokenizer, "--text", text, "-o", tmp_path / "data", *flags)
    assert done.exit_code == 2 and words in done.stderr, done.output
    assert not (tmp_path / "data").exists()
