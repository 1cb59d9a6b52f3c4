"""The showcase inside the dashboard: who may see it, what it is told, and whether it runs."""

import re

import pytest

from benchmarks.observability.browser import NoBrowserError, chromium
from tests.server.sample import TOKEN, inside, write_run
from xsake._provenance import checkout_root
from xsake.server.artifacts import read_site
from xsake.server.security import COOKIE, PATH, session_cookie
from xsake.server.settings import ServerSettings

PAGE = """<!doctype html><html lang="en"><head><title>a showcase</title>
<link rel="icon" href="data:,">
<script>document.documentElement.dataset.inline = "ran"</script></head>
<body><h1>Showcase</h1><p id="told"></p>
<script src="/_next/static/app.js"></script></body></html>"""
SCRIPT = """fetch("/live.json").then((answer) => answer.json()).then(async ({ is_live }) => {
  const runs = is_live ? await (await fetch("/api/v1/runs")).json() : [];
  document.querySelector("#told").textContent = runs.map((run) => run.name).join();
});"""


@pytest.fixture
def built(tmp_path):
    folder = tmp_path / "out"
    (folder / "_next" / "static").mkdir(parents=True)
    (folder / "explore").mkdir()
    (folder / "data").mkdir()
    (folder / "index.html").write_text(PAGE)
    (folder / "explore" / "index.html").write_text(PAGE.replace("Showcase", "Explore"))
    (folder / "_next" / "static" / "app.js").write_text(SCRIPT)
    (folder / "live.json").write_text('{"is_live":false}')
    (folder / "data" / "layer_00.bin.gz").write_bytes(b"\x1f\x8bpacked")
    (folder / "data" / "rows.jsonl").write_text("{}\n")
    return folder


def _settings(tmp_path, built, **given):
    work = tmp_path / "work"
    write_run(work / "one", 5, name="living")
    return ServerSettings(folders=(work,), port=0, showcase=built, **given)


def test_every_address_of_the_showcase_is_served_and_runs_are_announced(tmp_path, built):
    with inside(_settings(tmp_path, built)) as server:
        assert b"Showcase" in server.ask("/")[2]
        assert b"Explore" in server.ask("/explore/")[2]
        assert b"Explore" in server.ask("/explore")[2]
        assert b"XSAKE runs" in server.ask("/page/")[2]
        assert server.ask("/live.json")[2] == b'{"is_live": true, "has_showcase": true}'
        status, headers, body = server.ask("/data/layer_00.bin.gz")
        assert (status, body) == (200, b"\x1f\x8bpacked")
        assert headers["content-type"] == "application/gzip" and "content-encoding" not in headers
        assert server.ask("/data/rows.jsonl")[0] == 200


def test_inline_scripts_of_the_showcase_run_by_their_hashes_alone(tmp_path, built):
    with inside(_settings(tmp_path, built)) as server:
        policy = server.ask("/")[1]["content-security-policy"]
        scripts = re.search(r"script-src ([^;]*)", policy)[1]
        assert scripts.count("sha256-") == 1 and "unsafe" not in scripts


def test_without_the_token_there_is_a_way_to_show_it_and_nothing_else(tmp_path, built):
    with inside(_settings(tmp_path, built, token=TOKEN)) as server:
        cookie = {"Cookie": f"{COOKIE}={session_cookie(TOKEN)}"}
        assert b'id="login"' in server.ask("/", token=False)[2]
        for path in ("/explore/", "/data/rows.jsonl", "/live.json", "/_next/static/app.js"):
            assert server.ask(path, token=False)[0] == 401, path
        assert b"Showcase" in server.ask("/", token=False, headers=cookie)[2]
        assert b"Explore" in server.ask("/explore/", token=False, headers=cookie)[2]


@pytest.mark.timeout(300)
def test_a_browser_logs_in_and_lands_in_the_showcase_which_sees_the_runs(tmp_path, built):
    try:
        with chromium(tmp_path) as page, inside(_settings(tmp_path, built, token=TOKEN)) as server:
            page.open(f"{server.place}/#token={TOKEN}")
            page.until("document.querySelector('#told')?.textContent === 'living'")
            assert page.run("document.documentElement.dataset.inline") == "ran"
            assert page.run("location.href") == f"{server.place}/"
            page.open(f"{server.place}/page/")
            page.until("!document.querySelector('#showcase').hidden")
            assert not page.problems, page.problems
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture
def real():
    folder = checkout_root() / "showcase" / "out"
    if not (folder / "index.html").is_file():
        pytest.skip("the showcase is not built here: just showcase")
    return folder


def test_every_file_of_the_built_showcase_has_an_address_that_the_guard_lets_through(real):
    addresses = read_site(real, "/").files
    assert "/explore/" in addresses and "/data/explore/layer_00.bin.gz" in addresses
    odd = [address for address in addresses if not PATH.fullmatch(address.encode())]
    assert not odd


@pytest.mark.timeout(600)
def test_the_built_showcase_runs_under_the_policy_of_the_dashboard(tmp_path, real):
    try:
        with chromium(tmp_path) as page, inside(_settings(tmp_path, real, token=TOKEN)) as server:
            page.open(f"{server.place}/#token={TOKEN}")
            page.until("document.querySelectorAll('[data-figure]').length === 4")
            page.open(f"{server.place}/explore/")
            page.until("document.querySelector('#head-kl')?.dataset.value > 0")
            page.open(f"{server.place}/training/")
            page.until("document.querySelector('[data-live]')?.textContent.includes('living')")
            assert not page.problems, page.problems
    except NoBrowserError as error:
        pytest.skip(str(error))
