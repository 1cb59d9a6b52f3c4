"""The built-in page in a real Chromium: live, by keyboard, readable by all."""

import importlib.util
import json
import os
import pathlib
import time

import pytest

from benchmarks.observability.browser import NoBrowserError, chromium
from tests.server.sample import keep_writing, served, write_run


@pytest.fixture
def page(tmp_path):
    try:
        with chromium(tmp_path) as page:
            yield page
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(600)
def test_the_page_follows_a_run_by_itself_and_is_usable_by_keyboard(tmp_path, page):
    metrics = write_run(tmp_path / "work" / "smollm2-plan", 400, name="smollm2-plan")
    with keep_writing(metrics, 400) as stop, served(tmp_path / "work") as server:
        _log_in(page, server)
        _follows(page, tmp_path)
        _keys(page)
        _axe(page)
        stop()
        old = time.time() - 3600
        os.utime(tmp_path / "work" / "smollm2-plan" / "metrics.jsonl", (old, old))
        page.until("document.querySelector('#state').textContent === 'stale'")
        _picture(page, tmp_path, "stale")
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page.call("Emulation.setEmulatedMedia", features=[dark])
        _axe(page)
        _picture(page, tmp_path, "dark")
        size = {"width": 390, "height": 1600, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        _picture(page, tmp_path, "narrow")
        wide = "document.documentElement.scrollWidth <= innerWidth"
        assert page.run(wide), "a narrow screen has to scroll sideways"
        refused = [problem for problem in page.problems if "401" not in problem]
        assert not refused, refused


def _log_in(page, server):
    """Without a token a form; with one in the fragment none, and nothing stays in the address."""
    page.open(server.place + "/")
    page.until("!document.querySelector('#login').hidden")
    _axe(page)
    page.run("document.querySelector('#token').value = 'wrong'")
    page.run("document.querySelector('#login').requestSubmit()")
    page.until("document.querySelector('#login-problem').textContent")
    page.open("about:blank")
    page.open(f"{server.place}/#token={server.token}")
    page.until("!!document.querySelector('#runs button')")
    assert page.run("location.href") == server.place + "/"
    page.until("document.querySelector('#login').offsetParent === null")  # not to be seen
    assert page.run("document.cookie") == ""  # scripts cannot read it


def _follows(page, folder):
    page.until("document.querySelector('#connection').textContent === 'live'")
    page.until("document.querySelectorAll('#charts canvas').length >= 5")
    assert page.text("#state") == "running"
    page.run("window.marked = true")
    words = page.text("#progress-words")
    loss = page.text("[data-name=loss]")
    page.until(f"document.querySelector('#progress-words').textContent !== {json.dumps(words)}")
    page.until(f"document.querySelector('[data-name=loss]').textContent !== {json.dumps(loss)}")
    # The chart itself moves: its newest point is a later one.
    label = "document.querySelector('#charts canvas').getAttribute('aria-label')"
    before = page.until(f"{label}?.includes('at step') && {label}")
    page.until(f"{label} !== {json.dumps(before)}")
    assert page.run("window.marked"), "the page was loaded again"
    page.until("!!document.querySelector('#heads-table td')")
    assert (
        page.run("""(() => {
        const canvas = document.querySelector('#heat'), pen = canvas.getContext('2d');
        const data = pen.getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
        for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
        return seen.size;
    })()""")
        >= 8
    )  # as many colours as heads
    assert page.text("#heads-table tr:nth-child(3) td:nth-child(5)") == "0.93"
    _picture(page, folder, "live")


def _keys(page):
    """From the top, with Tab alone, to the run, the charts and the heat map."""
    page.run("document.activeElement.blur()")
    seen = []
    for _ in range(40):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"A", "BUTTON", "CANVAS", "metric", "heat-frame", "SUMMARY"} <= set(seen)
    page.run("document.querySelector('#heat-frame').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.press(key)
    assert page.text("#cell") == "layer 1, head 2: 94.0%"
    page.run("document.querySelector('#charts canvas').focus()")
    label = "document.activeElement.getAttribute('aria-label')"
    page.press("ArrowLeft")
    before = page.run(label)
    page.press("ArrowLeft")
    assert page.run(label) != before
    page.press("+")
    page.until(f"{label}.includes('at step')")
    page.press("0")


def _axe(page):
    found = importlib.util.find_spec("axe_core_python")
    if found is None:
        pytest.skip("axe-core-python is not installed")
    script = pathlib.Path(found.submodule_search_locations[0]) / "axe.min.js"
    page.run(script.read_text() + "; true")
    problems = page.run(
        "axe.run().then((found) => found.violations.map((x) => "
        "`${x.id}: ${x.nodes.map((n) => n.html.slice(0, 120)).join(' ')}`))"
    )
    assert problems == []


def _picture(page, folder, name):
    page.picture(folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size > 10_000
