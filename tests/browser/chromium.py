"""A headless Chromium for tests, driven over the DevTools protocol; needs only ``websockets``.

with open_browser(executable) as browser:
    page = browser.open(Path("report.html").as_uri(), width=390, dark=True)
    assert not page.problems
    assert page.evaluate("document.querySelectorAll('svg').length") > 0
    page.screenshot(artefact("report.png"))
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

START_SECONDS = 60.0
REPLY_SECONDS = 60.0

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


def artefact(name: str) -> Path:
    """Where a test leaves a file for people to look at: FLOWER_GEO_ARTEFACTS, else artefacts/."""
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("FLOWER_GEO_ARTEFACTS") or root / "artefacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


class Page:
    """One open page, what it asked the network for, and what it complained of."""

    def __init__(self, connection: ClientConnection, session: str) -> None:
        self._connection = connection
        self._session = session
        self._sent = 0
        self._events: set[str] = set()
        self.requests: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that arrive meanwhile are noted."""
        self._sent += 1
        self._send(self._sent, method, params)
        while True:
            message = self._receive()
            if message.get("id") == self._sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def move_pointer(self, x: float, y: float) -> None:
        """Put the pointer at a place in the window, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> Path:
        """Save a picture of the whole page, not only of the part in the window."""
        self._save("Page.captureScreenshot", path, captureBeyondViewport=True)
        return path

    def pdf(self, path: Path) -> Path:
        """Save the page as it would be printed."""
        self._save("Page.printToPDF", path, printBackground=True, preferCSSPageSize=True)
        return path

    def _save(self, method: str, path: Path, **params: Any) -> None:
        path.write_bytes(base64.b64decode(self.call(method, **params)["data"]))

    def load(self, url: str, *, drawn: bool = True) -> None:
        """Open a URL and wait until it is loaded and, where scripts can tell, drawn."""
        self._events.discard("Page.loadEventFired")
        answer = self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise RuntimeError(f"{url}: {answer['errorText']}")
        while "Page.loadEventFired" not in self._events:
            self._receive()
        if drawn:
            self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def _send(self, number: int, method: str, params: dict[str, Any]) -> None:
        message = {"id": number, "sessionId": self._session, "method": method, "params": params}
        self._connection.send(json.dumps(message))

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=REPLY_SECONDS))
        if message.get("sessionId") == self._session and "method" in message:
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            words = [str(a.get("value", a.get("description"))) for a in params["args"]]
            self.problems.append(f"console.{params['type']}: {' '.join(words)}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.problems.append(f"exception: {thrown}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['source']}: {params['entry']['text']}")


class Browser:
    """A running browser; every page is a fresh one with its own cookies and cache."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._sent = 0

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent -= 1  # pages count upwards, so that answers cannot be mixed up
        self._connection.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=REPLY_SECONDS))
            if message.get("id") == self._sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: bool = True,
    ) -> Page:
        """Open a URL in a new page, in a window of this size in CSS pixels, and wait for it."""
        context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self._connection, session["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.load(url, drawn=scripts)
        return page


@contextmanager
def open_browser(executable: str) -> Iterator[Browser]:
    """Run a Chromium with a profile of its own; it is gone, with the profile, at the end."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "stderr.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        try:
            address = _debugger(process, Path(profile) / "DevToolsActivePort", log)
            with connect(address, max_size=None, compression=None, proxy=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _debugger(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    """Address of the DevTools socket, from the file Chromium writes once it listens."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if len(lines) >= 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    told = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Chromium did not start (exit status {process.poll()}): {told}")
