"""Pytest in a forked process, which finds the libraries imported: a mutant, or the source as it is."""

import gc
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import pytest

from .children.sitecustomize import replace_source
from .mutants import mutated

# What every test imports and no mutant changes.
LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "torch.utils._python_dispatch",
    "transformers.models.llama.modeling_llama",
    "numpy",
    "safetensors.torch",
    "jaxtyping",
    "beartype",
    "hypothesis",
    "xdist",
    "sybil",
)

# hypothesis is imported already, which pytest would warn of. A test that takes ten minutes ends the process.
OPTIONS = [
    "-q",
    "-rfE",
    "--tb=no",
    "-n0",
    "-p",
    "no:cacheprovider",
    "--timeout-method",
    "thread",
]
OPTIONS += [
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
    "-m",
    "not slow and not gpu and not zoo",
]
# The exit status of a process that could not start its tests, and those of one in which no test fails.
BROKEN, PASSED = 70, (0, 5)
# Seconds of a processor after which a mutant counts as one that does not end.
SECONDS = 120
COMPILED = Path("~/.cache/qkeel/native").expanduser()


class Only:
    """A plugin of pytest that runs these tests alone, file by file."""

    def __init__(self, tests):
        self.files = list(dict.fromkeys(map(file_of, tests)))
        self._order = {
            test: (self.files.index(file_of(test)), i) for i, test in enumerate(tests)
        }

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (i for i in items if i.nodeid in self._order),
            key=lambda item: self._order[item.nodeid],
        )


def file_of(test):
    """The file of a test, by its name in pytest."""
    return test.partition("::")[0]


def warm(root):
    """Imports the libraries once, and lets the package and its tests be found in a checkout."""
    os.chdir(root)
    os.environ["TRITON_INTERPRET"] = "1"
    children, source = Path(__file__).parent / "children", root / "src"
    os.environ["PYTHONPATH"] = f"{children}:{source}:{root}"
    sys.path[:0] = [str(source), str(root)]
    for name in LIBRARIES:
        importlib.import_module(name)
    assert "qkeel" not in sys.modules, "the forked processes alone import it"
    gc.freeze()


def failing(root, tests, mutant=None):
    """Returns which tests fail: without a mutant all that do, with one the first, or how the process ended."""
    if not tests:
        return []
    only = Only(tests)
    status, text = in_a_fork(
        root, [*(["-x"] if mutant else []), *only.files], only, mutant
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return [] if status in PASSED else failed or [f"exit {status}"]


def in_a_fork(root, words, plugin, mutant=None):
    """Runs pytest with a plugin in a forked process. Returns its exit status, and what it printed."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "output"
        child = os.fork()
        if child == 0:
            code = BROKEN
            try:
                os.setpgid(0, 0)
                stream = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                # Another checkout's tests may be the ones to run.
                for module in [
                    name for name in sys.modules if name.partition(".")[0] == "tests"
                ]:
                    del sys.modules[module]
                if mutant is not None:
                    _mutate(root / mutant.path, mutant.number, Path(name))
                words = [
                    *OPTIONS,
                    f"--rootdir={root}",
                    f"--basetemp={name}/tests",
                    *words,
                ]
                code = int(pytest.main(words, plugins=[plugin]))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started and left
        text = output.read_text(encoding="utf-8", errors="replace")
    if status == BROKEN:
        raise RuntimeError(f"expected the tests to run, got:\n{text}")
    return status, text


def _mutate(file, number, folder):
    """Lets this process, and those that it starts, see a mutant. What they compile is for themselves."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    source, compiled = folder / "source", folder / "compiled"
    source.write_text(
        mutated(file.read_text(encoding="utf-8"), number), encoding="utf-8"
    )
    if COMPILED.exists():
        shutil.copytree(COMPILED, compiled)
    os.environ |= {
        "MUTATED_FILE": str(file),
        "MUTATED_SOURCE": str(source),
        "QKEEL_NATIVE_CACHE": str(compiled),
    }
    replace_source(file, source.read_text(encoding="utf-8"))
