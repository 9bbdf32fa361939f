"""The page of processes has the table of the setups that tests/contract/processes measures."""

from pathlib import Path

from tests.contract.processes.setups import SETUPS


def columns():
    """The remedies of the table."""
    return sorted({name for setup in SETUPS.values() for name in setup.remedies})


def row(setup):
    more = " (more in the first step)" if setup.collectives_of_search else ""
    cells = [
        setup.title,
        str(setup.processes),
        setup.statistics,
        f"{setup.collectives}{more}",
    ]
    return " | ".join(
        ["", *cells, *(setup.remedies.get(name, "") for name in columns()), ""]
    ).strip()


def page_table():
    """The table of docs/internals/processes.md."""
    head = [
        "setup",
        "processes in the tests",
        "statistics and weights' numbers",
        "collectives added to the training's groups",
        *columns(),
    ]
    lines = [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *map(row, SETUPS.values()),
    ]
    return "\n".join(lines)


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "internals" / "processes.md"
    assert page_table() in page.read_text(encoding="utf-8"), (
        f"expected in {page.name}:\n{page_table()}"
    )
