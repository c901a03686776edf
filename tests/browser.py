"""A real browser for tests: Chromium, driven over WebDriver's own protocol."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Browser:
    """An open page; ``session`` is its address at the driver."""

    session: str

    def show(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of a size, in light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [theme]})
        _ask("POST", f"{self.session}/url", {"url": page.absolute().as_uri()})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return _ask("POST", f"{self.session}/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """Click on an element as a person would: it must be there, and not covered."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        found = _ask("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        (name,) = found.values()
        _ask("POST", f"{self.session}/element/{name}/click", {})

    def console(self) -> list[str]:
        """Warnings and errors that the page has caused."""
        return [each["message"] for each in _ask("POST", f"{self.session}/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        size = self._devtools("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return _ask("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; the test is skipped where there is no Chromium, or no driver of it."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(base)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": chromium, "args": options},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = _ask("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        browser = Browser(f"{base}/session/{session}")
        try:
            yield browser
        finally:
            _ask("DELETE", browser.session)
    finally:
        process.terminate()
        process.wait(10)


def _wait(base: str) -> None:
    """Until the driver answers."""
    for _ in range(200):
        try:
            _ask("GET", f"{base}/status")
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("chromedriver does not answer")


def _ask(how: str, address: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(address, None if body is None else json.dumps(body).encode(), method=how)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        return json.load(answer)["value"]
