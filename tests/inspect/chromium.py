"""A page in a headless Chromium, driven over the pipe of its debugging protocol: without a port, a
driver or a package.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_S = 30.0

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser's program; None: there is none here."""
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


class BrowserError(RuntimeError):
    """What the browser says is wrong, an exception in the page included."""


class Page:
    """One tab. Errors of its scripts, and what its policy has refused, stand in problems."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._numbers = itertools.count(1)
        self._rest = b""
        self.problems: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 2**20)
            if not data:
                raise BrowserError("the browser has gone")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.problems.append(entry["text"])
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """What an expression is, promises awaited, as JSON has it."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"it never came to be: {condition}"
            time.sleep(0.02)

    def move(self, x: float, y: float) -> None:
        """The pointer, in the window's pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def center(self, selector: str) -> tuple[float, float]:
        """Of an element's box."""
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        return box[0], box[1]

    def screenshot(self) -> bytes:
        """A PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browsing(folder: Path, *, width: int = 1400, height: int = 900) -> Iterator[Page]:
    """A page in a browser of its own. folder: for its profile."""
    program = chromium()
    assert program is not None
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    # The program reads commands from file 3 and writes answers to file 4.
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]
    process = subprocess.Popen(
        ["bash", "-c", command, program, *options, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        page = Page(read, write)
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        yield page
    finally:
        os.close(write)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read)
