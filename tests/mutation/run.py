"""One mutant against its tests, in a forked process."""

from __future__ import annotations

import gc
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .children.sitecustomize import replace_source
from .mutants import Mutant, mutated

# What every test imports and no mutant changes.
LIBRARIES = (
    "torch",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils._python_dispatch",
    "transformers.models.llama.modeling_llama",
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
OPTIONS = ("-q", "-rfE", "--tb=no", "-n0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
QUICK = ("-m", "not slow and not gpu and not zoo")
# The exit status of a process that could not start its tests, and those of one without a test that fails.
BROKEN, PASSED = 70, (0, 5)
# Seconds of a processor that a mutant may take; of the clock ten times as many, on a machine that does other things.
SECONDS = 120
COMPILED = Path(os.environ.get("QKEEL_NATIVE_CACHE", "~/.cache/qkeel/native")).expanduser()


class Only:
    """A plugin of pytest that runs these tests alone, file by file."""

    def __init__(self, tests: list[str]) -> None:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        self.files = files
        self._order = {test: (files.index(test.partition("::")[0]), i) for i, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda item: self._order[item.nodeid])


def warm(root: Path) -> None:
    """Imports the libraries once, and lets the package and its tests be found in a checkout."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    folders = [str(root / "src"), str(root)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "children"), *folders])
    sys.path[:] = [*folders, *(p for p in sys.path if Path(p or ".").resolve() != Path.cwd())]
    for name in LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "qkeel"]
    assert not loaded, f"expected qkeel to be imported by the forked processes alone, found {loaded}"
    gc.freeze()


def verdict(root: Path, mutant: Mutant | None, tests: list[str]) -> tuple[str, list[str]]:
    """Returns "killed", "timeout" or "survived", and the tests that fail; None is the source as it is, to the end."""
    if not tests:
        return "survived", []
    only = Only(tests)
    stop = ["-x"] if mutant is not None else []
    status, text = in_a_fork(root, [*stop, *only.files], mutant=mutant, plugins=lambda: [only], seconds=SECONDS)
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout", []
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return ("survived", []) if status in PASSED else ("killed", failed or [f"exit {status}"])


def in_a_fork(
    root: Path,
    words: list[str],
    *,
    plugins: Callable[[], list[object]],
    mutant: Mutant | None = None,
    seconds: int | None = None,
) -> tuple[int, str]:
    """Runs pytest in a forked process. Returns its exit status, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        child = os.fork()
        if child == 0:
            if seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
            _test(root, mutant, words, plugins, Path(folder))
        status = _wait(child, 10.0 * seconds if seconds is not None else float("inf"))
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    if status == BROKEN:
        raise RuntimeError(f"expected the tests to run, got:\n{text}")
    return status, text


def _wait(child: int, timeout: float) -> int:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _test(root: Path, mutant: Mutant | None, words: list[str], plugins: Callable[[], list[Any]], folder: Path) -> None:
    import pytest

    code = BROKEN
    try:
        os.setpgid(0, 0)
        stream = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # another checkout's may be the ones to run
        if mutant is not None:
            file, source = root / mutant.path, folder / "source"
            text = mutated(file.read_text(encoding="utf-8"), mutant.number)
            source.write_text(text, encoding="utf-8")
            compiled = folder / "compiled"  # what a mutant compiles is for itself
            if COMPILED.exists():
                shutil.copytree(COMPILED, compiled)
            os.environ |= {
                "MUTATED_FILE": str(file),
                "MUTATED_SOURCE": str(source),
                "QKEEL_NATIVE_CACHE": str(compiled),
            }
            replace_source(file, text)
        code = int(
            pytest.main(
                [*OPTIONS, *QUICK, f"--rootdir={root}", f"--basetemp={folder}/tests", *words], plugins=plugins()
            )
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
