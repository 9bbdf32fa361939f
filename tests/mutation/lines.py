"""Which tests execute a line, and in how many seconds: what a mutant of that line is run against."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData
from coverage.exceptions import CoverageException

from .mutants import Mutant
from .run import in_a_fork
from .targets import ROOMS, Room

# Seconds of tests that one mutant is run against: the quickest that execute its line.
MOST_SECONDS = 20.0
# Of these, the first ones: in three files at most, which are soon imported.
FIRST_SECONDS = 4.0


class Tracer:
    """A plugin of pytest that writes down the lines of the package that each passed test executes.

    Those of the processes it starts count, too: coverage leaves a file of data for each that ends by itself.
    """

    def __init__(self, root: Path, output: Path) -> None:
        self._output = output
        self._folder = Path(tempfile.mkdtemp())
        self._include = f"{root}/src/qkeel/*"
        settings = self._folder / "settings"
        settings.write_text(
            f"[run]\ninclude = {self._include}\nparallel = True\nconcurrency = thread,multiprocessing\n"
            f"data_file = {self._folder}/data\nsigterm = True\n",
            encoding="utf-8",
        )
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self._coverage = Coverage(data_file=None, include=[self._include], config_file=False, concurrency="thread")
        self._seconds: dict[str, float] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = sum(os.times()[:4])
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")  # what an import executes is of no test
            self._seconds[item.nodeid] = round(sum(os.times()[:4]) - start, 3)
            for path in self._folder.glob("data.*"):
                with contextlib.suppress(CoverageException):  # of a process that has not ended
                    data = CoverageData(str(path))
                    data.read()
                    self._count(data, item.nodeid)
                    path.unlink()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._count(self._coverage.get_data(), None)
        shutil.rmtree(self._folder, ignore_errors=True)
        good = self._passed - self._failed
        lines = {
            path: {line: sorted(tests & good) for line, tests in by_line.items()}
            for path, by_line in self._lines.items()
        }
        seconds = {test: self._seconds[test] for test in sorted(good)}
        text = json.dumps({"seconds": seconds, "failed": sorted(self._failed), "lines": lines})
        self._output.write_text(text, encoding="utf-8")

    def _count(self, data: CoverageData, test: str | None) -> None:
        for path in data.measured_files():
            for line, tests in data.contexts_by_lineno(path).items():
                self._lines[path][line].update(tests if test is None else [test])


class Lines:
    """The tests of a room by the lines that they execute.

    Args:
        root: the checkout.
        room: whose tests; each folder of tests is traced when it is first asked for.
        folder: where what was traced is kept.
    """

    def __init__(self, root: Path, room: Room, folder: Path) -> None:
        self._root = root
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        folder.mkdir(parents=True, exist_ok=True)
        every = sorted({test for each in ROOMS.values() for test in each.test_files(root)})
        files = room.test_files(root)
        for name in dict.fromkeys(Path(test).parent.parts[1:2] for test in files):
            output = folder / f"{''.join(name) or 'root'}.json"
            if not output.exists():
                tests = [test for test in every if Path(test).parent.parts[1:2] == name]
                in_a_fork(root, tests, plugins=lambda output=output: [Tracer(root, output)])
            traced = json.loads(output.read_text(encoding="utf-8"))
            kept = {
                test for test in (*traced["seconds"], *traced["failed"]) if _file(test) in files and room.takes(test)
            }
            self.failed += sorted(kept.intersection(traced["failed"]))
            self.seconds |= {test: seconds for test, seconds in traced["seconds"].items() if test in kept}
            for path, lines in traced["lines"].items():
                for line, tests in lines.items():
                    self._lines[path][int(line)].update(self.seconds.keys() & tests)

    def tests_of(self, mutant: Mutant) -> list[list[str]]:
        """The tests that execute the mutated statement, in `MOST_SECONDS` together: the likeliest killers, the others.

        What an import executes, and what a cache keeps, is tested by whatever executes a line of the file.
        """
        lines = self._lines.get(str(self._root / mutant.path), {})
        wanted = _span((self._root / mutant.path).read_text(encoding="utf-8"), mutant.line) or lines
        tests = set().union(*(lines[line] for line in wanted if line in lines))
        stem = Path(mutant.path).stem

        def rank(test: str) -> tuple[bool, bool, float]:
            return self.seconds[test] > 2, Path(_file(test)).stem != f"test_{stem}", self.seconds[test]

        first: list[str] = []
        others: list[str] = []
        total = 0.0
        for test in sorted(tests, key=rank):
            total += self.seconds[test]
            if total <= FIRST_SECONDS and len({*map(_file, first), _file(test)}) <= 3:
                first.append(test)
            elif total <= MOST_SECONDS or not others:
                others.append(test)
        return [tests for tests in (first, others) if tests]

    def leave_out(self, tests: list[str]) -> None:
        """From now on no mutant is run against these."""
        self.failed += tests
        for by_line in self._lines.values():
            for kept in by_line.values():
                kept.difference_update(tests)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _span(source: str, line: int) -> range | None:
    """The lines of the statement in a function that holds a line; the whole body for a default of an argument.

    None where the line is executed once: by an import, or by the first call of a function whose results are kept.
    """
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not functions:
        return None
    function = max(functions, key=lambda node: node.lineno)
    if any("cache" in ast.unparse(decorator) for decorator in function.decorator_list):
        return None
    start, end = function.body[0].lineno, (function.end_lineno or 0) + 1
    for statement in ast.walk(function) if line >= start else ():
        if isinstance(statement, ast.stmt) and statement is not function and statement.lineno <= line:
            body = getattr(statement, "body", None)
            last = body[0].lineno - 1 if body else statement.end_lineno or 0
            if line <= max(last, statement.lineno) and statement.lineno >= start:
                start, end = statement.lineno, max(last, statement.lineno) + 1
    return range(start, end)
