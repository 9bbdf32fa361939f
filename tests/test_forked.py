"""A process that tests fork is like one that they start, though its server began in another test."""

import os
from pathlib import Path

from tests import forked

SCRIPT = "import os; print(os.environ.get('QKEEL_NATIVE'), os.environ.get('QKEEL_TEST_MARK'))"


def write(path):
    Path(path).write_text(str(os.environ.get("QKEEL_NATIVE")), encoding="utf-8")


def test_it_has_the_environment_of_what_starts_it(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    for native in ("1", "0", None):  # whichever the server has, others come
        if native is None:
            monkeypatch.delenv("QKEEL_NATIVE")
        else:
            monkeypatch.setenv("QKEEL_NATIVE", native)
        done = forked.python(
            ["script.py"], tmp_path, environment={"QKEEL_TEST_MARK": "more"}
        )
        assert done.stdout.split() == [str(native), "more"], done.stderr
        process = forked.forkserver().Process(
            target=write, args=(str(tmp_path / "found"),)
        )
        process.start()
        process.join()
        assert (tmp_path / "found").read_text(encoding="utf-8") == str(native)
