"""The quick tests on machines that this one is not: python -m tools.machines --only NAME --tests PATH.

A condition is what a processor, a compiler, a user or a system may be otherwise. What it could decide is run under it:
tests that round, train or compile under those of the processor, tests of files, commands and processes under those of
the system. The table of outcomes replaces the rows of the conditions that were run in docs/internals/machines.md.

--pieces N --minutes M runs a condition's tests as N pieces, starts no further piece after M minutes, and writes the row
when all have run. Call it again to continue: pieces in which no test failed are not run again.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import platform
import re
import resource
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from qkeel.kernels.native.build import cache_folder

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = (
    *(
        f"tests/{room}"
        for room in (
            "audit",
            "autopilot",
            "conformance",
            "contract",
            "functional",
            "kernels",
            "lab",
        )
    ),
    *(
        f"tests/{room}"
        for room in ("metrics", "monitor", "nn", "remedies", "sites", "spec")
    ),
)
SYSTEM = (
    *(
        f"tests/{room}"
        for room in (
            "cli",
            "docs",
            "fuzz",
            "integrations",
            "kernels/native",
            "packaging",
            "processes",
        )
    ),
    *(f"tests/{room}" for room in ("records", "report")),
    *(
        "tests/autopilot",
        "tests/lab/test_kill.py",
        "tests/lab/test_study.py",
        "tests/remedies/test_apply.py",
    ),
)
QUICK = "not slow and not gpu and not zoo"
NOBODY = 65534
PYTHON = (
    "Straße mit Raum/python"  # below a condition's folder: a copy of the interpreter
)
ABOUT = """# The tests on other machines

No outcome of a test may depend on the processor, the number of threads, a compiler, the user, the home folder, a space
in a path, the locale, the order of tests or the load. `python -m tools.machines` runs the quick tests under each
condition below
and writes this table. `python -m tools.machines --only "AVX2" "not root"` runs some conditions, and `--tests PATH`
other tests than the usual ones. With `--pieces 4 --minutes 8` it stops after some minutes, and the next call continues.

Tests that round, train or compile try the conditions of a processor. Tests of files, commands and processes try those
of a system. `tools/machines.py` lists both, as `NUMBERS` and `SYSTEM`. Processor seconds are those of all processes,
compiling included.

<!-- written by python -m tools.machines; a run replaces the rows of its conditions -->

"""
HEAD = "| condition | how | passed | failed | skipped | processor seconds |\n|---|---|---|---|---|---|\n"


class CannotBeTried(Exception):
    """This machine has not what the condition needs; the message says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """What is otherwise than on this machine.

    how: a sentence for the table. variables: of the environment. tests: what could depend on it. stranger: run by a
    user who is not root. copy: run in a copy at a path with spaces and letters outside ASCII, interpreter included.
    closed_home: a home folder that cannot be written. python: another interpreter's name.
    """

    how: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tests: Sequence[str] = SYSTEM
    stranger: bool = False
    copy: bool = False
    closed_home: bool = False
    no_compiler: bool = False
    comma: bool = False
    no_interrupts: bool = False
    python: str = ""


def _processor(capability: str, instructions: str, architecture: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": capability,
        "MKL_ENABLE_INSTRUCTIONS": instructions,
        "ONEDNN_MAX_CPU_ISA": instructions,
        **(
            {"QKEEL_NATIVE_ARCH": architecture}
            if platform.machine() == "x86_64"
            else {}
        ),
    }


CONDITIONS: dict[str, Condition] = {
    "as it is": Condition(how="this machine", tests=(*NUMBERS, *SYSTEM)),
    "AVX2": Condition(
        how="torch, MKL, oneDNN and the compiled kernels use AVX2",
        tests=NUMBERS,
        variables=_processor("avx2", "AVX2", "x86-64-v3"),
    ),
    "no AVX": Condition(
        how="torch uses its code for any processor, MKL and oneDNN SSE4.1; kernels without AVX",
        tests=NUMBERS,
        variables=_processor("default", "SSE4_1", "x86-64-v2")
        | {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    ),
    "kernels off": Condition(
        how="`QKEEL_NATIVE=0`", tests=NUMBERS, variables={"QKEEL_NATIVE": "0"}
    ),
    "no compiler": Condition(
        how="no C++ compiler on the PATH, an empty cache",
        tests=(*NUMBERS, *SYSTEM),
        no_compiler=True,
    ),
    "2 threads": Condition(
        how="`OMP_NUM_THREADS=2`", tests=NUMBERS, variables={"OMP_NUM_THREADS": "2"}
    ),
    "not root": Condition(
        how="user 65534, in a copy of the repository", stranger=True, copy=True
    ),
    "odd path": Condition(
        how="repository and interpreter below `Straße mit Raum/qkeel Ω`", copy=True
    ),
    "closed home": Condition(
        how="a home folder that its user cannot write",
        stranger=True,
        copy=True,
        closed_home=True,
    ),
    "comma": Condition(
        how="`LC_ALL=de_DE.UTF-8`: a comma is the decimal point", comma=True
    ),
    "random order": Condition(
        how="`QKEEL_TEST_ORDER=1`: files, and tests in them",
        tests=(*NUMBERS, *SYSTEM),
        variables={"QKEEL_TEST_ORDER": "1"},
    ),
    "no interrupts": Condition(
        how="SIGINT is ignored from the start", no_interrupts=True
    ),
    **{
        f"Python {version}": Condition(
            how=f"`python{version}`",
            tests=(*NUMBERS, *SYSTEM),
            python=f"python{version}",
        )
        for version in ("3.12", "3.13", "3.14")
    },
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How many tests ended how, the processor time of all processes in seconds, and which tests failed."""

    counts: Mapping[str, int]
    seconds: float
    failed: Sequence[str]


def pieces_of(tests: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Deals the files of these paths out in turn; one piece is the paths themselves."""
    if count == 1:
        return [tuple(dict.fromkeys(tests))]
    found = [ROOT / path for path in tests]
    files = dict.fromkeys(
        file for path in found for file in (sorted(path.rglob("test_*.py")) or [path])
    )
    names = [str(file.relative_to(ROOT)) for file in files]
    return [tuple(names[i::count]) for i in range(count)]


def outcome(condition: Condition, tests: Sequence[str], jobs: int) -> Outcome:
    """Runs the tests under the condition.

    Raises:
        CannotBeTried: the machine has not what it takes.
    """
    with tempfile.TemporaryDirectory(
        prefix="machines ", ignore_cleanup_errors=True
    ) as made:
        folder = Path(made)
        folder.chmod(0o755)
        root, python = _copied(folder) if condition.copy else (ROOT, sys.executable)
        if condition.python:
            python = _other_python(condition.python)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            **condition.variables,
        }
        environment["PYTHONDONTWRITEBYTECODE"] = ""
        if (
            folder / PYTHON
        ).exists():  # a copied interpreter would look for its library at the old place
            environment["LD_LIBRARY_PATH"] = str(folder / PYTHON / "lib")
        if condition.no_compiler:
            environment |= {
                "PATH": _path_without_compilers(folder),
                "QKEEL_NATIVE_CACHE": str(folder / "no kernels"),
            }
        if condition.comma:
            environment |= _with_a_comma(folder)
        start: list[str] = []
        if condition.no_interrupts:
            start = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
        stranger = condition.stranger and os.geteuid() == 0
        if condition.stranger:
            home = folder / "home"
            home.mkdir()
            temporary = folder / "tmp"
            temporary.mkdir()
            environment |= {
                "HOME": str(home),
                "TMPDIR": str(temporary),
                "USER": "nobody",
                "LOGNAME": "nobody",
            }
            kernels = cache_folder()
            for name in ("XDG_CACHE_HOME", "QKEEL_NATIVE_CACHE"):
                environment.pop(name, None)
            if (
                kernels.exists() and not condition.closed_home
            ):  # to compile them again tells nothing
                shutil.copytree(kernels, home / ".cache" / "qkeel" / "native")
        if stranger:
            _give(folder, NOBODY)
        if condition.closed_home:
            home.chmod(0o555)
        words = [
            python,
            "-m",
            "pytest",
            "-n",
            str(jobs),
            "-p",
            "no:cacheprovider",
            "-m",
            QUICK,
            "-rfE",
            "--tb=line",
            *tests,
        ]
        if jobs:
            words[5:5] = ["--dist", "loadfile"]
        before = _processor_seconds()
        done = subprocess.run(
            [*start, *words], cwd=root, env=environment, text=True, capture_output=True, check=False,
            **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if stranger else {}),
        )  # fmt: skip
        _await_orphans()
        found = dict.fromkeys(("passed", "failed", "skipped"), 0)
        last = done.stdout.strip().rpartition("\n")[2]
        for number, word in re.findall(
            r"(\d+) (passed|failed|skipped|errors?)\b", last
        ):
            found["failed" if word.startswith("error") else word] += int(number)
        if not found["passed"]:
            print(done.stdout[-3000:], done.stderr[-1000:])
            raise CannotBeTried(f"no test ran: {last}")
        # One line of each failure, as --tb=line gives it.
        failed = (
            done.stdout.partition("= FAILURES =")[2]
            .partition("= short test summary")[0]
            .splitlines()[1:-1]
        )
        failed += [
            line
            for line in done.stdout.splitlines()
            if line.startswith(("FAILED", "ERROR"))
        ]
        return Outcome(found, _processor_seconds() - before, failed)


def _sum(outcomes: Collection[Outcome]) -> Outcome:
    counts = {
        word: sum(found.counts[word] for found in outcomes)
        for word in ("passed", "failed", "skipped")
    }
    return Outcome(
        counts,
        sum(found.seconds for found in outcomes),
        [line for o in outcomes for line in o.failed],
    )


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _adopt_orphans() -> None:
    """Processes whose parent is gone become this one's, so that their time is counted when they end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _await_orphans() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
        except ChildProcessError:
            return


def _copied(folder: Path) -> tuple[Path, str]:
    """Copies the repository and makes an environment, both at a path with spaces and letters outside ASCII.

    The environment has the packages of this one. Its interpreter is a copy where other users cannot reach this one.
    """
    place = folder / "Straße mit Raum" / "qkeel Ω"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)
    base = Path(sys.base_prefix).resolve()
    if not all(above.stat().st_mode & stat.S_IXOTH for above in base.parents):
        to = folder / PYTHON
        left_out = shutil.ignore_patterns(
            "site-packages", "__pycache__", "test", "*.a", "share"
        )
        shutil.copytree(base, to, ignore=left_out, symlinks=True)
        base = to
    python = base / "bin" / Path(sys.executable).resolve().name
    subprocess.run(
        [str(python), "-m", "venv", "--without-pip", str(place / ".venv")], check=True
    )
    own = (
        place
        / ".venv"
        / "lib"
        / f"python{sysconfig.get_python_version()}"
        / "site-packages"
    )
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (own / "shared.pth").write_text(
        "\n".join([str(place / "src"), *packages]) + "\n", encoding="utf-8"
    )
    return place, str(place / ".venv" / "bin" / "python")


def _give(folder: Path, user: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


def _path_without_compilers(folder: Path) -> str:
    """A folder of links to all programs of the PATH but compilers."""
    programs = folder / "programs"
    programs.mkdir()
    compiler = re.compile(
        r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|c89|c99|cpp)(-[\d.]+)?$"
    )
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if place else ():
            if (
                not compiler.match(program.name)
                and not (programs / program.name).is_symlink()
            ):
                (programs / program.name).symlink_to(program.resolve())
    return str(programs)


def _with_a_comma(folder: Path) -> dict[str, str]:
    listed = (
        subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False)
        .stdout.lower()
        .split()
    )
    if "de_de.utf8" in listed or "de_de.utf-8" in listed:
        return {"LC_ALL": "de_DE.UTF-8"}
    if shutil.which("localedef") is None:
        raise CannotBeTried("the locale de_DE.UTF-8 is not installed")
    # localedef exits with 1 for its warnings too.
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / "de_DE.UTF-8")]
    subprocess.run(command, capture_output=True, check=False)
    if not (folder / "de_DE.UTF-8").exists():
        raise CannotBeTried(
            "the locale de_DE.UTF-8 is not installed and localedef cannot make it"
        )
    return {"LC_ALL": "de_DE.UTF-8", "LOCPATH": str(folder)}


def _other_python(name: str) -> str:
    """The interpreter of .venv-NAME, an environment that has been made with this project's packages."""
    own = ROOT / f".venv-{name}" / "bin" / "python"
    if own.exists():
        return str(own)
    raise CannotBeTried(
        f"no environment .venv-{name}: `{name} -m venv .venv-{name}`, then pip install -e '.[dev]' there"
    )


def page(rows: Mapping[str, str]) -> str:
    """The page with the rows in the order of CONDITIONS."""
    return ABOUT + HEAD + "".join(rows[name] for name in CONDITIONS if name in rows)


def rows_of(text: str) -> Iterator[tuple[str, str]]:
    """The rows of a page, by condition."""
    for line in text.splitlines():
        name = line.split(" | ")[0].removeprefix("| ")
        if name in CONDITIONS:
            yield name, f"{line}\n"


@contextmanager
def _room_for(out: Path) -> Iterator[dict[str, str]]:
    rows = dict(rows_of(out.read_text(encoding="utf-8"))) if out.exists() else {}
    yield rows
    out.write_text(page(rows), encoding="utf-8")


def main() -> int:
    """Runs conditions one after the other; 1 where a test failed."""
    reader = argparse.ArgumentParser(
        prog="python -m tools.machines", description=(__doc__ or "").partition("\n")[0]
    )
    reader.add_argument(
        "--only",
        nargs="+",
        choices=list(CONDITIONS),
        default=list(CONDITIONS),
        help="conditions to run",
    )
    reader.add_argument(
        "--tests",
        nargs="+",
        help="paths in place of the usual ones; the table then names them",
    )
    reader.add_argument("--jobs", type=int, default=2)
    reader.add_argument(
        "--pieces",
        type=int,
        default=1,
        help="run the tests of a condition as so many pieces",
    )
    reader.add_argument(
        "--first",
        type=int,
        help="of the pieces run only so many; the table then says so",
    )
    reader.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no further piece after that time",
    )
    reader.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "internals" / "machines.md"
    )
    options = reader.parse_args()
    _adopt_orphans()
    last_start = time.monotonic() + 60 * options.minutes
    failures = 0
    for name in options.only:
        condition = CONDITIONS[name]
        how = condition.how + (
            f"; only {shlex.join(options.tests)}" if options.tests else ""
        )
        how += (
            f"; {options.first} of {options.pieces} parts of the tests"
            if options.first
            else ""
        )
        pieces = pieces_of(options.tests or condition.tests, options.pieces)[
            : options.first
        ]
        kept = ROOT / "build" / "machines" / f"{name}.json"
        done = (
            {tuple(p): Outcome(**found) for p, found in json.loads(kept.read_text())}
            if kept.exists()
            else {}
        )
        done = {
            piece: found
            for piece, found in done.items()
            if piece in pieces and not found.failed
        }
        try:
            for piece in pieces:
                if piece not in done and time.monotonic() < last_start:
                    done[piece] = outcome(condition, piece, options.jobs)
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(
                        json.dumps(
                            [
                                (p, dataclasses.asdict(found))
                                for p, found in done.items()
                            ]
                        )
                    )
        except CannotBeTried as reason:
            print(f"{name}: not tried: {reason}")
            row = f"| {name} | {how}; not tried: {reason} | | | | |\n"
        else:
            found = _sum(done.values())
            failures += found.counts["failed"]
            part = (
                f", {len(done)} of {len(pieces)} pieces"
                if len(done) < len(pieces)
                else ""
            )
            print(
                f"{name}: {dict(found.counts)}, {found.seconds:.0f} s{part}",
                *found.failed,
                sep="\n  ",
                flush=True,
            )
            if part:
                continue
            numbers = " | ".join(
                f"{found.counts[word]:,}" for word in ("passed", "failed", "skipped")
            )
            row = f"| {name} | {how} | {numbers} | {found.seconds:.0f} |\n"
            if not found.failed:
                kept.unlink()
        with _room_for(options.out) as rows:
            rows[name] = row
    print(
        f"{torch.__version__=}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}: {options.out}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
