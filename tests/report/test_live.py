"""The live page: served to this machine alone, made anew when the files change, stopped without a trace."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from synthetic_study import grid, make_study
from synthetic_watch import Seen, make_watch

from qkeel.errors import InvalidValueError
from qkeel.monitor import RunDirectorySink
from qkeel.records import append_line
from qkeel.report.live_page import LiveServer, serve

SMALL = Seen(layers=2, heads=2, samples=4, complete=False)


def get(server: LiveServer, path: str = "/", host: str | None = None, method: str = "GET") -> tuple[int, str]:
    port = int(server.url.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(method, path, headers={} if host is None else {"Host": host.replace("PORT", str(port))})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def state(server: LiveServer) -> str:
    return json.loads(get(server, "/state.json")[1])["state"]


def test_the_page_follows_the_directory(tmp_path: Path):
    run = make_watch(tmp_path / "run", dataclasses.replace(SMALL, complete=False))
    with serve(run) as server:
        status, before = get(server)
        assert status == 200
        assert "up to step 30" in before
        old = state(server)
        assert f'data-state="{old}"' in before
        assert state(server) == old
        append_line(run / "events.jsonl", {"event": "a thing happened", "step": 30})
        assert state(server) != old
        assert "a thing happened" in get(server)[1]


def test_a_live_page_may_ask_its_own_server_and_nobody_else(tmp_path: Path):
    with serve(make_watch(tmp_path / "run", SMALL)) as server:
        page = get(server)[1]
    assert "default-src &#x27;none&#x27;" in page
    assert "connect-src &#x27;self&#x27;" in page


@pytest.mark.parametrize(
    "host", ["evil.example:PORT", "evil.example", "127.0.0.1.evil.example:PORT", "127.0.0.1", "", "localhost:1"]
)
def test_another_hosts_name_is_refused(host: str, tmp_path: Path):
    with serve(make_watch(tmp_path / "run", SMALL)) as server:
        status, body = get(server, host=host)
        assert status == 403
        assert "GPT2" not in body
        assert get(server, host="localhost:PORT")[0] == 200


def test_it_listens_on_the_loopback_alone(tmp_path: Path):
    with serve(tmp_path) as server:
        assert server.url.startswith("http://127.0.0.1:")
        with pytest.raises(OSError, match=r"."):  # on all addresses it would answer at this one too
            socket.create_connection(("127.0.0.2", int(server.url.rstrip("/").rpartition(":")[2])), timeout=5)


def test_there_is_nothing_but_the_page(tmp_path: Path):
    run = make_watch(tmp_path / "run", SMALL)
    with serve(run) as server:
        for path in ("/config.json", "/../run/config.json", "/%2e%2e/", "/?x"):
            assert get(server, path)[0] == 404
        assert get(server, method="POST")[0] == 501
        assert get(server, method="HEAD") == (200, "")


def test_before_the_first_record_the_page_waits(tmp_path: Path):
    with serve(tmp_path / "later") as server:
        status, page = get(server)
        assert status == 200
        assert "Waiting for the first record" in page
        old = state(server)
        sink = RunDirectorySink(tmp_path / "later")
        sink.open({"model": "Toy", "sites": []})
        assert state(server) != old
        assert "Toy, watched" in get(server)[1]


def test_a_damaged_file_is_told_on_the_page(tmp_path: Path):
    run = make_watch(tmp_path / "run", SMALL)
    (run / "heads.json").write_text("{}")
    with serve(run) as server:
        status, page = get(server)
    assert status == 200
    assert "heads.json is not complete JSON (it has no checksum" in page


def test_a_study_has_a_live_page_too(tmp_path: Path):
    study = make_study(tmp_path / "study", grid(("none", "qk_norm"), (0.01, 0.1)))
    with serve(study) as server:
        old = state(server)
        assert "Learning-rate study" in get(server)[1]
        next((study / "runs").glob("*/metrics.jsonl")).touch()
        (next((study / "runs").iterdir()) / "new").write_text("")
        assert state(server) != old


def test_whether_the_run_is_over_is_reported(tmp_path: Path):
    run = make_watch(tmp_path / "run", SMALL)
    with serve(run) as server:
        assert json.loads(get(server, "/state.json")[1])["over"] is False
        (run / "DONE").write_text("")
        assert json.loads(get(server, "/state.json")[1])["over"] is True


def test_closing_frees_the_port_and_leaves_no_thread(tmp_path: Path):
    server = serve(tmp_path)
    port = int(server.url.rstrip("/").rpartition(":")[2])
    waiting = threading.Thread(target=server.wait)
    waiting.start()
    server.close()
    server.close()
    waiting.join(timeout=300)
    assert not waiting.is_alive()
    assert not any(thread.name == "qkeel-live" for thread in threading.enumerate())
    with socket.socket() as other:
        other.settimeout(1)
        assert other.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_in_use_is_reported(tmp_path: Path):
    with serve(tmp_path) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(InvalidValueError, match="Choose another port, or 0 for any free port"):
            serve(tmp_path, port)
    with pytest.raises(InvalidValueError, match="Choose another port, or 0 for any free port"):
        serve(tmp_path, 99999)


def test_the_run_goes_on_while_the_page_is_made(tmp_path: Path):
    """A reader never stands in the writer's way, and never sees half a page."""
    stop = threading.Event()
    pages: list[str] = []

    def read(server: LiveServer) -> None:
        while not stop.is_set():
            pages.append(get(server)[1])
            time.sleep(0.01)

    with serve(tmp_path / "run") as server:
        reader = threading.Thread(target=read, args=(server,))
        reader.start()
        make_watch(tmp_path / "run", Seen(layers=2, heads=2, samples=80, complete=True))
        stop.set()
        reader.join(timeout=300)
        last = get(server)[1]
    assert "790 steps" in last
    assert all(page.rstrip().endswith("</html>") for page in pages)
    assert not any("cannot be created" in page for page in pages)
