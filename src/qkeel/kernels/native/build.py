"""Compiles the C++ sources on first use, once per machine and torch version, into a folder of this user alone."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from qkeel.records.disk import hold_lock

FOLDER = Path(__file__).parent / "source"  # the sources and their shared headers
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wfatal-errors",
    # Makes a product and its sum round once everywhere. For some processors GCC splits them in loops with one sum, so
    # the last rows of a block would get other bits than the rest.
    *(("--param=avoid-fma-max-bits=0",) if platform.machine() == "x86_64" else ()),
)
_TORCH = Path(torch.__file__).parent
# Include paths of torch and Python. Without Python's headers, a source is compiled without its Python functions.
_HEADERS = (_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include"))
INCLUDE = tuple(f"-I{folder}" for folder in _HEADERS)
LONGEST = 600.0  # seconds a compiler may take
REPORT_AFTER = 2.0  # seconds of waiting for another process before a message on stderr
PATIENCE = 300.0  # seconds of waiting before torch is used instead


class BuildError(RuntimeError):
    """There is no compiled library; the message gives the reason."""


def compiled(name: str, anew: bool = False) -> Path:
    """Returns the library of `name`.cpp, and compiles it if it is not in the cache folder.

    If two processes need a library, one compiles it while the other waits. The library appears by a single rename.

    Args:
        name: the name of the source.
        anew: whether to replace a library in the cache, because it cannot be loaded here.

    Raises:
        BuildError: there is no compiler, the compiler fails, another process takes longer than PATIENCE, or other users
            can write to the cache folder.
        OSError: the cache folder cannot be written.
    """
    folder = cache_folder()
    library = folder / f"{name}-{key(name)}.so"
    if os.path.lexists(folder):
        _check_owner(folder)
    if library.is_file() and not anew:
        return library
    compiler = find_compiler()
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    _check_owner(folder)
    with open(folder / f"{name}.lock", "wb") as lock:  # the system lifts the lock however this process ends
        locked = hold_lock(lock.fileno(), min(REPORT_AFTER, PATIENCE))
        if not locked:
            print(f"qkeel: waiting up to {PATIENCE:.0f} s for another process to compile {name}", file=sys.stderr)
            locked = hold_lock(lock.fileno(), PATIENCE - REPORT_AFTER)
        if not locked:
            raise BuildError(f"another process has held {lock.name} for more than {PATIENCE:.0f} s")
        if anew or not library.is_file():  # otherwise another process was faster
            _compile(compiler, name, library)
    return library


def cache_folder() -> Path:
    """Returns QKEEL_NATIVE_CACHE, or qkeel/native in the user's cache."""
    named = os.environ.get("QKEEL_NATIVE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkeel" / "native"


def find_compiler() -> list[str]:
    """Returns the command of the compiler: CXX, which may name a wrapper and options ("ccache c++"), otherwise c++.

    Raises:
        BuildError: there is no such program on the PATH.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    program = shutil.which(command[0])
    if program is None:
        raise BuildError(f"found no C++ compiler {command[0]}: put c++ on the PATH, or set CXX to a compiler")
    return [os.path.abspath(program), *command[1:]]


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
    return hashlib.sha256(b"\0".join((*texts, repr(flags()).encode(), built_for.encode()))).hexdigest()[:16]


def _processor() -> str:
    """Returns the instruction sets of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = [line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))]
    return f"{platform.machine()} {' '.join(sorted(set(features[0].split()))) if features else platform.processor()}"


def _check_owner(folder: Path) -> None:
    """Raises BuildError if users other than this one and root could put code into the cache folder."""
    about = os.lstat(folder)
    if stat.S_ISLNK(about.st_mode):
        raise BuildError(f"its cache {folder} is a link; set QKEEL_NATIVE_CACHE to the folder itself")
    if about.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {about.st_uid}"
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"can be written by other users (mode {stat.S_IMODE(about.st_mode):04o})"
    else:
        return
    raise BuildError(
        f"its cache {folder} {reason}, who could put any code there; delete it, or set QKEEL_NATIVE_CACHE to a folder "
        "of your own"
    )


def _compile(compiler: list[str], name: str, library: Path) -> None:
    """Compiles a source to a library, while the lock of the source is held."""
    print(
        f"qkeel: compiling {name} for this CPU, once, into {library.parent} (QKEEL_NATIVE=0 switches this off)",
        file=sys.stderr,
    )
    workplace = library.with_name(f".{name}")
    shutil.rmtree(workplace, ignore_errors=True)  # what a killed process has left behind
    workplace.mkdir(mode=0o700)
    try:
        output = workplace / library.name
        command = [*compiler, *flags(), *INCLUDE, str(FOLDER / f"{name}.cpp"), "-o", str(output)]
        command += [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # messages are in the user's language, and in any encoding
            timeout=LONGEST,
            check=False,
            env={**os.environ, "TMPDIR": str(workplace)},
        )
        if result.returncode or not output.is_file():
            errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
            reason = errors[0].strip() if errors else result.stderr[-300:].strip() or f"exit code {result.returncode}"
            raise BuildError(f"{shlex.join(compiler)} failed: {reason}")
        output.chmod(0o700)
        with open(output, "rb") as file:
            os.fsync(file.fileno())  # a library of which a power failure left a part could crash the interpreter
        os.replace(output, library)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
