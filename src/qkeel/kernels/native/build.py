"""Compiles the C++ sources on first use, once per machine, into a folder of this user alone."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from qkeel.records.disk import hold_lock

# The sources lie beside what they belong to, what they share in native/source.
FOLDER = Path(__file__).parents[1]
NAME = "qkeel_native"
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wfatal-errors",
    # Makes a product and its sum round once everywhere. For some processors GCC splits them in loops with one sum, so
    # the last rows of a block would get other bits than the rest.
    *(("--param=avoid-fma-max-bits=0",) if platform.machine() == "x86_64" else ()),
)
_TORCH = Path(torch.__file__).parent
INCLUDE = (f"-I{Path(__file__).parent / 'source'}", f"-I{_TORCH / 'include'}")
# Seconds a compiler may take.
LONGEST = 600.0
# Seconds of waiting for another process before torch is used instead.
PATIENCE = 300.0


class BuildError(RuntimeError):
    """There is no compiled library; the message gives the reason."""


def compiled(anew: bool = False) -> Path:
    """Returns the library of all operators, and compiles it if it is not in the cache folder.

    If two processes need the library, one compiles it while the other waits. It appears by a single rename.

    Args:
        anew: whether to replace a library in the cache, because it cannot be loaded here.

    Raises:
        BuildError: there is no compiler, the compiler fails, another process takes longer than PATIENCE, or other users
            can write to the cache folder.
        OSError: the cache folder cannot be written.
    """
    folder = cache_folder()
    library = folder / f"{NAME}-{key()}.so"
    if os.path.lexists(folder):
        _check_owner(folder)
    if library.is_file() and not anew:
        return library
    compiler = find_compiler()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The system lifts the lock however this process ends.
    with open(folder / f"{NAME}.lock", "wb") as lock:
        if not hold_lock(lock.fileno(), 0.0):
            _say(
                f"waiting up to {PATIENCE:.0f} s for another process that compiles its kernels"
            )
            if not hold_lock(lock.fileno(), PATIENCE):
                raise BuildError(
                    f"another process has held {lock.name} for more than {PATIENCE:.0f} s"
                )
        # Otherwise another process was faster.
        if anew or not library.is_file():
            _say(
                f"compiling its kernels for this CPU, once, into {folder} (QKEEL_NATIVE=0 switches this off)"
            )
            _compile(compiler, library)
    return library


def _say(message: str) -> None:
    print(f"qkeel: {message}", file=sys.stderr)


def cache_folder() -> Path:
    """Returns QKEEL_NATIVE_CACHE, or qkeel/native in the user's cache."""
    if named := os.environ.get("QKEEL_NATIVE_CACHE"):
        return Path(named)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "qkeel" / "native"


def find_compiler() -> list[str]:
    """Returns the command of the compiler: CXX, which may name a wrapper and options ("ccache c++"), otherwise c++.

    Raises:
        BuildError: there is no such program on the PATH.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    program = shutil.which(command[0])
    if program is None:
        raise BuildError(
            f"found no C++ compiler {command[0]}: put c++ on the PATH, or set CXX to a compiler"
        )
    return [os.path.abspath(program), *command[1:]]


def flags() -> tuple[str, ...]:
    """Returns FLAGS and the target processor: this machine's, or the one named by QKEEL_NATIVE_ARCH.

    The names are those of the compiler; with `x86-64-v3`, a machine with AVX512 runs the code of a machine with only
    AVX2.
    """
    option = "-march" if platform.machine() == "x86_64" else "-mcpu"
    return (*FLAGS, f"{option}={os.environ.get('QKEEL_NATIVE_ARCH') or 'native'}")


def key() -> str:
    """Returns a key that depends on sources, flags and processor, so that machines can share a cache.

    It does not depend on torch's version, since the sources use torch's stable C interface alone."""
    files = sorted([*FOLDER.rglob("*.cpp"), *FOLDER.rglob("*.h")])
    sources = b"\0".join([path.read_bytes() for path in files])
    return hashlib.sha256(
        sources + repr((*flags(), _processor())).encode()
    ).hexdigest()[:16]


def _processor() -> str:
    """Returns the instruction sets of this processor."""
    instructions = platform.processor()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            instructions = " ".join(sorted(set(line.partition(":")[2].split())))
            break
    return f"{platform.machine()} {instructions}"


def _check_owner(folder: Path) -> None:
    """Raises BuildError if users other than this one and root could put code into the cache folder."""
    about = os.lstat(folder)
    # The mode of a link says that all can write.
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022:
        raise BuildError(
            f"its cache {folder} is a link, belongs to another user or can be written by others (user {about.st_uid}, "
            f"mode {about.st_mode & 0o777:04o}), who could put any code there; delete it, or set QKEEL_NATIVE_CACHE to "
            "a folder of your own"
        )


def _compile(compiler: list[str], library: Path) -> None:
    """Compiles the sources, as many at once as there are processors, and links them, while the lock is held."""
    workplace = library.with_name(f".{NAME}")
    # What a killed process has left behind.
    shutil.rmtree(workplace, ignore_errors=True)
    workplace.mkdir(mode=0o700)
    output = workplace / library.name

    def compile_source(source: Path) -> str:
        target = workplace / f"{source.stem}.o"
        _run([*compiler, *flags(), *INCLUDE, "-c", str(source)], target)
        return str(target)

    try:
        # The largest first, so that the processors end at about the same time.
        sources = sorted(FOLDER.rglob("*.cpp"), key=lambda path: -path.stat().st_size)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_source, sources))
        libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu"]
        _run([*compiler, "-shared", *objects, *libraries], output)
        output.chmod(0o700)
        # A library of which a power failure left a part could crash the interpreter.
        with open(output, "rb") as file:
            os.fsync(file.fileno())
        os.replace(output, library)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _run(command: list[str], output: Path) -> None:
    """Runs a compiler, which shall make a file; raises BuildError with its first error."""
    process = subprocess.run(
        [*command, "-o", str(output)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        # Messages are in the user's language, and in any encoding.
        errors="replace",
        timeout=LONGEST,
        check=False,
        env={**os.environ, "TMPDIR": str(output.parent)},
    )
    if process.returncode or not output.is_file():
        lines = process.stderr.strip().splitlines()
        errors = [line.strip() for line in lines if "error" in line.lower()]
        reason = (*errors, *lines[-1:], f"exit code {process.returncode}")[0]
        raise BuildError(f"{command[0]} failed: {reason}")
