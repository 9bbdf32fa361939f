"""The live page of a run, which is served only to this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import final

from qkeel.errors import InvalidValueError, QkeelError
from qkeel.records import RunDirectory, RunStatus
from qkeel.report.html import Page, Section, empty_note
from qkeel.report.render import page

HOST = "127.0.0.1"
# Requests with another host name come from other web pages (DNS rebinding) and are rejected.
NAMES = frozenset({HOST, "localhost"})


@final
class LiveServer(ThreadingHTTPServer):
    """Serves the page of a directory in a separate thread until `close()`; it only reads the files of the run.

    The page is cached until the files change.
    """

    daemon_threads = True  # an open connection does not keep the process alive
    allow_reuse_address = False  # a second server on the same port fails instead of shadowing the first

    def __init__(self, directory: Path, port: int) -> None:
        self.directory, self._caching, self._made = directory, threading.Lock(), ("", b"")
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            text = f"cannot listen on {HOST}:{port}: {error}. Choose another port, or 0 for any free port."
            raise InvalidValueError(text) from error
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True, name="qkeel-live")
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def wait(self) -> None:
        """Blocks until the server is closed, by another thread or by Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            while self._thread.is_alive():
                self._thread.join(0.5)

    def close(self) -> None:
        """Stops the server; a second call does nothing."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores the error, because browsers may close a connection in the middle of a response."""

    def state(self) -> str:
        """Returns a string that changes whenever a file of the page changes."""
        # Sizes and times are sufficient, because records are only appended and other files are replaced.
        places = [self.directory, *sorted(self.directory.glob("runs/*"))]
        seen = []
        for path in sorted(file for place in places if place.is_dir() for file in place.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                seen.append((str(path), about.st_size, about.st_mtime_ns))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def html(self) -> bytes:
        """Returns the page for the current files."""
        with self._caching:
            state = self.state()
            if self._made[0] != state:
                self._made = (state, self._make(state).encode())
            return self._made[1]

    @property
    def over(self) -> bool:
        """True if the run is done."""
        return RunDirectory(self.directory).status is RunStatus.DONE

    def _make(self, state: str) -> str:
        missing = RunDirectory(self.directory).status is RunStatus.MISSING
        title, text = "Waiting for the first record", f"The directory {self.directory} is empty so far."
        if not missing or (self.directory / "study.json").exists():
            try:
                return page(self.directory).html(live=state)
            except QkeelError as error:  # e.g. a file is being written; the next state will be complete
                title, text = "The page cannot be created", str(error)
        note = empty_note(f"{text} The page looks for new records every two seconds.")
        return Page(title=title, sections=[Section("waiting", "", note)], in_place=True).html(live=state)


def serve(directory: str | Path, port: int = 0) -> LiveServer:
    """Serves the page of a run directory or a study on http://127.0.0.1, and updates it when the files change.

    Args:
        directory: the directory that `qkeel.watch`, `qkeel run` or `qkeel study` writes; it need not exist yet.
        port: the port on which to listen; 0 for any free port.

    Returns:
        The running server, a context manager with `url`, `wait()` and `close()`.

    Raises:
        InvalidValueError: the server cannot listen on the port.
    """
    return LiveServer(Path(directory), port)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "qkeel"
    sys_version = ""

    def do_GET(self) -> None:
        """Responds to / with the page and to /state.json with its state."""
        if not self._from_here():
            text = "This server answers only requests from this machine, to 127.0.0.1 or localhost."
            self._answer(HTTPStatus.FORBIDDEN, text.encode(), "text/plain")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, self.server.html(), "text/html")
        elif self.path == "/state.json":
            state = {"state": self.server.state(), "over": self.server.over}
            self._answer(HTTPStatus.OK, json.dumps(state).encode(), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is nothing here; the page is at /.", "text/plain")

    do_HEAD = do_GET

    def _from_here(self) -> bool:
        name, _, port = (self.headers.get("Host") or "").rpartition(":")
        return name in NAMES and port == str(self.connection.getsockname()[1])

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the terminal belongs to the run."""
