"""Which tests execute a line, and in how many seconds: what a mutant of that line is run against."""

import ast
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData
from coverage.exceptions import CoverageException

from .run import file_of, in_a_fork
from .targets import ROOMS, is_direct, test_files

# So many tests are run alone first: they are soon imported.
FIRST = 10
# The processes that a test starts leave a file each when they end; those of a group end by os._exit.
SETTINGS = """[run]
include = {include}
parallel = True
concurrency = thread,multiprocessing
data_file = {folder}/data
sigterm = True
patch = _exit
"""


class Tracer:
    """A plugin of pytest that writes a line for each test: seconds, and the lines of the package that it executes.

    Those of the processes it starts count, too. A test has no seconds where it fails, is skipped, or ends the process.
    What was traced before stays: a run that was stopped goes on.
    """

    def __init__(self, root, output):
        self._include, self._output, self._partial = (
            f"{root}/src/qkeel/*",
            output,
            output.with_suffix(".partial"),
        )
        self._outcomes = {}

    def pytest_collection_finish(self, session):
        self._partial.touch()
        done = {test for test, *_ in _read(self._partial)}
        session.items[:] = [item for item in session.items if item.nodeid not in done]
        self._folder = Path(tempfile.mkdtemp())
        settings = self._folder / "settings"
        settings.write_text(
            SETTINGS.format(include=self._include, folder=self._folder),
            encoding="utf-8",
        )
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self._coverage = Coverage(
            data_file=None, include=[self._include], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._write(item.nodeid, None, {})
        start = sum(os.times()[:4])
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            seconds = round(sum(os.times()[:4]) - start, 3)
            self._coverage.switch_context("")
            lines = defaultdict(set)
            data = self._coverage.get_data()
            data.set_query_context(item.nodeid)
            _add(lines, data)
            for path in self._folder.glob("data.*"):
                with suppress(CoverageException):  # of a process that has not ended
                    data = CoverageData(str(path))
                    data.read()
                    _add(lines, data)
                    path.unlink()
            if self._outcomes.get(item.nodeid) == "passed":
                self._write(
                    item.nodeid, seconds, {path: sorted(lines[path]) for path in lines}
                )

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self):
        shutil.rmtree(self._folder)
        self._partial.rename(self._output)

    def _write(self, test, seconds, lines):
        with self._partial.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([test, seconds, lines]) + "\n")


def _read(output):
    return [
        json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()
    ]


def _add(lines, data):
    for path in data.measured_files():
        lines[path].update(data.lines(path) or ())


class Lines:
    """The tests of a room by the lines that they execute.

    Args:
        root: the checkout.
        room: whose tests; each folder of tests is traced when it is first asked for.
        folder: where what was traced is kept.

    Attributes:
        tests: of each that passes without a mutant the seconds, and the lines by file.
    """

    def __init__(self, root, room, folder):
        self._root = root
        self.tests = {}
        folder.mkdir(parents=True, exist_ok=True)
        files = test_files(root, room)
        for name in sorted({Path(test).parent.parts[1:2] for test in files}):
            output = folder / f"{''.join(name) or 'root'}.json"
            while not output.exists():
                every = {test for other in ROOMS for test in test_files(root, other)}
                tests = sorted(
                    test for test in every if Path(test).parent.parts[1:2] == name
                )
                in_a_fork(
                    root,
                    ["--continue-on-collection-errors", *tests],
                    Tracer(root, output),
                )
            for test, seconds, lines in _read(output):
                if (
                    seconds is not None
                    and file_of(test) in files
                    and is_direct(test, room)
                ):
                    self.tests[test] = seconds, lines

    def leave_out(self, names):
        """Leaves out tests, or files of tests, that fail without a mutant, too."""
        for test in [x for x in self.tests if not {x, file_of(x)}.isdisjoint(names)]:
            del self.tests[test]

    def tests_of(self, mutant, most):
        """The tests that execute the mutated statement: the likeliest killers, the others, and those that are too many.

        Each test with one of its parameters comes before any with a second, and the quickest come first. Those are too
        many that take more than `most` seconds together. What an import executes, and what a cache keeps, is tested by
        whatever executes a line of the file.
        """
        file = self._root / mutant.path
        span = _span(file.read_text(encoding="utf-8"), mutant.line)
        ranks = {}
        times = Counter()
        for test in sorted(self.tests, key=lambda test: self.tests[test][0]):
            seconds, by_file = self.tests[test]
            lines, function = by_file.get(str(file), []), test.partition("[")[0]
            if not span.isdisjoint(lines) if span else lines:
                is_own = f"/test_{file.stem}.py" in test
                ranks[test] = times[function], seconds > 2, not is_own, seconds
                times[function] += 1
        tests = sorted(ranks, key=lambda test: ranks[test])
        count = max(
            1,
            sum(
                seconds <= most
                for seconds in accumulate(ranks[test][3] for test in tests)
            ),
        )
        return [tests[: min(FIRST, count)], tests[FIRST:count], tests[count:]]


def _span(source, line):
    """The lines of the statement in a function that holds a line; the whole body for a default of an argument.

    Empty where the line is executed once: by an import, or by the first call of a function whose results are kept.
    """
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    functions = [node for node in around if isinstance(node, ast.FunctionDef)]
    if not functions or any(
        "cache" in ast.unparse(decorator) for decorator in functions[-1].decorator_list
    ):
        return set()
    statement, body = around[-1], getattr(around[-1], "body", None)
    if statement is functions[-1]:
        return set(range(body[0].lineno, statement.end_lineno + 1))
    return {
        statement.lineno,
        *range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1),
    }
