"""The golden checkpoints of the model's tests: made and judged by Hugging Face transformers.

python -m benchmarks.peers.golden make  # write tests/model/golden again
python -m benchmarks.peers.golden chat  # write tests/model/chat/golden.json again
python -m benchmarks.peers.golden msa  # write tests/indexed/golden again
python -m benchmarks.peers.golden check DIRECTORY [GOLDEN]  # same logits in transformers?
python -m benchmarks.peers.golden perplexity DIRECTORY TEXT [--tokens 512]

transformers lives in an environment of its own, which is built when it is missing.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.client import ROOT
from benchmarks.peers.recipes import DEFAULT_PEERS_DIR, built_interpreter

GOLDEN_FOLDER = ROOT / "tests" / "model" / "golden"
CHAT_FOLDER = ROOT / "tests" / "model" / "chat"
MSA_FOLDER = ROOT / "tests" / "indexed" / "golden"
ORACLE = ROOT / "benchmarks" / "peers" / "transformers_oracle.py"
CHAT_ORACLE, MSA_ORACLE = (ORACLE.with_name(f"{name}_oracle.py") for name in ("chat", "msa"))
TOLERANCE = 2e-4


def ask(*words: str | Path, peers_dir: Path = DEFAULT_PEERS_DIR) -> dict[str, Any]:
    """The oracle's one-line answer to a question, such as `check ...` or `perplexity ...`."""
    done = subprocess.run(
        _command(words, peers_dir), env=_isolated(), check=True, text=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout.splitlines()[-1])


def make(folder: Path, peers_dir: Path = DEFAULT_PEERS_DIR) -> None:
    """Write every golden checkpoint into `folder`; on one machine, the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(_command(["make", folder], peers_dir), env=_isolated(), check=True)


def make_files(oracle: Path, folder: Path, peers_dir: Path = DEFAULT_PEERS_DIR) -> None:
    """Write the files of an oracle that does nothing else."""
    subprocess.run(_command([folder], peers_dir, oracle), env=_isolated(), check=True)


def _command(words: Sequence[str | Path], peers_dir: Path, oracle: Path = ORACLE) -> list[str]:
    python = built_interpreter("transformers", peers_dir)
    return [str(python), str(oracle), *map(str, words)]


def _isolated() -> dict[str, str]:
    """Our own packages stay out of a foreign environment, and it asks no hub for anything."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Parse the command line and do the one thing it asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.golden", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR)
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("make", help="write the golden checkpoints")
    maker.add_argument("folder", type=Path, nargs="?", default=GOLDEN_FOLDER)
    chats = verbs.add_parser("chat", help="write the prompts of chat templates")
    chats.add_argument("folder", type=Path, nargs="?", default=CHAT_FOLDER)
    sparse = verbs.add_parser("msa", help="write logits and gradients of tiny MiniMax-M3 models")
    sparse.add_argument("folder", type=Path, nargs="?", default=MSA_FOLDER)
    checker = verbs.add_parser("check", help="compare a directory's logits with golden ones")
    checker.add_argument("folder", type=Path)
    checker.add_argument("golden", type=Path, nargs="?", help="default: in the directory")
    measurer = verbs.add_parser("perplexity", help="of the first tokens of a text")
    measurer.add_argument("folder", type=Path)
    measurer.add_argument("text", type=Path)
    measurer.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    if given.verb == "make":
        make(given.folder, given.peers_dir)
    elif given.verb == "chat":
        make_files(CHAT_ORACLE, given.folder, given.peers_dir)
    elif given.verb == "msa":
        make_files(MSA_ORACLE, given.folder, given.peers_dir)
    elif given.verb == "check":
        golden = given.golden or given.folder / "golden.safetensors"
        answer = ask("check", given.folder, golden, peers_dir=given.peers_dir)
        print(json.dumps(answer))
        if answer["problems"] or answer["max_abs_difference"] > TOLERANCE:
            raise SystemExit(f"Not the same model: the limit is {TOLERANCE}, without problems.")
    else:
        words = ("perplexity", given.folder, given.text, "--tokens", str(given.tokens))
        print(json.dumps(ask(*words, peers_dir=given.peers_dir)))


if __name__ == "__main__":
    main()
