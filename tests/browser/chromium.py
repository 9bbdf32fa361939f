"""One headless Chromium for all pages of a test session, spoken to over its debugging pipe; no library is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

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
)
PATIENCE = 60.0  # seconds for one answer
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(drawn, 30))))"


class Chromium:
    """A browser; `open` shows a page in a tab of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = [
            "bash",
            "-c",
            shell,
            program,
            *FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._sent, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **params: object) -> dict[str, Any]:
        """Asks for something and returns the answer; events that come before it are kept."""
        self._sent += 1
        message = {
            "id": self._sent,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == self._sent)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def wait(self, method: str, session: str) -> None:
        """Waits for an event."""
        said = [
            event
            for event in self.events
            if (event.get("method"), event.get("sessionId")) == (method, session)
        ]
        if not said:
            self._until(
                lambda found: (
                    (found.get("method"), found.get("sessionId")) == (method, session)
                )
            )

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._rest:
                one, _, self._rest = self._rest.partition(b"\0")
                found = json.loads(one)
                if "method" in found:
                    self.events.append(found)
                if wanted(found):
                    return found
            ready, _, _ = select.select(
                [self._in], [], [], max(0.0, end - time.monotonic())
            )
            assert ready, "Chromium did not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more

    def open(
        self, address: str, *, width: int = 1280, height: int = 1000, dark: bool = False
    ) -> Tab:
        """Opens a page, and returns when it is drawn."""
        return Tab(self, address, width, height, "dark" if dark else "light")

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)


class Tab:
    """One page."""

    def __init__(
        self, browser: Chromium, address: str, width: int, height: int, scheme: str
    ) -> None:
        self.browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")[
            "targetId"
        ]
        self.session = browser.call(
            "Target.attachToTarget", targetId=self._target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        browser.events.clear()
        self._call("Page.navigate", url=address)
        browser.wait("Page.loadEventFired", self.session)
        self.run(DRAWN)

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def run(self, script: str) -> Any:
        """Evaluates JavaScript, promises too, and returns its value."""
        done = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    @property
    def console(self) -> list[str]:
        """What the page's console said since it was opened."""
        spoken = (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
        )
        return [
            json.dumps(event["params"])
            for event in self.browser.events
            if event["method"] in spoken
        ]

    @property
    def html(self) -> str:
        """The page as it stands."""
        return self.run("document.documentElement.outerHTML")

    def picture(self) -> bytes:
        """What is seen of it, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """Closes the tab."""
        self.browser.call("Target.closeTarget", targetId=self._target)
