"""One mutant against its tests, in a forked process."""

from __future__ import annotations

import importlib
import importlib.machinery
import linecache
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from .mutants import Mutant, mutated

# What every test imports and no mutant changes.
LIBRARIES = (
    "torch",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "torch.utils._python_dispatch",
    "numpy",
    "safetensors.torch",
    "jaxtyping",
    "beartype",
    "hypothesis",
    "pytest",
    "xdist",
    "sybil",
)

# hypothesis is imported already, which pytest would warn of.
OPTIONS = [
    "-x",
    "-q",
    "-rfE",
    "--tb=no",
    "-n0",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
    "-m",
]
OPTIONS += ["not slow and not gpu and not zoo"]
# The exit status of a process that could not start its tests.
BROKEN = 70


def warm(root: Path) -> None:
    """Imports the libraries once, and lets the package and its tests be found in a checkout."""
    sys.path[:] = [str(root / "src"), str(root), *(p for p in sys.path if Path(p or ".").resolve() != Path.cwd())]
    for name in LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "qkeel"]
    assert not loaded, f"expected qkeel to be imported by the forked processes alone, found {loaded}"


def verdict(root: Path, mutant: Mutant | None, tests: list[str], timeout: float) -> tuple[str, str]:
    """Returns "killed", "timeout" or "survived", and the test that killed the mutant; None is the source as it is."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        child = os.fork()
        if child == 0:
            _test(root, mutant, tests, output)
        status = _wait(child, timeout)
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    if status is None:
        return "timeout", ""
    if status == BROKEN:
        raise RuntimeError(f"expected the tests to run, got:\n{text}")
    killer = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return ("survived" if status == 0 else "killed"), killer.group(1) if killer else f"exit {status}"


def _wait(child: int, timeout: float) -> int | None:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _test(root: Path, mutant: Mutant | None, tests: list[str], output: Path) -> None:
    import pytest

    code = BROKEN
    try:
        os.setpgid(0, 0)
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # another checkout's may be the ones to run
        if mutant is not None:
            file = root / mutant.path
            replace_source(file, mutated(file.read_text(encoding="utf-8"), mutant.number))
        code = int(pytest.main([*OPTIONS, f"--rootdir={root}", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def replace_source(path: Path, source: str) -> None:
    """From now on the import system reads another source for a file, and no compiled one."""
    read, file = importlib.machinery.SourceFileLoader.get_data, str(path)

    def get_data(self: importlib.machinery.SourceFileLoader, wanted: str) -> bytes:
        if wanted == file:
            return source.encode()
        if Path(wanted).name.startswith(path.stem + ".") and wanted.endswith(".pyc"):
            raise OSError("a mutant has no compiled file")
        return read(self, wanted)

    sys.dont_write_bytecode = True
    # Triton's interpreter reads the text of a kernel itself.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
