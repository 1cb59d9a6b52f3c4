"""Which environment and which adapter every implementation needs; the one place to add a peer."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PEERS_DIR = Path.home() / ".cache" / "xsake" / "peers"


@dataclass(frozen=True)
class Recipe:
    """An environment of its own: the Python it needs and the packages that go in."""

    python: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Implementation:
    """Who computes: adapter module, its environment (None: ours), and the adapter's call name.

    `is_blockwise`: it takes a block grid; the others compute densely. `is_attention`: without it,
    a bare operation that tells what the machine can do.
    """

    adapter: str
    environment: str | None
    call: str
    title: str
    is_blockwise: bool = False
    is_attention: bool = True


ENVIRONMENTS = {
    "torch": Recipe("3.11", ("torch==2.13.0", "setuptools", "numpy")),
    "tokamax": Recipe("3.12", ("tokamax==0.0.17",)),
    # It does not import on jax 0.12: Python 3.11 resolves to the jax that it wants.
    "ejkernel": Recipe("3.11", ("ejkernel==0.0.80.3",)),
    "transformers": Recipe(
        "3.11",
        ("torch==2.13.0", "setuptools", "numpy", "transformers==5.22.2", "safetensors"),
    ),
    "gguf": Recipe("3.12", ("gguf==0.19.0", "numpy", "safetensors", "tokenizers")),
}

IMPLEMENTATIONS = {
    "xsake": Implementation("xsake_worker", None, "attention", "xsake.attention", True),
    "xsake.xla": Implementation(
        "xsake_worker", None, "xla", 'xsake.attention, implementation="xla"', True
    ),
    "jax.nn": Implementation("jax_worker", None, "xla", "jax.nn.dot_product_attention"),
    "torch.sdpa": Implementation(
        "torch_worker", "torch", "sdpa", "torch scaled_dot_product_attention"
    ),
    "torch.flex": Implementation(
        "torch_worker", "torch", "flex", "torch.compile(flex_attention)", True
    ),
    "torch.gemm": Implementation(
        "torch_worker", "torch", "gemm", "torch matmul (MKL)", is_attention=False
    ),
    "torch.read": Implementation("torch_worker", "torch", "read", "torch sum", is_attention=False),
    "jax.gemm": Implementation("jax_worker", None, "gemm", "jax matmul", is_attention=False),
    "numpy.gemm": Implementation(
        "jax_worker", None, "openblas", "NumPy matmul (OpenBLAS)", is_attention=False
    ),
    "tokamax": Implementation("tokamax_worker", "tokamax", "xla_chunked", "tokamax xla_chunked"),
    "tokamax.xla": Implementation("tokamax_worker", "tokamax", "xla", "tokamax xla"),
    # Its XLA backend computes densely under a mask of tokens.
    "ejkernel": Implementation(
        "ejkernel_worker", "ejkernel", "blocksparse", "ejkernel blocksparse_attention", True
    ),
}


def interpreter(environment: str | None, peers_dir: Path) -> Path:
    """The Python of an environment; raises with the command that builds it when it is missing."""
    if environment is None:
        return Path(sys.executable)
    python = peers_dir / environment / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"The {environment} environment is not in {peers_dir}.\n"
            f"Build it: python -m benchmarks.peers build {environment}"
        )
    return python


def build(environment: str, peers_dir: Path) -> Path:
    """Make the environment from package names, replacing what is there; returns its Python."""
    recipe = ENVIRONMENTS[environment]
    base = shutil.which(f"python{recipe.python}")
    if base is None:
        raise SystemExit(f"{environment} needs python{recipe.python} on the PATH.")
    folder = peers_dir / environment
    # pyenv's shims answer for a version only when it is selected; others ignore the variable.
    selected = os.environ | {"PYENV_VERSION": recipe.python}
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True, env=selected)
    python = folder / "bin" / "python"
    try:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *recipe.packages], check=True)
    except BaseException:
        # A Python that is there counts as built, so half an environment may not stay.
        shutil.rmtree(folder)
        raise
    return python


def built_interpreter(environment: str | None, peers_dir: Path) -> Path:
    """The Python of an environment, which is built first when it is missing."""
    if environment is None:
        return Path(sys.executable)
    python = peers_dir / environment / "bin" / "python"
    return python if python.exists() else build(environment, peers_dir)
