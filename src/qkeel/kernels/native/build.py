"""Compiles the C++ kernels on first use, caches them, and loads only files that no other user could have written."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import math
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from qkeel.records.disk import hold_lock

# The cache folder of compiled libraries, and the checks before a file is loaded.
#
# All checks use file descriptors, never names, so the checked file is the loaded one even if files are renamed
# meanwhile.

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DIGEST = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """There is no compiled library; the message gives the reason."""


def cache_folder() -> Path:
    """Returns QKEEL_NATIVE_CACHE, or qkeel/native in the user's cache."""
    own = os.environ.get("QKEEL_NATIVE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkeel" / "native"


@contextmanager
def opened_folder(make: bool) -> Iterator[int]:
    """Yields a descriptor of the cache folder; `make` creates it and any missing parents, for this user only.

    Raises:
        BuildError: the folder is a link, or another user owns it or can write to it.
        OSError: the folder cannot be opened.
    """
    path = cache_folder()
    if path.is_symlink():
        raise BuildError(f"its cache {path} is a link; set QKEEL_NATIVE_CACHE to the folder itself")
    if make:
        for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_owner(os.fstat(folder), f"its cache {path}")
        yield folder
    finally:
        os.close(folder)


def opened_library(folder: int, name: str) -> int | None:
    """Returns a descriptor of a library in the folder, which the caller closes; None if it is missing or incomplete.

    Raises:
        BuildError: the library is a link, a folder or a device, or another user owns it or can write to it.
    """
    where = f"the file {cache_folder() / name}"
    try:
        # Opening a pipe would otherwise wait for a writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BuildError(f"{where} is a link; delete it") from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise BuildError(f"{where} is not a regular file; delete it")
        _check_owner(found, where)
        with open(file, "rb", closefd=False) as content:
            sound = _sound(content.read())
    except BaseException:
        os.close(file)
        raise
    if sound:
        return file
    os.close(file)
    return None


def sealed(content: bytes) -> bytes:
    """Appends a library's checksum at the end, which loaders ignore."""
    return content + hashlib.sha256(content).digest()


def _sound(content: bytes) -> bool:
    """True if the checksum matches. Loading an incomplete library could crash the interpreter."""
    whole, digest = content[:-_DIGEST], content[-_DIGEST:]
    return bool(whole) and hashlib.sha256(whole).digest() == digest


def _check_owner(found: os.stat_result, what: str) -> None:
    """Raises BuildError if users other than this one and root could have written the file or folder."""
    if found.st_uid not in (0, os.geteuid()):
        raise BuildError(
            f"{what} belongs to user {found.st_uid}, who could put any code there; delete it, or set "
            "QKEEL_NATIVE_CACHE to a folder of your own"
        )
    if found.st_mode & _BY_OTHERS:
        raise BuildError(
            f"{what} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}), who could put any code "
            "there; delete it, or set QKEEL_NATIVE_CACHE to a folder of your own"
        )


# Running a compiler so that it ends with this process, however this process ends.
#
# A shell in its own process group runs the command, next to a process that waits for the end of standard input: a pipe
# that closes when the Python process ends, even by kill -9. It then kills the whole group, since a compiler starts
# further processes that would outlive it.
_GUARDED = (
    'exec 3<&0 </dev/null; (read -r _ <&3; kill -9 0) >/dev/null 2>&1 & "$@" 3<&-; code=$?; kill -9 $!; exit $code'
)


def run_compiler(
    command: Sequence[str], *, timeout: float, folder: str, environment: Mapping[str, str], keep_open: Sequence[int]
) -> subprocess.CompletedProcess[str]:
    """Runs a command until it ends and returns its exit code and output. None of its processes outlives this process.

    Args:
        command: the compiler and its options.
        timeout: seconds after which the command is killed.
        folder: working directory.
        environment: environment variables.
        keep_open: descriptors that the command inherits.

    Raises:
        subprocess.TimeoutExpired: the command took longer than `timeout`.
    """
    reading, writing = os.pipe()
    try:
        return subprocess.run(
            ["/bin/sh", "-c", _GUARDED, "sh", *command],
            stdin=reading,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=folder,
            env=environment,
            pass_fds=tuple(keep_open),
            process_group=0,
        )
    finally:
        os.close(reading)
        os.close(writing)


# Compiling the C++ sources once per machine and torch version, into a cache whose files are checked before use.

FOLDER = Path(__file__).parent / "source"  # the sources and their shared headers
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # Makes a product and its sum round once everywhere. For some processors GCC splits them in loops with one sum, so
    # the last rows of a block would get other bits than the rest.
    *(("--param=avoid-fma-max-bits=0",) if platform.machine() == "x86_64" else ()),
)
_TORCH = Path(torch.__file__).parent
# Include paths of torch and Python. Without Python's headers, a source is compiled without its Python functions.
_HEADERS = (_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include"))
INCLUDE = tuple(f"-I{folder}" for folder in _HEADERS)
OLDEST = {"GCC": 12, "clang": 14}  # GCC 11 has no __builtin_shufflevector
LONGEST = 600.0  # seconds a compiler may take
REPORT_AFTER = 2.0  # seconds of waiting for another process before a message on stderr
PATIENCE = 300.0  # seconds of waiting before torch is used instead


def compiled(name: str) -> Path:
    """Returns the path of the library of `name`.cpp, compiling it if necessary.

    Raises:
        BuildError, OSError: see `opened`.
    """
    os.close(opened(name))
    return cache_folder() / _file_name(name)


def opened(name: str, from_scratch: bool = False) -> int:
    """Returns a checked descriptor of the library of `name`.cpp, from the cache or newly compiled.

    If two processes need the library, one compiles it while the other waits for a lock, which the system releases when
    the process that holds it and its compiler have ended. The library appears complete, by a single rename, after all
    other outputs have been removed. The next compilation removes what a killed process leaves behind.

    Args:
        name: the source's name.
        from_scratch: whether to ignore the cache.

    Raises:
        BuildError: there is no compiler, the compiler fails, another process takes longer than PATIENCE, or other users
            can write to the cache.
        OSError: the cache cannot be written.
    """
    file_name = _file_name(name)
    if not from_scratch and cache_folder().exists():
        with opened_folder(make=False) as folder:
            library = opened_library(folder, file_name)
        if library is not None:
            return library
    compiler = find_compiler()
    with opened_folder(make=True) as folder:
        before = _stamp(folder, file_name)
        with _locked(folder, name) as lock:
            library = opened_library(folder, file_name)
            if library is not None and not (from_scratch and _stamp(folder, file_name) == before):
                return library  # another process was faster
            if library is not None:
                os.close(library)
            _compile(os.path.abspath(compiler), name, folder, lock)
            library = opened_library(folder, file_name)
    if library is None:
        raise BuildError(f"{file_name} was changed right after it was written")
    return library


def find_compiler() -> str:
    """Returns the path of a compiler for the sources: CXX if it is set, otherwise c++ on the PATH.

    Raises:
        BuildError: there is no compiler, or it is older than OLDEST.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise BuildError("found no C++ compiler: put c++ on the PATH, or set CXX to a compiler")
    kind, version = _version(compiler)
    if version < OLDEST[kind]:
        oldest = " or ".join(f"{name} {number}" for name, number in OLDEST.items())
        raise BuildError(f"expected {oldest} or newer, got {kind} {version} as {compiler}; set CXX to a newer compiler")
    return compiler


def flags() -> tuple[str, ...]:
    """Returns FLAGS and the target processor: this machine's, or the one named by QKEEL_NATIVE_ARCH.

    The names are those of the compiler; with `x86-64-v3`, a machine with AVX512 runs the code of a machine with only
    AVX2.
    """
    option = "-march" if platform.machine() == "x86_64" else "-mcpu"
    return (*FLAGS, f"{option}={os.environ.get('QKEEL_NATIVE_ARCH') or 'native'}")


def key(name: str) -> str:
    """Returns a key that depends on source, headers, flags, torch, Python and processor, so that machines can share a
    cache."""
    texts = [(FOLDER / f"{name}.cpp").read_bytes(), *(path.read_bytes() for path in sorted(FOLDER.glob("*.h")))]
    built_for = f"{torch.__version__} {sys.implementation.cache_tag} {_processor()}"
    parts = (*texts, repr(flags()).encode(), built_for.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> tuple[str, float]:
    """Returns the compiler's kind and major version from its own macros; the version is ∞ if it has no such macro."""
    command, macros = [compiler, "-E", "-P", "-x", "c++", "-"], "__clang_major__ __GNUC__"
    try:
        found = subprocess.run(command, input=macros, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} did not report its version within {LONGEST} s") from error
    clang, _, gcc = found.stdout.strip().partition(" ")
    return ("clang", int(clang)) if clang.isdecimal() else ("GCC", int(gcc) if gcc.isdecimal() else math.inf)


def _processor() -> str:
    """Returns the instruction sets of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = [line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))]
    return f"{platform.machine()} {' '.join(sorted(set(features[0].split()))) if features else platform.processor()}"


@contextmanager
def _locked(folder: int, name: str) -> Iterator[int]:
    """Yields the lock for everything that is written for a source, once no other process holds it."""
    lock = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        held = hold_lock(lock, min(REPORT_AFTER, PATIENCE))
        if not held and PATIENCE > REPORT_AFTER:
            print(f"qkeel: waiting up to {PATIENCE:.0f} s for another process to compile {name}", file=sys.stderr)
            held = hold_lock(lock, PATIENCE - REPORT_AFTER)
        if not held:
            raise BuildError(f"another process has held {cache_folder() / name}.lock for more than {PATIENCE:.0f} s")
        yield lock
    finally:
        os.close(lock)


def _compile(compiler: str, name: str, folder: int, lock: int) -> None:
    where = f"{name} for this CPU, once, into {cache_folder()}"
    print(f"qkeel: compiling {where} (QKEEL_NATIVE=0 switches this off)", file=sys.stderr)
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    made, whole = "made.so", f".{name}.so"
    command = [compiler, *flags(), *INCLUDE, str(FOLDER / f"{name}.cpp"), "-o", made, *libraries]
    with _workplace(folder, f".{name}") as inside:
        done = run_compiler(
            command,
            timeout=LONGEST,
            folder=f"/proc/self/fd/{inside}",
            environment={**os.environ, "TMPDIR": "."},  # keeps temporary files of a killed compiler here
            keep_open=(lock,),  # holds the lock until the compiler has ended
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [done.stderr[-300:]]
            raise BuildError(f"{compiler} failed: {errors[0].strip()}")
        with open(made, "rb", opener=functools.partial(os.open, dir_fd=inside)) as file:
            content = file.read()
        _write(folder, whole, sealed(content))
    os.rename(whole, _file_name(name), src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _workplace(folder: int, name: str) -> Iterator[int]:
    """Yields a descriptor of a new folder in the cache, replacing any that a killed process has left behind."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
    os.mkdir(name, 0o700, dir_fd=folder)
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield inside
    finally:
        os.close(inside)
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def _write(folder: int, name: str, content: bytes) -> None:
    """Writes a new file that only this user can access, replacing any that a killed process has left behind."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700, dir_fd=folder)
        with open(file, "wb") as to:
            to.write(content)
    except OSError:  # e.g. a full disk: do not keep half a file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise


def _stamp(folder: int, name: str) -> tuple[int, int] | None:
    """Returns a stamp that differs between a file and its replacement."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _file_name(name: str) -> str:
    return f"{name}-{key(name)}.so"
