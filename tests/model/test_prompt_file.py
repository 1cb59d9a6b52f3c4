"""Files of prompts and outputs: strict lines, and outputs that survive an interruption."""

import json

import pytest

from xsake.errors import ArgumentError
from xsake.model.prompt_file import OutputFile, OutputLine, PromptLine, read_prompts


@pytest.fixture
def read(tmp_path):
    """Prompts of a file with this content."""

    def load(content):
        path = tmp_path / "in.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_prompts(path)

    return load


def test_texts_and_chats_are_read_and_blank_lines_are_not(read):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028"}]
    lines = read(
        json.dumps({"id": 3, "prompt": "a\nb"})
        + "\r\n\n"
        + json.dumps({"messages": chat}, ensure_ascii=False)
    )
    assert lines[0] == PromptLine(id=3, prompt="a\nb") and lines[0].dialog is None
    assert lines[1].dialog == [("system", "Be brief."), ("user", "Hi\u2028")]
    assert [line.content for line in lines] == ["a\nb", "Hi\u2028"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "got"),
        ("[]", "not an object"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "either prompt"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": "a", "prompt": "b"}', "there twice"),
        ('{"prompt": "a", "temperature": 1}', "temperature"),
        ('{"prompt": "a", "id": [1]}', "id"),
        ('{"prompt": "\\ud800"}', "prompt"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content"),
        ('{"messages": [{"role": "user", "content": ["hi"]}]}', "messages.0.content"),
        (b"\xff", "utf-8"),
    ],
)
def test_other_lines_are_refused_with_their_number(read, line, words):
    line = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(ArgumentError, match=rf"(?s)XSK-102.file-format.*in.jsonl, line 2.*{words}"):
        read(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')


def test_an_empty_file_and_a_missing_one_are_refused(read, tmp_path):
    with pytest.raises(ArgumentError, match="XSK-102.prompts-empty"):
        read(" \n\n")
    with pytest.raises(ArgumentError, match="XSK-102.file-unreadable"):
        read_prompts(tmp_path / "none.jsonl")


def output(index, text="\u2028\x85\n", job="one"):
    return OutputLine(
        index=index, text=text, tokens=(1, 2), logprobs=(-0.5, -1.0), finish="stop", job=job
    )


def test_outputs_are_kept_through_any_end_of_the_process(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    OutputFile(path, "one", 3).add(output(2))
    whole = path.read_bytes()
    for killed_after in range(len(whole) + 1):
        path.write_bytes(whole + whole.replace(b"2", b"1", 1)[:killed_after])
        file = OutputFile(path, "one", 3)
        is_complete = killed_after == len(whole)
        assert file.missing == ([0] if is_complete else [0, 1])
        file.add(output(0))
        file = OutputFile(path, "one", 3)
        assert file.missing == ([] if is_complete else [1])
        for number in file.missing:
            file.add(output(number))
        file.finish()
        lines = [OutputLine.model_validate_json(line) for line in path.read_bytes().splitlines()]
        assert lines == [output(0), output(1), output(2)]


def test_other_files_are_refused_and_not_changed(tmp_path):
    path = tmp_path / "out.jsonl"
    for content, slug in (
        (output(0, job="two").model_dump_json(), "output-job"),
        (output(3).model_dump_json(), "output-job"),
        ('{"prompt": "a"}', "file-format"),
        ("text", "file-format"),
        (output(0).model_dump_json().replace("stop", "ended"), "file-format"),
    ):
        path.write_text(content + "\n")
        with pytest.raises(ArgumentError, match=f"XSK-102.{slug}"):
            OutputFile(path, "one", 3)
        assert path.read_text() == content + "\n"
    assert OutputFile(path, "one", 3, overwrite=True).missing == [0, 1, 2]
    assert not path.exists()
