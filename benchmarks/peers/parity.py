"""Compare the real models of the measurements with transformers: tokens, logits, perplexities.

python -m benchmarks.peers.parity qwen2.5-coder-0.5b-instruct [--tokens 512]

Both sides read the same directory and compute in float32. Weights stay in the dtype of their
files, and one side is in memory at a time: 1.5B needs 6 GB. A row for each text replaces that of
an earlier run in results/model_parity.jsonl.
"""

import argparse
import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from benchmarks.hads.corpus import TEXTS, code_texts
from benchmarks.peers.client import ROOT
from benchmarks.peers.golden import ask
from benchmarks.peers.models import MODELS, directory
from xsake._io import atomic_write
from xsake._provenance import checkout_root, environment
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

ROWS = ROOT / "benchmarks" / "results" / "model_parity.jsonl"
PROSE, CODE = "wikitext.test.raw", "enum.py"
MAX_DIFFERENCE = 2e-5  # of a logit, relative to the largest
# What tokenizers differ in: runs of whitespace, line ends, digits, cases, scripts, marks, emoji.
SAMPLES = (
    "def f(x):\n\treturn x  # two  spaces\r\n\r\n\n   \n\n    pass\n", " \t \n  \r\n", "",
    "1234567890 3.14159e-10 0xDEADBEEF 1_000_000 \N{ARABIC-INDIC DIGIT FOUR}2 x\N{SUPERSCRIPT TWO}",
    "it's WE'LL they'Re 'd 'S", "e\N{COMBINING ACUTE ACCENT} \N{ANGSTROM SIGN}\N{NO-BREAK SPACE}x",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441 \u0e44\u0e17\u0e22",
    "\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea \ufb01 \u2028 \x00\x1f\x7f \ufeff",
    "<|im_start|>user\n<tool_call> <|fim_prefix|>a<|endoftext|>", "a" * 300 + "!" * 300 + " " * 300,
)  # fmt: skip


def compare_tokens(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> int | None:
    """Return the number of tokens of texts; raise if transformers has others.

    None for a model whose tokenizer transformers has no class for.
    """
    if json.loads((folder / "config.json").read_text())["model_type"] != "qwen2":
        return None
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch, "texts.json")
        asked.write_text(json.dumps(texts))
        theirs = ask("tokenize", folder, asked)["tokens"]
    for text, expected in zip(texts, theirs, strict=True):
        tokens = tokenizer.encode(text).tolist()
        if tokens != expected:
            raise SystemExit(f"Tokens of {text[:80]!r} differ: got {tokens}, expected {expected}.")
        if tokenizer.decode(tokens, keep_special_tokens=True) != unicodedata.normalize("NFC", text):
            raise SystemExit(f"Tokens of {text[:80]!r} are those of another text.")
    return sum(map(len, theirs))


def write_logits(folder: Path, tokens: np.ndarray, golden: Path) -> None:
    """Write our logits of tokens [B, T] as `transformers_oracle compare` reads them."""
    dtype = json.loads((folder / "config.json").read_text())["torch_dtype"]
    graph, weights = nnx.split(load(folder, param_dtype=dtype).model)
    run = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))
    logits = np.concatenate([np.asarray(run(weights, row[None])) for row in tokens])
    save_file({"tokens": tokens, "logits": logits}, golden)


def compare_logits(folder: Path, tokens: np.ndarray) -> dict[str, Any]:
    """Return what the oracle says of our logits of tokens [B, T]."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        golden = Path(scratch, "golden.safetensors")
        write_logits(folder, tokens, golden)
        return ask("compare", folder, golden)


def main() -> None:
    """Compare, and write the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.parity", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    given = parser.parse_args()
    folder, model, here = directory(given.name), MODELS[given.name], environment(checkout_root())
    tokenizer = Tokenizer.load(folder)
    prose = (TEXTS / PROSE).read_text()
    code = {name: text for split, _, name, text in code_texts() if split == "test"}
    count = compare_tokens(folder, tokenizer, [prose, *code.values(), *SAMPLES])
    texts = {PROSE: prose, CODE: code[CODE]}
    starts = [tokenizer.encode(text[: 12 * given.tokens]) for text in texts.values()]
    tokens = np.stack([start[: given.tokens] for start in starts])
    answer = compare_logits(folder, tokens)
    fields = {
        "name": given.name, "weights": model.title, "sha256": model.sha256, "dtype": model.dtype,
        "equal_tokens": count, "tokens": given.tokens, **here.fields("utc", "commit", "dirty"),
        "versions": here.versions | answer["versions"],
    }  # fmt: skip
    made = [
        fields | {"text": text} | result
        for text, result in zip(texts, answer["sequences"], strict=True)
    ]
    for row in made:
        print(json.dumps(row))
        if row["max_abs_difference"] > MAX_DIFFERENCE * row["max_abs_logit"]:
            raise SystemExit(f"Not the same model: the limit is {MAX_DIFFERENCE} of a logit.")
    key = lambda row: [row["name"], row["text"], row["tokens"]]
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    rows = [row for row in rows if key(row) not in map(key, made)] + made
    atomic_write(ROWS, "".join(json.dumps(row) + "\n" for row in sorted(rows, key=key)))


if __name__ == "__main__":
    main()
