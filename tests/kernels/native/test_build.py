"""What can go wrong between a source and a library, and what then happens."""

import fcntl
import functools
import os
import shlex
import subprocess
import sys

import pytest
import torch

from qkeel.errors import QkeelWarning
from qkeel.kernels.native import build, operators

# Stands in for a compiler, which takes ten seconds: tells the libraries that it links, and hands out a given file.
COMPILER = """#!/bin/sh
case " $* " in *" -shared "*) echo linked >> {log}; sleep {seconds};; esac
while [ "$1" != -o ]; do shift; done
cp {source} "$2"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, of a process that has loaded no library yet."""
    unloaded = functools.cache(operators._loaded.__wrapped__)
    monkeypatch.setattr(operators, "_loaded", unloaded)
    monkeypatch.setenv("QKEEL_NATIVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiler(folder, script, monkeypatch):
    path = folder / "compiler"
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A compiler whose library no loader takes; the log of its calls."""
    (tmp_path / "anything").write_bytes(b"no library " * 50)
    words = {"log": tmp_path / "log", "source": tmp_path / "anything"}
    quoted = {name: shlex.quote(str(path)) for name, path in words.items()}
    compiler(tmp_path, COMPILER.format(**quoted, seconds=0), monkeypatch)
    return tmp_path / "log"


def calls(log):
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_the_library_is_compiled_once_and_then_found_and_is_this_users_alone(
    cache, log, monkeypatch
):
    before = os.umask(0)
    try:
        path = build.compiled()
    finally:
        os.umask(before)
    assert path.parent == cache
    assert [p.stat().st_mode & 0o077 for p in (cache, path)] == [0, 0]
    monkeypatch.setenv("CXX", "/no/compiler")
    assert build.compiled() == path
    assert calls(log) == 1


def test_another_processor_target_source_or_header_has_another_file(
    monkeypatch, tmp_path
):
    monkeypatch.delenv("QKEEL_NATIVE_ARCH", raising=False)
    keys = {build.key()}
    with monkeypatch.context() as m:
        m.setattr(torch, "__version__", "9.9.9")  # the library is for every torch
        keys.add(build.key())
    with monkeypatch.context() as m:
        m.setattr(build, "_processor", lambda: "aarch64 neon sve")
        keys.add(build.key())
    for processor in ("x86-64-v3", "x86-64-v4"):
        with monkeypatch.context() as m:
            m.setenv("QKEEL_NATIVE_ARCH", processor)
            keys.add(build.key())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    for name in ("norm_rope.cpp", "shared.h"):
        (tmp_path / name).write_text("")
        keys.add(build.key())
    assert len(keys) == 6


@pytest.mark.parametrize("arch", ["", "x86-64-v3"])
def test_the_compiler_is_given_the_processor_that_the_environment_names(
    arch, cache, monkeypatch
):
    words = cache.parent / "words"
    compiler(cache.parent, f'echo "$@" >> {words}; exit 1', monkeypatch)
    monkeypatch.setenv("QKEEL_NATIVE_ARCH", arch)
    with pytest.raises(build.BuildError):
        build.compiled()
    (line, *_) = [x for x in words.read_text().splitlines() if " -c " in x]
    assert f"={arch or 'native'} " in line


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'x.cpp:1: error: no such header' >&2; exit 1", "no such header"),
        (r"printf 'error: \351tait attendu\n' >&2; exit 1", "error: .tait attendu"),
        ("printf 'one\\ntwo\\nthree\\n' >&2; exit 1", "failed: three"),
        ("exit 3", "exit code 3"),
        ("exec sleep 300", r"timed out after 0\.2 seconds"),
        ("exec c++ -w -U__clang_major__ -D__GNUC__=11 $@", "expects GCC 12"),
    ],
)
def test_the_warning_of_a_failed_compiler_has_its_first_error(
    script, words, cache, monkeypatch
):
    if "sleep" in script:
        monkeypatch.setattr(build, "LONGEST", 0.2)
    compiler(cache.parent, script, monkeypatch)
    with pytest.warns(QkeelWarning, match=words):
        assert not operators.ready()
    assert not list(cache.glob("*.so"))


def test_a_file_that_does_not_load_is_made_once_more_then_given_up(cache, log):
    with pytest.warns(QkeelWarning, match="without its compiled kernels"):
        assert not operators.ready()
    assert calls(log) == 2


def give_away(path, m):
    """Makes a folder another user's; where that takes root, makes this process another user's."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        m.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def open_to_a_group(path, m):
    path.chmod(0o770)


@pytest.mark.parametrize("spoil", [give_away, open_to_a_group])
def test_a_folder_that_others_could_have_written_is_not_used_and_one_warning_says_so(
    spoil, cache, log, monkeypatch
):
    build.compiled()
    spoil(cache, monkeypatch)
    with pytest.warns(QkeelWarning, match="its cache") as warned:
        assert [operators.ready(), operators.ready()] == [False, False]
    assert len(warned) == 1
    assert calls(log) == 1


def test_waiting_for_another_process_ends(cache, log, monkeypatch):
    monkeypatch.setattr(build, "PATIENCE", 0.2)
    cache.mkdir(mode=0o700)
    with open(cache / f"{build.NAME}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.warns(QkeelWarning, match="another process has held"):
            assert not operators.ready()
    assert not log.exists()
    build.compiled()
    assert log.exists()


def test_off_means_off(cache, log, monkeypatch):
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    assert not operators.ready()
    assert not cache.exists()


USE = """
import torch, qkeel
from qkeel.kernels.native import operators
q = torch.linspace(-1, 1, 2 * 4 * 16).view(1, 2, 4, 16)
out = qkeel.attention(q, q, q, spec=qkeel.preset("nanochat"))
print(operators.ready(), f"{out.double().sum().item():.4f}")
"""


@pytest.mark.slow
def test_two_processes_at_once_compile_once_and_agree(library, cache, monkeypatch):
    log = cache.parent / "log"
    script = COMPILER.format(log=log, source=library, seconds=1)
    compiler(cache.parent, script, monkeypatch)
    # New interpreters: one that is forked was seen to compile in the name of the server that it came from.
    command = [sys.executable, "-W", "error", "-c", USE]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]
    first, second = [process.communicate(timeout=500)[0] for process in running]
    assert first == second
    assert first.startswith("True")
    assert calls(log) == 1
