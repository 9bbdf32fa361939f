"""What can go wrong between a source and a library, and what then happens."""

from __future__ import annotations

import fcntl
import functools
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkeel.errors import QkeelWarning
from qkeel.kernels.native import build, operators

# Stands in for a compiler, which takes ten seconds: tells the libraries that it links, and hands out a given file.
COMPILER = """
import pathlib, sys, time
if "-shared" in sys.argv:
    with open({log!r}, "a") as log:
        log.write("linked\\n")
    time.sleep({seconds})
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_bytes(pathlib.Path({source!r}).read_bytes())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of a process that has loaded no library yet."""
    monkeypatch.setattr(
        operators, "_loaded", functools.cache(operators._loaded.__wrapped__)
    )
    monkeypatch.setenv("QKEEL_NATIVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiler(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0
) -> Path:
    """Puts a compiler in place that makes copies of `source`; returns the log of its calls."""
    script, log, text = folder / "compiler", folder / "log", folder / "compiler.py"
    text.write_text(
        COMPILER.format(log=str(log), seconds=seconds, source=str(source)),
        encoding="utf-8",
    )
    # By the shell: a line of #! takes no interpreter with a space in its path.
    command = shlex.join([sys.executable, "-S", str(text)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return log


def calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def anything(tmp_path: Path) -> Path:
    """Bytes that no loader takes."""
    path = tmp_path / "anything"
    path.write_bytes(b"no library " * 50)
    return path


def test_the_library_is_compiled_once_and_then_found(
    cache: Path,
    anything: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = compiler(cache.parent, anything, monkeypatch)
    path = build.compiled()
    assert path.parent == cache
    assert build.compiled() == path
    assert calls(log) == 1
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert "QKEEL_NATIVE=0" in told[0]
    assert sorted(p.name for p in cache.iterdir()) == [path.name, f"{build.NAME}.lock"]


def test_a_read_only_cache_with_the_library_in_it_serves(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(cache.parent, anything, monkeypatch)
    path = build.compiled()
    monkeypatch.setattr(
        Path, "mkdir", lambda *_, **__: pytest.fail("wrote to the cache")
    )
    monkeypatch.setenv("CXX", "/no/compiler")
    assert build.compiled() == path


def test_another_processor_target_source_or_header_has_another_file_and_another_torch_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QKEEL_NATIVE_ARCH", raising=False)
    keys = {build.key()}
    with monkeypatch.context() as m:
        m.setattr(torch, "__version__", "9.9.9")
        keys.add(build.key())
    with monkeypatch.context() as m:
        m.setattr(build, "_processor", lambda: "aarch64 neon sve")
        keys.add(build.key())
    for processor in ("x86-64-v3", "x86-64-v4"):
        with monkeypatch.context() as m:
            m.setenv("QKEEL_NATIVE_ARCH", processor)
            keys.add(build.key())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / "norm_rope.cpp").write_text("int main() {}")
    keys.add(build.key())
    (tmp_path / "shared.h").write_text("")
    keys.add(build.key())
    assert len(keys) == 6


def test_the_compiler_is_given_the_processor_that_the_environment_names(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, log = cache.parent / "compiler", cache.parent / "log"
    script.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    for arch, expected in (("", "=native "), ("x86-64-v3", "=x86-64-v3 ")):
        monkeypatch.setenv("QKEEL_NATIVE_ARCH", arch)
        with pytest.raises(build.BuildError, match="failed"):
            build.compiled()
        given = next(
            line for line in reversed(log.read_text().splitlines()) if " -c " in line
        )
        assert expected in given
        assert given.count("-march=") + given.count("-mcpu=") == 1


@pytest.mark.parametrize(
    ("macros", "told"),
    [
        ("-U__clang_major__ -D__GNUC__=11", "expects GCC 12"),
        ("-D__clang_major__=13", "or clang 14 or newer; set CXX"),
    ],
)
def test_an_old_compiler_is_refused_by_the_sources(
    macros: str, told: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"c++ -w {macros}")
    with pytest.warns(QkeelWarning, match=told):
        assert not operators.ready()


def test_cxx_may_name_a_wrapper_and_options(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(cache.parent, anything, monkeypatch)
    wrapper = cache.parent / "wrapper"
    wrapper.write_text('#!/bin/sh\n[ "$2" = -fast ] && exec "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("CXX", f"{wrapper} {os.environ['CXX']} -fast")
    build.compiled()
    assert calls(log) == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'x.cpp:1: error: no such header' >&2; exit 1", "no such header"),
        (
            r"printf 'x.cpp:1: error: \351tait attendu\n' >&2; exit 1",
            "error: .tait attendu",
        ),
        ("exit 3", "exit code 3"),
        ('while [ "$1" != -o ]; do shift; done; mkfifo "$2"', "exit code 0"),
    ],
    ids=["an error", "not UTF-8", "no word", "a pipe for a library"],
)
def test_the_warning_of_a_failed_compiler_has_its_first_error(
    script: str, told: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.parent / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.warns(QkeelWarning, match=told):
        assert not operators.ready()
    assert [p.name for p in cache.iterdir()] == [f"{build.NAME}.lock"]


def test_a_compiler_that_hangs_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LONGEST", 0.2)
    path = cache.parent / "compiler"
    path.write_text("#!/bin/sh\nexec sleep 300\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.warns(QkeelWarning, match=r"timed out after 0\.2 seconds"):
        assert not operators.ready()


def test_a_file_that_does_not_load_is_made_once_more_then_given_up(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(
        cache.parent, anything, monkeypatch
    )  # what a library of another architecture looks like
    with pytest.warns(QkeelWarning, match="without its compiled kernels"):
        assert not operators.ready()
    assert calls(log) == 2


def give_away(path: Path, m: pytest.MonkeyPatch) -> None:
    """Makes a folder another user's; where that takes root, makes this process another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        m.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def linked(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


SPOILT: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "another user's": (give_away, "its cache .* belongs to user"),
    "that all can write": (
        lambda path, m: path.chmod(0o777),
        r"its cache .* \(mode 0777\)",
    ),
    "that a group can write": (
        lambda path, m: path.chmod(0o770),
        r"its cache .* \(mode 0770\)",
    ),
    "a link": (lambda path, m: linked(path), "its cache .* is a link"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_folder_that_others_could_have_written_is_not_used_and_one_warning_says_why(
    what: str, cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(cache.parent, anything, monkeypatch)
    build.compiled()
    spoil, told = SPOILT[what]
    spoil(cache, monkeypatch)
    with pytest.warns(QkeelWarning, match=told) as warned:
        assert [operators.ready(), operators.ready()] == [False, False]
    assert len(warned) == 1
    assert calls(log) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_what_root_has_put_there_serves_every_user(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(cache.parent, anything, monkeypatch)
    path = build.compiled()
    cache.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("CXX", "/no/compiler")
    assert build.compiled() == path


def test_what_is_made_is_this_users_alone_whatever_the_umask(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(cache.parent, anything, monkeypatch)
    monkeypatch.setenv("QKEEL_NATIVE_CACHE", str(cache / "below"))
    before = os.umask(0)
    try:
        path = build.compiled()
    finally:
        os.umask(before)
    assert [
        stat.S_IMODE(each.stat().st_mode) & 0o077
        for each in (cache, cache / "below", path)
    ] == [0, 0, 0]


def test_waiting_for_another_process_is_told_and_ends(
    cache: Path,
    anything: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = compiler(cache.parent, anything, monkeypatch)
    monkeypatch.setattr(build, "REPORT_AFTER", 0.0)
    monkeypatch.setattr(build, "PATIENCE", 0.2)
    cache.mkdir(mode=0o700)
    with open(cache / f"{build.NAME}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.warns(
            QkeelWarning,
            match="another process has held .*qkeel_native.lock for more than",
        ) as warned:
            assert not operators.ready()
    assert len(warned) == 1
    assert (
        capfd.readouterr().err.count(
            "waiting up to 0 s for another process to compile its kernels"
        )
        == 1
    )
    assert not log.exists()
    build.compiled()
    assert log.exists()


def test_what_a_killed_process_leaves_is_removed_by_the_next(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, pid = cache.parent / "endless", cache.parent / "pid"
    script.write_text(f"""#!/bin/sh
echo half > "$TMPDIR/half.o"
echo $$ > {shlex.quote(f"{pid}.new")} && mv {shlex.quote(f"{pid}.new")} {shlex.quote(str(pid))}
exec sleep 300
""")
    script.chmod(0o700)
    use = "from qkeel.kernels.native import build; build.compiled()"
    process = subprocess.Popen(
        [sys.executable, "-c", use], env={**os.environ, "CXX": str(script)}
    )
    try:
        while process.poll() is None and not pid.exists():
            time.sleep(0.02)
        process.kill()
        process.wait()
        assert (cache / f".{build.NAME}" / "half.o").read_text() == "half\n"
        compiler(cache.parent, anything, monkeypatch)
        path = build.compiled()
        assert sorted(p.name for p in cache.iterdir()) == [
            path.name,
            f"{build.NAME}.lock",
        ]
    finally:
        os.kill(
            int(pid.read_text()), signal.SIGKILL
        )  # the compiler, which outlives the killed process


def test_a_library_that_the_package_carries_is_taken_where_the_processor_can_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("QKEEL_NATIVE_ARCH", raising=False)
    monkeypatch.setattr(build, "_processor", lambda: "x86_64 sse2")
    assert build.carried_library() is None
    for target, needed in build.CARRIED.items():
        library = tmp_path / build.carried_name(target)
        monkeypatch.setattr(
            build, "_processor", lambda needed=needed: " ".join(["x86_64", *needed])
        )
        assert build.carried_library() is None
        library.touch()
        assert build.compiled() == library
    monkeypatch.setenv("QKEEL_NATIVE_ARCH", "x86-64-v2")
    assert build.carried_library() is None


def test_off_means_off(
    cache: Path, anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    log = compiler(cache.parent, anything, monkeypatch)
    assert not operators.ready()
    assert not log.exists()
    assert not cache.exists()


USE = """
import warnings
import torch, qkeel
from qkeel.kernels.attention import compiled as attention
from qkeel.kernels.native import operators
q = torch.linspace(-1, 1, 2 * 4 * 16).view(1, 2, 4, 16)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(3):
        out = qkeel.attention(q, q, q, spec=qkeel.preset("nanochat"))
    print(operators.ready(), attention.ready(), len(told), f"{out.double().sum().item():.4f}")
"""


def start(**environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", USE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


@pytest.mark.slow
def test_two_processes_at_once_compile_once_and_agree(
    library: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(cache.parent, library, monkeypatch, seconds=1.0)
    # New interpreters: one that is forked was seen to compile in the name of the server that it came from.
    running = [start(), start()]
    said = [process.communicate(timeout=500) for process in running]
    one, two = [out.split() for out, _ in said]
    assert one == two, said
    assert one[:3] == ["True", "True", "0"], said
    assert calls(log) == 1
    assert sum(err.count("compiling") for _, err in said) == 1
