"""The compiler of the C++ sources: once per machine and torch, into a cache whose files are checked before use."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "source"  # the sources, and the headers that they share
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    # One rounding of a product and its sum everywhere: GCC for some processors splits them where a loop has one sum, so
    # that the last rows of a block would not have the bits of the others.
    *(("--param=avoid-fma-max-bits=0",) if platform.machine() == "x86_64" else ()),
)
LONGEST = 600  # seconds a compiler may take


class BuildError(RuntimeError):
    """There is no compiled library, for the reason that the message gives."""


def compiled(name: str, from_scratch: bool = False) -> Path:
    """Returns the library of the source `name`.cpp, from the cache or compiled now; `from_scratch`: always the latter.

    Two processes that want it at once: one compiles, the other waits for the lock, which the system lifts when its
    holder dies. The file appears whole, by one rename.

    Raises:
        BuildError: no compiler, or one that fails. OSError: a cache that can't be written.
    """
    import fcntl  # not on Windows, where nothing is compiled

    folder = cache_folder()
    path = folder / f"{name}-{key(name)}.so"
    if not from_scratch and _sound(path):
        return path
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise BuildError("no C++ compiler: neither c++ on the PATH nor what CXX names")
    folder.mkdir(parents=True, exist_ok=True)
    before = _stamp(path)
    with open(folder / f"{name}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _sound(path) or (from_scratch and _stamp(path) == before):  # else another process was faster
            _compile(compiler, name, path)
    return path


def cache_folder() -> Path:
    """Returns QKEEL_NATIVE_CACHE, or qkeel/native in the user's cache."""
    own = os.environ.get("QKEEL_NATIVE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkeel" / "native"


def key(name: str) -> str:
    """Returns one key per source, headers, flags, torch, Python and processor: several machines may share a cache."""
    texts = [(FOLDER / f"{name}.cpp").read_bytes(), *(path.read_bytes() for path in sorted(FOLDER.glob("*.h")))]
    built_for = f"{torch.__version__} {sys.implementation.cache_tag} {_processor()}"
    parts = (*texts, repr(FLAGS).encode(), built_for.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Returns the instructions that code for this processor may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = [line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))]
    return f"{platform.machine()} {' '.join(sorted(set(features[0].split()))) if features else platform.processor()}"


def _compile(compiler: str, name: str, path: Path) -> None:
    where = f"{name} for this CPU, once, into {path.parent}"
    print(f"qkeel: compiling {where} (QKEEL_NATIVE=0 switches this off)", file=sys.stderr)
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    include.append(
        f"-I{sysconfig.get_path('include')}"
    )  # where its headers are missing, a source is compiled without its Python functions
    libraries = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, *include, str(FOLDER / f"{name}.cpp"), "-o", str(made), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [done.stderr[-300:]]
            raise BuildError(f"{compiler} failed: {errors[0].strip()}")
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())  # a loader ignores what follows the sections
        os.replace(made, path)


def _sound(path: Path) -> bool:
    """Returns whether the file is what the compiler wrote: loading a torn one could end the interpreter."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Returns what differs between a file and the one that replaced it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
