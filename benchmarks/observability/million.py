"""A run of a million steps with 300 series: made, indexed, and opened in the API and the page.

python -m benchmarks.observability.million                # about 2 GB of metrics, minutes to index
python -m benchmarks.observability.million --steps 20000  # to see that it works; not kept

Opening is what a person does: the server has the index from before, the page asks for the run and
its curves. Rows go to results/observability/million.jsonl.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments.common import RESULTS
from benchmarks.observability.browser import NoBrowserError, chromium
from benchmarks.observability.serving import TOKEN, Served, served
from benchmarks.peers.client import ROOT
from xsake._io import atomic_write
from xsake._provenance import environment

STEPS, LAYERS, HEADS = 1_000_000, 6, 12
MATRICES = ("entropy", "attn_mass_recall", "kl", "block_density")
SINGLE = 12  # other series of a line
VARIANTS = 499
OPEN_SECONDS = 1.0


def write(path: Path, steps: int) -> int:
    """The metrics of a made-up run, every series in every line; how many series there are.

    Args:
        path: of the file.
        steps: lines.
    """
    rng = np.random.default_rng(0)
    drawn = rng.random((VARIANTS, len(MATRICES), LAYERS, HEADS)).round(5).tolist()
    texts = [
        ", ".join(f'"{name}": {json.dumps(x)}' for name, x in zip(MATRICES, part, strict=True))
        for part in drawn
    ]
    noise = rng.normal(size=steps) / 20
    losses = 2 + 8 * np.exp(-np.arange(steps) / (steps / 5)) + noise
    with path.open("w", buffering=2**22) as file:
        about = {"name": "million", "steps": steps, "layers": LAYERS, "heads": HEADS}
        file.write(json.dumps({"event": "began", "from_step": 0, "wall": 1e9, **about}) + "\n")
        for step, loss in enumerate(losses.tolist()):
            file.write(
                f'{{"step": {step}, "wall": {1e9 + step}, "loss": {loss:.5f}, '
                f'"gradient_norm": {1 + loss / 9:.5f}, "learning_rate": 0.0003, "budget": 0.5, '
                f'"is_skipped": false, "consecutive_skips": 0, "tokens": 4096, "failed_saves": 0, '
                f'"step_seconds": 0.51234, "tokens_per_second": {8000 + loss:.2f}, '
                f'"drift": {1 + loss / 50:.4f}, "work_excess": 1.0123, '
                f"{texts[step % VARIANTS]}}}\n"
            )
        file.write('{"event": "ended", "ending": "done", "wall": 2e9}\n')
    return SINGLE + len(MATRICES) * LAYERS * HEADS


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """Everything, once.

    Args:
        folder: for the run; one that is there already, with its index, is only opened.
        steps: of it.
    """
    run = folder / "runs" / "million"
    found: dict[str, Any] = {"steps": steps}
    if not (folder / "cache").exists():
        found |= _made(folder, run, steps)
    begin = time.monotonic()
    with served(folder / "runs", patience=0.0, options=_cache(folder)) as server:
        found["server_start_seconds"] = time.monotonic() - begin
        found |= _opened(server)
        found["open_in_page_seconds"] = _page(server, folder)
        found["memory_megabytes"] = server.memory()["VmHWM"]
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in found.items()}


def _made(folder: Path, run: Path, steps: int) -> dict[str, Any]:
    """Write the run, and let a server index it."""
    found: dict[str, Any] = {}
    run.mkdir(parents=True)
    begin = time.monotonic()
    found["series"] = write(run / "metrics.jsonl", steps)
    found["write_seconds"] = time.monotonic() - begin
    found["metrics_megabytes"] = (run / "metrics.jsonl").stat().st_size / 1e6
    begin = time.monotonic()
    with served(folder / "runs", patience=7200.0, options=_cache(folder)) as server:
        found["index_seconds"] = time.monotonic() - begin
        found["memory_while_indexing_megabytes"] = server.memory()["VmHWM"]
    files = (folder / "cache").rglob("*.sqlite")
    found["index_megabytes"] = sum(path.stat().st_size for path in files) / 1e6
    return found


def _cache(folder: Path) -> list[str]:
    """Options that keep the index from one server to the next."""
    return ["--cache", str(folder / "cache")]


def _opened(server: Served) -> dict[str, Any]:
    """The run, one curve, and all series, in seconds by the clock of a client."""
    times: dict[str, Any] = {}
    begin = time.monotonic()
    number = server.run()["id"]
    details = server.json(f"/runs/{number}")
    loss = server.json(f"/runs/{number}/series?name=loss&points=1000")
    times["open_run_and_loss_seconds"] = time.monotonic() - begin
    assert len(loss["steps"]) > 300 and None not in loss["series"]["loss"]["mean"]
    begin, names = time.monotonic(), details["series"]
    for first in range(0, len(names), 64):
        query = "&".join(f"name={name}" for name in names[first : first + 64])
        server.json(f"/runs/{number}/series?{query}&points=800")
    times["open_all_series_seconds"] = time.monotonic() - begin
    assert len(names) == SINGLE + len(MATRICES) * LAYERS * HEADS
    last = details["step"] + 1
    for name, width in (("zoom_to_1000_steps", 1000), ("zoom_to_50000_steps", 50_000)):
        middle = max(0, last // 2 - width // 2)
        begin = time.monotonic()
        query = f"name=loss&begin={middle}&end={middle + width}&points=1000"
        zoomed = server.json(f"/runs/{number}/series?{query}")
        times[f"{name}_seconds"] = time.monotonic() - begin
        assert zoomed["steps"][0] <= middle + 64
    return times


def _page(server: Served, folder: Path) -> float | None:
    """From the address to curves and heads on the screen; None without a browser."""
    with contextlib.suppress(NoBrowserError), chromium(folder) as page:
        page.open(f"{server.place}/#token={TOKEN}")
        drawn = (
            "document.querySelectorAll('#charts canvas[aria-label*=\"at step\"]').length >= 7"
            " && document.querySelector('#heads-table td') !== null"
        )
        page.until(drawn)  # the browser itself is warm
        page.open("about:blank")
        page.call("Page.navigate", url=f"{server.place}/")
        begin = time.monotonic()
        while not page.run(drawn):
            time.sleep(0.01)
        page.picture(folder / "million.png")
        return time.monotonic() - begin
    return None


def main() -> None:
    """Measure, print, and keep the row of the whole size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, help="kept, and only opened the next time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xsake-million-") as temporary:
        found = measure(given.folder or Path(temporary), given.steps)
    opened = ("open_run_and_loss_seconds", "open_all_series_seconds", "open_in_page_seconds")
    found["is_met"] = {name: (found[name] or 0.0) < OPEN_SECONDS for name in opened}
    row = {"experiment": "million", **found, "load": round(os.getloadavg()[0], 1)}
    row["environment"] = dataclasses.asdict(environment(ROOT))
    print(json.dumps(row, indent=1))
    if given.steps == STEPS:
        out = RESULTS / "observability" / "million.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        before = out.read_text() if out.exists() else ""
        atomic_write(out, before + json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
