"""The floor plan holds: imports go down only, siblings do not know each other, each library has one door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .source import MODULES, ROOT, imports

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--config", str(config), "--no-cache"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_import_linter_keeps_every_contract() -> None:
    result = lint(ROOT / ".importlinter")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("line", "instead", "contract"),
    [
        ("    ops\n    kernels | reference", "    kernels | reference\n    ops", "floor"),
        ("    records | metrics\n", "    metrics\n", "floor"),
        ("    qkeel.lab.workers -> joblib\n", "    qkeel.lab.workers -> nothing\n", "joblib"),
        ("    qkeel.cli.* -> rich\n", "", "command-line"),
    ],
)
def test_a_broken_floor_plan_is_noticed(line: str, instead: str, contract: str, tmp_path: Path) -> None:
    text = (ROOT / ".importlinter").read_text(encoding="utf-8")
    assert line in text, "the floor plan is spelt another way now: break the new spelling here"
    (tmp_path / "broken").write_text(text.replace(line, instead), encoding="utf-8")
    result = lint(tmp_path / "broken")
    assert result.returncode != 0, result.stdout
    assert any("BROKEN" in row and contract in row for row in result.stdout.splitlines()), result.stdout


# Rooms whose files are variants of one thing, and the files in them that all may build on.
SHARED = {
    "qkeel.remedies": {
        *("adam_pass", "apply", "base", "change_spec", "join", "linear", "masters", "pieces", "presence", "steps"),
        *("bundle", "group_rates"),
        *("after_projection", "change_norm", "change_scale", "exchange", "parameters", "seam", "stand_in"),
        *("blocks", "head", "output_projection"),
    },
    "qkeel.kernels": {"contract"},
    "qkeel.lab.studies": set(),
    "qkeel.integrations": {"table"},
}


@pytest.mark.parametrize("room", SHARED)
def test_variants_do_not_import_their_siblings(room: str) -> None:
    for name, (_, tree) in MODULES.items():
        parent, _, own = name.rpartition(".")
        if parent != room or own in SHARED[room] or own == "__init__":
            continue
        siblings = {m.rpartition(".")[2] for m in imports(tree, name) if m.rpartition(".")[0] == room}
        assert siblings <= SHARED[room], f"{name} imports {siblings - SHARED[room]}"


def test_what_remedies_share_knows_no_remedy() -> None:
    shared = SHARED["qkeel.remedies"] - {"apply"}
    for own in shared:
        tree = MODULES[f"qkeel.remedies.{own}"][1]
        found = {m.rpartition(".")[2] for m in imports(tree, f"qkeel.remedies.{own}") if "qkeel.remedies." in m}
        assert found <= shared, f"{own} imports {found - shared}"


def test_every_remedy_kernel_and_study_is_one_file_in_a_literal_table() -> None:
    from qkeel.integrations import SINKS
    from qkeel.ops import KERNELS
    from qkeel.remedies import REMEDIES

    homes = [cls.__module__ for cls in REMEDIES.values()]
    assert len(set(homes)) == len(homes)
    files = {n for n in MODULES if n.rpartition(".")[0] == "qkeel.remedies"}
    shared = {f"qkeel.remedies.{own}" for own in SHARED["qkeel.remedies"] | {"__init__"}}
    assert files - shared == set(homes)
    assert len({type(k).__module__ for k in KERNELS.values()}) == len(KERNELS)
    doors = {cls.__module__ for cls in SINKS.values() if cls.__module__.startswith("qkeel.integrations.")}
    trainers = {"qkeel.integrations.huggingface", "qkeel.integrations.lightning"}
    files = {n for n in MODULES if n.rpartition(".")[0] == "qkeel.integrations"}
    assert files - trainers - {"qkeel.integrations.table", "qkeel.integrations.__init__"} == doors
