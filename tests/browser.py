"""A real browser for the tests: Chromium without a window, driven through its own pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Root needs --no-sandbox; the rest keeps the browser from talking to anybody but the page.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

ANSWER_SECONDS = 60.0
"""How long the browser may take for one thing; the first start on a busy machine is the worst."""


def browser_path() -> str:
    """The browser's path; without one the test is skipped, but fails where CI is set."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    reason = "no Chromium here: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """One browser with one tab."""

    def __init__(self) -> None:
        path = browser_path()
        self._profile = tempfile.TemporaryDirectory(prefix="emqtimerd-browser-")
        to_browser, commands = os.pipe()
        answers, from_browser = os.pipe()
        # The browser's side of the pipe is by definition descriptors 3 and 4. A shell puts them
        # there, since what Popen passes on keeps its own number.
        wiring = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", wiring, path, *FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._commands = cast("BinaryIO", os.fdopen(commands, "wb", buffering=0))
        self._answers = answers
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._commands.close()
            os.close(self._answers)
            # Its last children may still be writing there.
            shutil.rmtree(self._profile.name, ignore_errors=True)
            self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return cast("dict[str, Any]", answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_SECONDS)
            assert ready, f"the browser said nothing for {ANSWER_SECONDS:g} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        return cast("dict[str, Any]", json.loads(text))

    def open(
        self, url: str, *, width: int, height: int = 900, scheme: str = "light", scale: float = 1
    ) -> None:
        """Show a page in a window of this width, in light or dark, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 500,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)
        self._await_load()

    def submit(self, script: str) -> None:
        """Run a script that leads to another page, and wait until that is loaded."""
        self.evaluate(script)
        self._await_load()

    def _await_load(self) -> None:
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """What a script says about the page. The page itself has none; this asks from outside."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        """Take a picture of the page as a PNG file, and return it."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        data = base64.b64decode(shot["data"])
        path.write_bytes(data)
        return data
