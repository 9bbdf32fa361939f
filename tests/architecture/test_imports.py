"""The floor plan holds: imports go down only, and each library has one entry point."""

from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".importlinter"


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A folder for the graph of imports, which is read from the source once."""
    return tmp_path_factory.mktemp("graph")


@pytest.fixture
def lint(graph, monkeypatch, capsys):
    def run(config):
        monkeypatch.chdir(ROOT)
        monkeypatch.syspath_prepend(str(ROOT / "src"))
        # The linter's own set-up of logging disables every logger that is there, qkeel's too, for all tests after this.
        monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
        kept = (
            lint_imports(
                config_filename=str(config), cache_dir=str(graph), no_logo=True
            )
            == EXIT_STATUS_SUCCESS
        )
        return kept, capsys.readouterr().out

    return run


def test_import_linter_keeps_every_contract(
    lint,
):
    kept, output = lint(CONFIG)
    assert kept, output
    assert " 0 broken" in output


@pytest.mark.parametrize(
    ("line", "instead", "contract"),
    [
        (
            "    ops\n    kernels | reference",
            "    kernels | reference\n    ops",
            "floor",
        ),
        ("    records | metrics", "    metrics", "floor"),
        (
            "    qkeel.lab.executors -> joblib\n",
            "    qkeel.lab.executors -> nothing\n",
            "joblib",
        ),
        ("    qkeel.cli.** -> rich\n", "", "command-line"),
    ],
)
def test_a_broken_floor_plan_is_noticed(
    line,
    instead,
    contract,
    tmp_path,
    lint,
):
    text = CONFIG.read_text(encoding="utf-8")
    assert line in text, (
        "the floor plan is spelt another way now: break the new spelling here"
    )
    (tmp_path / "broken").write_text(text.replace(line, instead), encoding="utf-8")
    kept, output = lint(tmp_path / "broken")
    assert not kept, output
    assert any("BROKEN" in row and contract in row for row in output.splitlines()), (
        output
    )
