"""Runs the notebooks of the docs and writes their output into them, without Jupyter."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "notebooks"


def shown(value: Any) -> dict[str, Any]:
    """What a notebook keeps of the last expression of a cell."""
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return {
        "output_type": "execute_result",
        "execution_count": None,
        "metadata": {},
        "data": data,
    }


def outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one cell: what it printed, and the value of its last expression."""
    tree, printed, found = ast.parse(source), io.StringIO(), []
    last = (
        tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    )
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = (
            None
            if last is None
            else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        )  # type: ignore[attr-defined]
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": text})
    return found if value is None else [*found, shown(value)]


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the output that its cells give now."""
    notebook, names = (
        json.loads(path.read_text(encoding="utf-8")),
        {"__name__": "__main__"},
    )
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs("".join(cell["source"]), names)
    return notebook


if __name__ == "__main__":
    for place in (
        map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(HERE.glob("*.ipynb"))
    ):
        text = json.dumps(executed(place), indent=1, ensure_ascii=False)
        place.write_text(text + "\n", encoding="utf-8")
