"""What `apply_chat_template` of Hugging Face transformers writes; `golden chat` starts it.

chat_oracle.py FOLDER: of every tokenizer in FOLDER and every conversation in conversations.json,
with and without a generation prompt, into golden.json. torch is not needed.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import tokenizers
import transformers


def render(template: Path, conversations: dict) -> dict:
    """Prompts of a tokenizer's folder, by conversation; None where its template refuses."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(template, Path(scratch, "tokenizer"))
        words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
        tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def apply(messages: list, starts_answer: bool) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=starts_answer
            )
        except Exception as refused:
            if type(refused).__name__ != "TemplateError":
                raise
            return None

    return {
        name: [apply(messages, starts_answer) for starts_answer in (False, True)]
        for name, messages in conversations.items()
    }


def main(folder: Path) -> None:
    """Write golden.json."""
    conversations = json.loads((folder / "conversations.json").read_text())
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    prompts = {name: render(folder / name, conversations) for name in names}
    document = {"transformers": transformers.__version__, "prompts": prompts}
    (folder / "golden.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
