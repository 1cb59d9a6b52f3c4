"""`xsake doctor`: collect versions, devices and self-tests, and render them."""

import dataclasses
import functools
import importlib.metadata
import math
import os
import pathlib
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

import xsake
from xsake.cli.screen import escape_markup
from xsake.errors import XsakeError
from xsake.kernels.block_sparse.api import OP
from xsake.masks import Causal

# The absolute float32 limit of the numerics standard for gradients of unit-variance inputs.
MAX_ERROR = 1e-5
REQUIRED = ("jax", "jaxlib", "numpy", "jaxtyping", "pydantic")
OPTIONAL = ("flax", "equinox", "matplotlib")


@dataclasses.dataclass(frozen=True)
class CompilationCache:
    """JAX's persistent compilation cache.

    `directory` is None if the cache is off; `writable` is None if it is off or remote.
    """

    directory: str | None
    writable: bool | None


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Comparison of one implementation with the reference; `problem` is None if it passed."""

    implementation: str
    max_error: float | None  # None if no result is finite
    seconds: float
    problem: str | None


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """Report of `xsake doctor`.

    `implementations` maps each name to None if it can run here, else to the reason;
    `versions` maps a library that is not installed to None.
    """

    versions: dict[str, str | None]
    backend: str
    devices: list[str]
    implementations: dict[str, str | None]
    compilation_cache: CompilationCache
    self_tests: list[SelfTest]

    @property
    def healthy(self) -> bool:
        """Whether at least one self-test ran and none failed."""
        return bool(self.self_tests) and all(test.problem is None for test in self.self_tests)

    def to_dict(self) -> dict:
        """Return the report as plain JSON types."""
        return {"healthy": self.healthy, **dataclasses.asdict(self)}


def collect_report() -> DoctorReport:
    """Collect the report; run each available implementation once on small inputs."""
    implementations = OP.implementations()
    return DoctorReport(
        versions=_versions(),
        backend=jax.default_backend(),
        devices=[f"{device} ({device.device_kind})" for device in jax.devices()],
        implementations=implementations,
        compilation_cache=_compilation_cache(),
        self_tests=_self_tests(
            [name for name, reason in implementations.items() if reason is None]
        ),
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "xsake": xsake.__version__,
        "python": platform.python_version(),
    }
    for name in (*REQUIRED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _compilation_cache() -> CompilationCache:
    directory = jax.config.jax_compilation_cache_dir
    if not directory or "://" in directory:
        return CompilationCache(directory=directory or None, writable=None)
    existing = pathlib.Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return CompilationCache(directory=directory, writable=writable)


@functools.partial(jax.jit, static_argnames="implementation")
def _forward_and_gradients(q, k, v, cotangent, *, implementation: Any) -> jax.Array:
    def forward(q, k, v):
        return xsake.attention(q, k, v, mask=Causal(), implementation=implementation)

    out, backward = jax.vjp(forward, q, k, v)
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves((out, backward(cotangent)))])


def _test_inputs() -> list[jax.Array]:
    """Return q, k, v and a cotangent: grouped heads, a length that is not a multiple of a block."""
    random = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2, "cotangent": 4}
    shapes = [(1, 200, count, 32) for count in heads.values()]
    return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]


def _self_tests(names: list[str]) -> list[SelfTest]:
    reference = _run("reference")
    runs = {name: reference if name == "reference" else _run(name) for name in names}
    return [_compare(name, run, reference) for name, run in runs.items()]


def _run(implementation: str) -> tuple[np.ndarray | str, float]:
    """Return results or an error message, and the seconds including compilation."""
    start = time.perf_counter()
    try:
        with jax.default_matmul_precision("highest"):
            outputs = _forward_and_gradients(*_test_inputs(), implementation=implementation)
            results = np.asarray(outputs)
    except (XsakeError, jax.errors.JaxRuntimeError) as error:
        results = str(error)
    return results, time.perf_counter() - start


def _compare(
    name: str, run: tuple[np.ndarray | str, float], reference: tuple[np.ndarray | str, float]
) -> SelfTest:
    (got, seconds), (expected, _) = run, reference
    if isinstance(got, str):
        return SelfTest(name, None, seconds, got)
    if isinstance(expected, str):
        return SelfTest(name, None, seconds, f"no reference to compare with: {expected}")
    # NumPy, because XLA's maximum of many NaNs is -inf on CPU (jax 0.12.0.1), which would pass.
    max_error = float(np.max(np.abs(got - expected)))
    if not math.isfinite(max_error):
        return SelfTest(name, None, seconds, "NaN or infinity in the results")
    wrong = max_error > MAX_ERROR
    problem = f"{max_error:.1e} away from the reference, limit {MAX_ERROR:g}" if wrong else None
    return SelfTest(name, max_error, seconds, problem)


def render(report: DoctorReport) -> rich.console.RenderableType:
    """Render the report as one table."""
    table = rich.table.Table(title="xsake doctor", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    installed = [f"{name} {version}" for name, version in report.versions.items() if version]
    missing = [name for name, version in report.versions.items() if not version]
    table.add_row("versions", ", ".join(installed))
    if missing:
        table.add_row("not installed", ", ".join(missing) + " [dim](optional)[/dim]")
    table.add_row(
        "devices", f"{escape_markup(', '.join(report.devices))} [dim]on {report.backend}[/dim]"
    )
    table.add_row("compilation cache", _cache_text(report.compilation_cache))
    table.add_section()
    tests = {test.implementation: _self_test_text(test) for test in report.self_tests}
    for name, reason in report.implementations.items():
        message = f"[yellow]cannot run here:[/yellow] {escape_markup(reason or '')}"
        table.add_row(name, tests[name] if reason is None else message)
    return table


def _cache_text(cache: CompilationCache) -> str:
    if cache.directory is None:
        return "off [dim](set jax_compilation_cache_dir to keep compiled code)[/dim]"
    states = {True: "[green]writable[/green]", False: "[red]not writable[/red]", None: "remote"}
    return f"{escape_markup(cache.directory)} {states[cache.writable]}"


def _self_test_text(test: SelfTest) -> str:
    if test.problem is not None:
        return f"[red]self-test failed:[/red] {escape_markup(test.problem)}"
    numbers = f"max error {test.max_error:.1e}, {test.seconds:.2f} s with compilation"
    return f"[green]runs, self-test passed[/green] [dim]({numbers})[/dim]"
