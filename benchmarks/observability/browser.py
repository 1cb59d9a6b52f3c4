"""A real Chromium without a screen, spoken to by its own protocol."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
SPECIAL = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class NoBrowserError(Exception):
    """There is no Chromium on this machine."""


class Page:
    """A page of the browser.

    Args:
        line: to it.
    """

    def __init__(self, line: Any):
        self._line, self._number = line, 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> Any:
        """Ask the browser to do something; what it answers."""
        self._number += 1
        self._line.send(json.dumps({"id": self._number, "method": method, "params": given}))
        while True:
            message = json.loads(self._line.recv(timeout=120))
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: Any) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(message["params"])[:500])
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.problems.append(json.dumps(message["params"]["entry"])[:500])

    def open(self, address: str) -> None:
        """Go somewhere."""
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 120.0) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}\n{self.problems}")

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def press(self, key: str) -> None:
        """A key, as a keyboard sends it."""
        given = {"key": key, "code": key}
        if key in SPECIAL:
            given["windowsVirtualKeyCode"] = SPECIAL[key]
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def picture(self, path: Path) -> None:
        """The whole page, as people would see it."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A new browser with a profile of its own."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise NoBrowserError("there is no Chromium: install Debian's package chromium")
    shutil.rmtree(folder / "profile", ignore_errors=True)  # of an earlier browser
    command = [
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-extensions", "--disable-background-networking",
        "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,1500", "about:blank",
    ]  # fmt: skip
    log = (folder / "chromium.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        ports, end = folder / "profile" / "DevToolsActivePort", time.monotonic() + 120
        while not (ports.exists() and ports.read_text().strip()):
            assert process.poll() is None and time.monotonic() < end, "Chromium does not start"
            time.sleep(0.1)
        port = ports.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as answer:
            [place] = [x["webSocketDebuggerUrl"] for x in json.load(answer) if x["type"] == "page"]
        with connect(place, max_size=2**27, open_timeout=60) as line:
            yield Page(line)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
