"""A real Chromium, without a window, driven over its own protocol.

The one of the system (``apt install chromium``), or else Debian's packages, which apt downloads
into the cache folder of the project with the libraries that are missing here. Where neither is
there, tests that need it are skipped, and say why.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from websockets.sync.client import connect

from tests.patience import PATIENCE
from tests.services.debian import environment_of, unpacked_with_libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from websockets.sync.client import ClientConnection

_START_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_PACKAGE = "chromium-headless-shell"
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": ("Space", 32, " "),
    "Escape": ("Escape", 27, ""),
}


def program() -> tuple[str, dict[str, str]]:
    """Where it is, and the variables that it needs. Skips the test where there is none."""
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return found, dict(os.environ)
    folder = unpacked_with_libraries(_PACKAGE)
    # Releases of the package differ in the name; the script in /usr/bin has the path of a system.
    unpacked = (folder / "usr/lib/chromium" / name for name in ("headless_shell", _PACKAGE))
    found = next(path for path in unpacked if path.exists())
    return str(found), environment_of(folder)


@contextlib.contextmanager
def running_chromium(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``folder``."""
    executable, environment = program()
    port_file = folder / "DevToolsActivePort"
    process = subprocess.Popen(
        [
            executable,
            "--headless=new",
            "--no-sandbox",  # tests run as root in containers
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            "--font-render-hinting=none",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
        ],
        env=environment | {"HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("wb"),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE * _START_SECONDS
        while not (port_file.exists() and port_file.read_text().count("\n") >= 1):
            assert process.poll() is None, (folder / "stderr").read_text()[-2000:]
            assert time.monotonic() < deadline, "Chromium does not start."
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


class Browser:
    """The whole browser; :meth:`tab` opens what a test works with."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def tab(self, *, width: int = 1280, height: int = 900) -> Iterator[Tab]:
        """A tab with cookies of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        try:
            for domain in ("Page", "Network", "Runtime", "Log"):
                tab.call(f"{domain}.enable")
            tab.resize(width, height)
            yield tab
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=_ANSWER_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What has happened in a tab since it was asked last."""
        with contextlib.suppress(TimeoutError):
            while True:
                self._events.append(json.loads(self._socket.recv(timeout=0.01)))
        ours = [each for each in self._events if each.get("sessionId") == session]
        self._events = [each for each in self._events if each.get("sessionId") != session]
        return ours


@dataclass
class Tab:
    """One page. ``requests`` are the URLs that it asked for, ``complaints`` what it logged."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> Any:
        return self.browser.call(method, self.session, **params)

    def collect(self) -> None:
        """Take what the browser has told since."""
        for event in self.browser.events(self.session):
            params = event.get("params", {})
            match event["method"]:
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    entry = params["entry"]
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    thrown = details.get("exception", {}).get("description", "")
                    self.complaints.append(f"{details['text']} {thrown}")

    def open(self, url: str) -> None:
        """Load a page, its scripts too."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 15.0) -> None:
        """Until the expression is true. Its value stays in the browser: it may be an element."""
        is_true = f"(async () => Boolean(await ({expression})))()"
        until(lambda: self._tried(is_true), seconds, expression)

    def _tried(self, expression: str) -> Any:
        # In the middle of a navigation there may be no document.
        with contextlib.suppress(AssertionError):
            return self.run(expression)
        return None

    def text(self, selector: str = "body") -> str:
        found: str = self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as from a keyboard."""
        code, number, text = _KEYS[key]
        common = {
            "key": " " if key == "Space" else key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The whole page, or what is seen of it, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """What ``found`` returns, once it is true."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value
