"""Generates pages when the site is built: the commands, and the tables of recorded fields."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkeel.records import Field, HeadField

HERE = Path(__file__).parent
MADE = HERE / "_made"
# The "Next" line of pages that programs write. Every other page contains its own as its last line.
NEXT = {"compatibility": "[Remedies](remedies.md) has each of them with an example."}
SHORT = 13  # a name of at most this many characters is never broken


def command_pages() -> dict[str, str]:
    """The page of the program's commands, generated from their help texts."""
    from qkeel.cli.app import make_app
    from qkeel.cli.commands import commands

    text = make_app(
        [word for command in commands() for word in command.split()]
    ).generate_docs(output_format="markdown")
    text = text.replace(
        "qkeel watch watch ", "qkeel watch "
    )  # cyclopts puts the name before a usage of our own
    sections = re.split(r"^(?=## qkeel )", text, flags=re.M)[1:]
    last = "## qkeel study\n"  # its studies are sections of their own, so it comes after the short ones
    ordered = sorted(sections, key=lambda one: (one.startswith(last), one))
    intro = "`qkeel COMMAND --help` prints the same; `--help-all` adds the options that few people need."
    return {"commands": f"# Command line\n\n{intro}\n\n{''.join(ordered)}"}


def own_texts(cls: type) -> dict[str, str]:
    """The descriptions of the fields that a qkeel class adds or changes, from `#:` comments or strings next to them."""
    if not cls.__module__.startswith("qkeel"):
        return {}
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text(
        encoding="utf-8"
    )
    body = re.search(
        rf"^class {cls.__name__}\b.*\n(?:[ )].*\n|\n)*", source, flags=re.M
    )
    pattern = r'^(?:    #: (.+)\n    (\w+): |    (\w+): (?:.*#: (.+)|.*\n    """(.+?)(?:""")?$))'
    found = re.finditer(pattern, body[0] if body else "", flags=re.M)
    return {field[2] or field[3]: field[1] or field[4] or field[5] for field in found}


def field_texts(cls: type) -> dict[str, str]:
    """The descriptions of the fields of a class and of its bases."""
    return {
        name: text
        for one in reversed(cls.__mro__)
        for name, text in own_texts(one).items()
    }


def inherited(cls: type) -> list[str]:
    """The field descriptions of a class's bases, as lines of its docstring: its page lists only its own fields."""
    rows = [
        f"- `{name}`: {text}"
        for name, text in field_texts(cls).items()
        if name not in own_texts(cls)
    ]
    return ["", "Fields of its bases:", "", *rows] if rows else []


def sourced(value: object) -> list[str]:
    """A remedy's name, line, rule with default options, and source, as lines for the docstring of its class."""
    from qkeel.remedies.base import Remedy

    if not (
        isinstance(value, type)
        and issubclass(value, Remedy)
        and "source" in vars(value)
    ):
        return []
    rule = value().written_rule()
    said = {
        "Spec string": f"`{value.name}`",
        "What it does": value.line,
        "Rule": rule,
        "Source": value.source,
    }
    return [
        line
        for title, text in said.items()
        if text
        for line in ("", f"{title}: {text}.")
    ]


def pruned(tree: str) -> str:
    """The sidebar tree with closed groups, except around the current page, and without names under the reference."""
    # The reference has a page for each of 150 names, which its own page lists.
    deeper = (
        r'(<li class="toctree-l1[^"]*?) has-children("><a [^>]*>Reference</a>)'
        r"<input [^>]*/><label .*?</label><ul>.*?</ul>"
    )
    first, *groups = re.split(
        r'(?=<p class="caption")', re.sub(deeper, r"\1\2", tree, flags=re.S)
    )
    mine = [
        i
        for i, group in enumerate(groups)
        if re.search(r'class="[^"]*\bcurrent\b', group)
    ] or [0, 1]
    for i, group in enumerate(groups):
        pattern = r'<p class="caption"[^>]*>(.*?)</p>(.*</ul>)'
        closed = rf'<details{" open" if i in mine else ""}><summary class="caption">\1</summary>\2</details>'
        first += re.sub(pattern, closed, group, flags=re.S)
    return first


def breakable(body: str) -> str:
    """A page whose longer names in tables and headings may break after punctuation, but whose options never break."""

    def broken(name: re.Match[str]) -> str:
        return (
            re.sub(r"(?<=.[_:+=,(/.])(?=[^<)\d])", "<wbr>", name[0])
            if len(name[0]) > SHORT
            else name[0]
        )

    def in_table(table: re.Match[str]) -> str:
        return re.sub(r'(?<=<span class="pre">)[^<]+', broken, table[0])

    def whole(command: re.Match[str]) -> str:
        return re.sub(
            r"(?<=[\s>])(--?[a-z][\w-]*|--)(?=[\s<])",
            r'<span class="option">\1</span>',
            command[0],
        )

    body = re.sub(r"(?<=\d) (?=%)", "&nbsp;", body)
    body = re.sub(
        r"<h[1-3]>qkeel[\w.]+", lambda module: module[0].replace(".", ".<wbr>"), body
    )
    body = re.sub(r"<table.*?</table>", in_table, body, flags=re.S)
    body = re.sub(r'<span class="pre">--', '<span class="option">--', body)
    return re.sub(r'<div class="highlight-sh .*?</div>', whole, body, flags=re.S)


def stackable(body: str) -> str:
    """A page in which each table with three or more columns and with sentences in it gets the class "stacked". Each of
    its cells gets the name of its column, which site.css shows before the cell if a phone has no room for columns."""

    def named(table: re.Match[str]) -> str:
        names = [
            re.sub("<.*?>", "", name)
            for name in re.findall(r"<th.*?</th>", table[0], flags=re.S)
        ]
        cells = [
            re.sub("<.*?>", "", cell)
            for cell in re.findall(r"<td.*?</td>", table[0], flags=re.S)
        ]
        if len(names) < 3 or not any(len(cell.split()) > 12 for cell in cells):
            return table[0]
        columns = itertools.cycle(names)
        text = re.sub(r"<td", lambda _: f'<td data-column="{next(columns)}"', table[0])
        return text.replace('class="docutils', 'class="docutils stacked', 1)

    return re.sub(r"<table class=\"docutils.*?</table>", named, body, flags=re.S)


def field_tables() -> dict[str, str]:
    """Tables of recorded fields, for docs/guides/trackers.md."""
    from qkeel.records import (
        BLOCK_FIELDS,
        HEAD_FIELDS,
        MONITOR_FIELDS,
        STEP_FIELDS,
        TABLE_COLUMNS,
    )

    def table(fields: Mapping[str, Field | HeadField]) -> str:
        rows = [
            f"| `{name}` | {field.unit} | {field.meaning.replace('|', '&#124;')} |"
            for name, field in fields.items()
        ]
        return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows]) + "\n"

    return {
        "step-fields": table(STEP_FIELDS),
        "monitor-fields": table(
            {f"monitor_{name}": field for name, field in MONITOR_FIELDS.items()}
        ),
        "head-fields": table(HEAD_FIELDS),
        "block-fields": table(
            {f"{name}/LAYER": field for name, field in BLOCK_FIELDS.items()}
        ),
        "table-columns": table(TABLE_COLUMNS),
    }


def terms() -> dict[str, str]:
    """The terms of the glossary with their definitions, for tooltips."""
    text = (
        (HERE / "metrics.md")
        .read_text(encoding="utf-8")
        .partition("\n## Glossary\n")[2]
        .partition("\n**Next:**")[0]
    )
    found = {}
    for term, meaning in re.findall(r"^([^\n:][^\n]*)\n: ([^\n]*)", text, flags=re.M):
        found |= dict.fromkeys(re.sub(r" \(.*?\)", "", term).split(", "), meaning)
    return found


def write_pages() -> None:
    """Writes all generated pages into docs/_made/, which git ignores."""
    MADE.mkdir(exist_ok=True)
    for old in MADE.glob("*.md"):
        old.unlink()
    for name, text in (command_pages() | field_tables()).items():
        (MADE / f"{name}.md").write_text(text, encoding="utf-8")


def _download(name: str, link: re.Match[str]) -> str:
    """Turns a link on a page into a download if it leads to a file that is not on the site."""
    target = ((HERE / name).parent / link[2]).resolve()
    on_site = target.is_relative_to(HERE) and (
        target.parent != HERE / "internals" or target.stem == "numbers"
    )
    return link[0] if on_site else f"{{download}}`{link[1]} <{link[2]}>`"


def changed(name: str, text: str) -> str:
    """The text that Sphinx reads in place of the file: links to files that are not on the site become downloads, a
    "Next" line is added to pages that programs write, and pictures get a width, so that they link to the full size."""
    text = re.sub(
        r"\[([^]`\n]+)\]\(((?:(?:\.\./)+|internals/)[A-Za-z][^)#\s]*\.md)(?:#[^)]*)?\)",
        lambda link: _download(name, link),
        text,
    )
    text = re.sub(
        r"^(:class: only-(?:light|dark)\n)(?=```)",
        r"\1:width: 100%\n",
        text,
        flags=re.M,
    )
    after = NEXT.get(name, "")
    return (
        f"{text}\n\n**Next:** {after}\n" if after and "**Next:**" not in text else text
    )
