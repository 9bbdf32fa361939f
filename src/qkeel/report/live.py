"""The page of a run that goes on, kept up to date: a server that answers to this machine alone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import final

from qkeel.errors import InvalidValueError, QkeelError
from qkeel.records import RunDirectory, RunStatus
from qkeel.report import render
from qkeel.report.html.page import Page, Section, empty_note

HOST = "127.0.0.1"
NAMES = frozenset({HOST, "localhost"})  # names of this machine; a request by another name comes from a foreign page


@final
class LiveServer:
    """A server that runs in a thread of its own until `close()`; it only reads what the run writes."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self._page = _Page(directory)
        handler = functools.partial(_Handler, self._page)
        try:
            self._server = _Server((HOST, port), handler)
        except (OSError, OverflowError) as error:
            text = f"cannot listen on {HOST}:{port}: {error}. Expected a free port; choose another one, or 0 for any."
            raise InvalidValueError(text) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="qkeel-live")
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def wait(self) -> None:
        """Blocks until the server is closed, by another thread or by Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            while self._thread.is_alive():
                self._thread.join(0.5)

    def close(self) -> None:
        """Stops the server; a second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(directory: str | Path, port: int = 0) -> LiveServer:
    """Shows a run directory or a study on http://127.0.0.1; the page is made again whenever the files change.

    Args:
        directory: what `qkeel.watch`, `qkeel run` or `qkeel study` writes; it need not exist yet.
        port: the port to listen on; 0 for any free one.

    Returns: the running server: `url`, `wait()`, `close()`; a context manager.

    Raises: InvalidValueError if nothing can listen on the port.
    """
    return LiveServer(Path(directory), port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: a browser may close a connection in the middle of an answer."""


class _Page:
    """The page of a directory and the state of the files that it was made from."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._made = ("", b"")

    def state(self) -> str:
        """Returns a word that changes whenever a file changes that the page is made from."""
        places = [self.directory, *sorted(self.directory.glob("runs/*"))]
        seen = []
        for path in sorted(file for place in places if place.is_dir() for file in place.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                seen.append((str(path), about.st_size, about.st_mtime_ns))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def html(self) -> bytes:
        """Returns the page of the files as they are now."""
        with self._lock:
            state = self.state()
            if self._made[0] != state:
                self._made = (state, self._make(state).encode())
            return self._made[1]

    def over(self) -> bool:
        """Returns whether the run is done."""
        return RunDirectory(self.directory).status is RunStatus.DONE

    def _make(self, state: str) -> str:
        missing = RunDirectory(self.directory).status is RunStatus.MISSING
        if missing and not (self.directory / "study.json").exists():
            return _waiting("Waiting for the first record", f"The directory {self.directory} is empty so far.", state)
        try:
            return render.page(self.directory).html(live=state)
        except QkeelError as error:  # such as a file that is being written; the next state has it whole
            return _waiting("The page cannot be made", str(error), state)


def _waiting(title: str, text: str, state: str) -> str:
    note = empty_note(f"{text} The page asks for news every two seconds.")
    return Page(title=title, sections=[Section("waiting", "", note)], in_place=True).html(live=state)


class _Handler(BaseHTTPRequestHandler):
    server_version = "qkeel"
    sys_version = ""

    def __init__(self, page: _Page, *rest: object) -> None:
        self.page = page
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answers with the page at /, and its state at /state.json."""
        if not self._from_here():
            text = "This server answers only requests from this machine, to 127.0.0.1 or localhost."
            self._answer(HTTPStatus.FORBIDDEN, text.encode(), "text/plain")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, self.page.html(), "text/html")
        elif self.path == "/state.json":
            state = {"state": self.page.state(), "over": self.page.over()}
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
        """Says nothing: the terminal belongs to the run."""
