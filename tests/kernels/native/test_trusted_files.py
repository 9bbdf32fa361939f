"""The folder of compiled libraries: code that others could have put there is not run, and one warning says why."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qkeel.errors import QkeelWarning
from qkeel.kernels.native import build
from qkeel.kernels.native.build import sealed
from qkeel.kernels.native.operators import OperatorSource

from .test_build import anything, cache, compiler

__all__ = ["anything", "cache"]

# Leaves a file where it is told to as soon as it is loaded.
CANARY = """
#include <fcntl.h>
#include <stdlib.h>
__attribute__((constructor)) static void sing() {
  const char* name = getenv("QKEEL_TEST_MARK" MARK);
  if (name) open(name, O_CREAT | O_WRONLY, 0600);
}
"""
NAME = "norm_rope"


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Libraries that show that they were loaded: each of its own mark."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("canaries")
    (folder / "canary.c").write_text(CANARY)

    @functools.cache
    def made(mark: str) -> bytes:
        command = ["c++", "-shared", "-fPIC", f'-DMARK="{mark}"', "canary.c", "-o", mark]
        subprocess.run(command, cwd=folder, check=True)
        return (folder / mark).read_bytes()

    return made


@pytest.fixture
def planted(cache: Path, canaries: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A sound library of a cache, of this user alone, and the file that it leaves when it is loaded."""
    mark = cache.parent / "loaded"
    monkeypatch.setenv("QKEEL_TEST_MARK_OWN", str(mark))
    monkeypatch.setenv("CXX", "/no/compiler")
    cache.mkdir(mode=0o700)
    path = cache / f"{NAME}-{build.key(NAME)}.so"
    path.write_bytes(sealed(canaries("_OWN")))
    path.chmod(0o700)
    return path, mark


def source() -> OperatorSource:
    return OperatorSource(NAME, {})


def give_away(path: Path, m: pytest.MonkeyPatch) -> None:
    """Makes a file another user's; where that takes root, makes this process another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        m.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def linked(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def nothing_at_the_end(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(path.parent.with_name("nothing"))


SPOILT: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "a folder of another user": (lambda path, m: give_away(path.parent, m), "its cache .* belongs to user"),
    "a file of another user": (give_away, "file .* belongs to user|cache .* belongs to user"),
    "a folder that all can write": (lambda path, m: path.parent.chmod(0o777), r"its cache .* \(mode 0777\)"),
    "a sticky folder that all can write": (lambda path, m: path.parent.chmod(0o1777), r"its cache .* \(mode 1777\)"),
    "a folder that a group can write": (lambda path, m: path.parent.chmod(0o770), r"its cache .* \(mode 0770\)"),
    "a file that all can write": (lambda path, m: path.chmod(0o666), r"the file .* \(mode 0666\)"),
    "a file that a group can write": (lambda path, m: path.chmod(0o720), r"the file .* \(mode 0720\)"),
    "a link in place of the folder": (lambda path, m: linked(path.parent), "its cache .* is a link"),
    "a link in place of the file": (lambda path, m: linked(path), "the file .* is a link"),
    "a link to nothing in place of the folder": (lambda path, m: nothing_at_the_end(path), "no C|is a link"),
    "a folder in place of the file": (lambda path, m: replaced(path, Path.mkdir), "not a regular file"),
    "a pipe in place of the file": (lambda path, m: replaced(path, os.mkfifo), "not a regular file"),
    "a file in place of the folder": (lambda path, m: replaced_by_a_file(path), os.strerror(errno.ENOTDIR)),
}


def replaced_by_a_file(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("what", SPOILT)
def test_what_others_could_have_written_is_not_loaded_and_one_warning_says_why(
    what: str, planted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mark = planted
    spoil, told = SPOILT[what]
    spoil(path, monkeypatch)
    with pytest.warns(QkeelWarning, match=told) as warned:
        found = [source().ready(), source().ready(), source().functions()]
    assert found == [False, False, None]
    assert len(warned) == 1
    assert not mark.exists()


def test_the_users_own_library_is_loaded_in_a_folder_that_all_can_write_and_nobody_rename(
    planted: tuple[Path, Path],
) -> None:
    path, mark = planted
    path.parent.parent.chmod(0o1777)
    assert source().ready()
    assert mark.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_what_root_has_put_there_serves_every_user(planted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, mark = planted
    path.parent.chmod(0o755)
    path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert source().ready()
    assert mark.exists()


def test_a_file_that_is_replaced_after_the_check_is_not_loaded(
    planted: tuple[Path, Path], canaries: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mark = planted
    other, load = path.with_name("other"), ctypes.CDLL
    monkeypatch.setenv("QKEEL_TEST_MARK_OTHER", str(mark.with_name("other_loaded")))
    other.write_bytes(sealed(canaries("_OTHER")))

    def replace_and_load(name: str) -> ctypes.CDLL:
        other.replace(path)
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", replace_and_load)
    assert source().ready()
    assert not other.exists()
    assert mark.exists()
    assert not mark.with_name("other_loaded").exists()


def test_what_is_made_is_this_users_alone_whatever_the_umask(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(cache.parent, anything, monkeypatch)
    monkeypatch.setenv("QKEEL_NATIVE_CACHE", str(cache / "below"))
    before = os.umask(0)
    try:
        path = build.compiled(NAME)
    finally:
        os.umask(before)
    made = [cache, cache / "below", path, path.with_name(f"{NAME}.lock")]
    assert [stat.S_IMODE(each.stat().st_mode) & 0o077 for each in made] == [0, 0, 0, 0]
    assert sorted(path.parent.iterdir()) == sorted(made[2:])


def test_waiting_for_another_process_is_told_and_ends(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = compiler(cache.parent, anything, monkeypatch)
    monkeypatch.setattr(build, "REPORT_AFTER", 0.0)
    monkeypatch.setattr(build, "PATIENCE", 0.2)
    cache.mkdir(mode=0o700)
    with open(cache / f"{NAME}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.warns(QkeelWarning, match="another process has held .*norm_rope.lock for more than") as warned:
            assert not source().ready()
    assert len(warned) == 1
    assert capfd.readouterr().err.count("waiting up to 0 s for another process to compile norm_rope") == 1
    assert not log.exists()
    build.compiled(NAME)
    assert log.exists()


# Stands in for a compiler that leaves half a file and never ends.
ENDLESS = """#!/bin/sh
[ "$1" = -E ] && exit  # asked for its version
echo half > "$TMPDIR/made.so"
echo $$ > {pid}.new && mv {pid}.new {pid}
exec sleep 300
"""


def running(pid: int) -> bool:
    """Whether there is such a process; one that nobody has waited for is none."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_what_a_killed_process_leaves_is_removed_by_the_next(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, pid = cache.parent / "endless", cache.parent / "pid"
    script.write_text(ENDLESS.format(pid=shlex.quote(str(pid))))
    script.chmod(0o700)
    use = f"from qkeel.kernels.native import build; build.compiled({NAME!r})"
    process = subprocess.Popen([sys.executable, "-c", use], env={**os.environ, "CXX": str(script)})
    try:
        while process.poll() is None and not pid.exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (cache / f".{NAME}.so").write_bytes(b"half")  # as if killed while it wrote the result
        assert (cache / f".{NAME}" / "made.so").read_text() == "half\n"
        # Its compiler ends with it, though it was killed alone.
        deadline = time.monotonic() + 300
        while running(int(pid.read_text())) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running(int(pid.read_text()))
    finally:
        process.kill()
        if pid.exists() and running(int(pid.read_text())):
            os.kill(int(pid.read_text()), signal.SIGKILL)
    compiler(cache.parent, anything, monkeypatch)
    path = build.compiled(NAME)
    assert sorted(p.name for p in cache.iterdir()) == [path.name, f"{NAME}.lock"]
