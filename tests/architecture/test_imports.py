"""The floor plan holds: imports go down only, siblings do not know each other, each library has one entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from .source import MODULES, ROOMS_OF_VARIANTS, ROOT, imports, listed

CONFIG = ROOT / ".importlinter"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the graph of imports, which is read from the source once."""
    return tmp_path_factory.mktemp("graph")


@pytest.fixture
def lint(
    graph: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], tuple[bool, str]]:
    def run(config: Path) -> tuple[bool, str]:
        monkeypatch.chdir(ROOT)
        monkeypatch.syspath_prepend(str(ROOT / "src"))
        # The linter's own set-up of logging disables every logger that is there, qkeel's too, for all tests after this.
        monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
        kept = lint_imports(config_filename=str(config), cache_dir=str(graph), no_logo=True) == EXIT_STATUS_SUCCESS
        return kept, capsys.readouterr().out

    return run


def test_import_linter_keeps_every_contract(lint: Callable[[Path], tuple[bool, str]]) -> None:
    kept, output = lint(CONFIG)
    assert kept, output
    assert " 0 broken" in output


@pytest.mark.parametrize(
    ("line", "instead", "contract"),
    [
        ("    ops\n    kernels | reference", "    kernels | reference\n    ops", "floor"),
        ("    records | metrics", "    metrics", "floor"),
        ("    qkeel.lab.executors -> joblib\n", "    qkeel.lab.executors -> nothing\n", "joblib"),
        ("    qkeel.cli.** -> rich\n", "", "command-line"),
    ],
)
def test_a_broken_floor_plan_is_noticed(
    line: str, instead: str, contract: str, tmp_path: Path, lint: Callable[[Path], tuple[bool, str]]
) -> None:
    text = CONFIG.read_text(encoding="utf-8")
    assert line in text, "the floor plan is spelt another way now: break the new spelling here"
    (tmp_path / "broken").write_text(text.replace(line, instead), encoding="utf-8")
    kept, output = lint(tmp_path / "broken")
    assert not kept, output
    assert any("BROKEN" in row and contract in row for row in output.splitlines()), output


def variants(room: str) -> set[str]:
    """Modules of a room that hold the entries of its literal table."""
    from qkeel.integrations import SINKS
    from qkeel.ops import KERNELS
    from qkeel.remedies import REMEDIES

    tables = {
        "qkeel.remedies": {cls.__module__ for cls in REMEDIES.values()},
        "qkeel.kernels": {type(kernel).__module__ for kernel in KERNELS.values()},
        "qkeel.integrations": {place.partition(":")[0] for place in SINKS.values()},
        "qkeel.lab.studies": {name for name in MODULES if name.startswith("qkeel.lab.studies.")},
    }
    return {name for name in tables[room] if name.rpartition(".")[0] == room}


def test_variants_do_not_import_their_siblings() -> None:
    found = []
    for room in (*ROOMS_OF_VARIANTS, "qkeel.kernels"):
        own = {name for name in variants(room) if not name.endswith(("__init__", ".base"))}
        found += [f"{name} imports {other}" for name in own for other in imports(MODULES[name][1], name) & own]
    listed(found)


def test_what_remedies_share_knows_no_remedy() -> None:
    room = {name for name in MODULES if name.rpartition(".")[0] == "qkeel.remedies"}
    offered = variants("qkeel.remedies") - {"qkeel.remedies.base"}
    shared = room - offered - {"qkeel.remedies.apply"}
    assert len(shared) >= 8, "the modules that remedies share have another place now"
    listed([f"{name} imports {m}" for name in shared for m in imports(MODULES[name][1], name) & offered])


def test_a_room_of_variants_holds_its_variants_and_what_they_build_on() -> None:
    found = []
    for room in ROOMS_OF_VARIANTS:
        inside = {n for n in MODULES if n.rpartition(".")[0] == room and not n.endswith("__init__")}
        used = {m for name in inside | {f"{room}.__init__"} for m in imports(MODULES[name][1], name)}
        trainers = {n for n in inside if any(part in n for part in TRAINERS)}
        found += sorted(inside - variants(room) - used - trainers)
    listed(found)


# Integrations that are no sink: each takes part in the loop of a trainer, or gives models their attention.
TRAINERS = ("huggingface", "lightning", "accelerate", "transformers_attention")
