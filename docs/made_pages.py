"""Pages of the site that are made when it is built: commands, notebooks, and the laboratory notebook in parts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkeel.records import Field, HeadField

HERE = Path(__file__).parent
MADE = HERE / "_made"
PART = 40_000  # characters of the laboratory notebook on one page: about 110 kB of HTML

RESULTS = ("results/", "recommend", "autopilot-results")  # pages of results, which programs write

# What to do next, for pages that programs write and for those on results. Every other page says it in its last line.
NEXT = {
    "LOG": "[What the lab found](claims.md) has the verdicts alone.",
    "zoo": "[Where attention is](sites.md) says how it is found, and what to do where it is not.",
    "foreign": "[Your own attention](how-to/own-attention.md) says what to do where a model is not understood.",
    "compatibility": "[Remedies](remedies.md) has each of them with an example.",
    "claims": "[Choose a remedy](how-to/choose-a-remedy.md), then [ask your own question](lab-tutorial.md).",
    "processes": "[Watch in every setup](how-to/watch.md), and where the numbers go: [trackers and tables](sinks.md).",
    "gpu": "[Which kernel runs](choice.md), and [benchmarks](benchmarks.md).",
    "machines": "[Trust](trust.md): what is promised of files and kills. [CPU kernels](native.md): their options.",
    "autopilot": "[A script at ten times its rate](autopilot-tutorial.md) shows one at work.",
    "autopilot-tutorial": "[What it does when](autopilot.md), or [choose](how-to/choose-a-remedy.md) yourself.",
    "recipes": "[Studies on many machines](clusters.md) spreads the runs.",
    "security": "[Trust](trust.md) says how each promise about files is tried.",
}


def from_made(text: str) -> str:
    """Rewrites links relative to docs/ for a page that lies in docs/_made/."""
    return re.sub(r"(\]\()(?!https?:|#|mailto:)", r"\1../", text)


def command_pages() -> dict[str, str]:
    """The pages of the program's commands, of what each says about itself."""
    from qkeel.cli.app import make_app
    from qkeel.cli.commands import commands

    text = make_app([word for command in commands() for word in command.split()]).generate_docs(
        output_format="markdown"
    )
    sections = re.split(r"^(?=## qkeel )", text, flags=re.M)[1:]
    studies = "".join(one for one in sections if one.startswith("## qkeel study\n"))
    others = "".join(sorted(one for one in sections if not one.startswith("## qkeel study\n")))
    intro = "`qkeel COMMAND --help` prints the same; `--help-all` shows the options that few need too. "
    studies = studies.replace("## qkeel study\n", "", 1).replace("\n### ", "\n## ")
    return {
        "commands": f"# The commands\n\n{intro}Those of studies are on [a page of their own](studies.md).\n\n{others}",
        "studies": f"# The commands of studies\n\n{intro}\n\n{studies}",
    }


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its cells, and under each what it put out."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(from_made(source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                parts.append(
                    f"```{{raw}} html\n<div class='table-wrapper container'>{''.join(data['text/html'])}</div>\n```"
                )
            else:
                parts.append("```text\n" + "".join(output.get("text") or data["text/plain"]).rstrip() + "\n```")
    where = f"This page is the notebook `docs/notebooks/{path.name}` with its output; the tests run it."
    return "\n\n".join([parts[0], where, *parts[1:]]) + "\n"


def own_texts(cls: type) -> dict[str, str]:
    """The texts at the fields that a class of ours adds or changes: behind `#:`, or in quotes on the next line."""
    if not cls.__module__.startswith("qkeel"):
        return {}
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text(encoding="utf-8")
    body = re.search(rf"^class {cls.__name__}\b.*\n(?:[ )].*\n|\n)*", source, flags=re.M)
    pattern = r'^    (\w+): (?:.*#: (.+)|.*\n    """(.+?)(?:""")?$)'
    found = re.finditer(pattern, body[0] if body else "", flags=re.M)
    return {field[1]: field[2] or field[3] for field in found}


def field_texts(cls: type) -> dict[str, str]:
    """The texts at the fields of a class and of its bases."""
    return {name: text for one in reversed(cls.__mro__) for name, text in own_texts(one).items()}


def inherited(cls: type) -> list[str]:
    """The texts of a class's bases alone, as lines of its docstring: on its page only its own fields have entries."""
    rows = [f"- `{name}`: {text}" for name, text in field_texts(cls).items() if name not in own_texts(cls)]
    return ["", "Fields of its bases:", "", *rows] if rows else []


def sourced(value: object) -> list[str]:
    """What a remedy's class says of itself, as lines of its docstring: name, rule with the default options, source."""
    from qkeel.remedies.base import Remedy

    if not (isinstance(value, type) and issubclass(value, Remedy) and "source" in vars(value)):
        return []
    rule = value().written_rule()
    said = {"Spec string": f"`{value.name}`", "What it does": value.line, "Rule": rule, "Source": value.source}
    return [line for title, text in said.items() if text for line in ("", f"{title}: {text}.")]


def pruned(tree: str) -> str:
    """The tree of the sidebar, its groups closed and without the third level, except where the reader is."""
    deeper = r'(<li class="toctree-l2) has-children("><a [^>]*>[^<]*</a>)<input [^>]*/><label .*?</label><ul>.*?</ul>'
    first, *groups = re.split(r'(?=<p class="caption")', re.sub(deeper, r"\1\2", tree, flags=re.S))
    mine = [i for i, group in enumerate(groups) if re.search(r'class="[^"]*\bcurrent\b', group)] or [0, 1]
    for i, group in enumerate(groups):
        pattern = r'<p class="caption"[^>]*>(.*?)</p>(.*</ul>)'
        closed = rf'<details{" open" if i in mine else ""}><summary class="caption">\1</summary>\2</details>'
        first += re.sub(pattern, closed, group, flags=re.S)
    return first


def log_parts() -> list[str]:
    """The laboratory notebook, cut between entries: the newest part first, each short enough for one page."""
    head, *entries = re.split(r"^(?=## )", (HERE / "LOG.md").read_text(encoding="utf-8"), flags=re.M)
    parts = [head]
    for entry in entries:
        if len(parts[-1]) + len(entry) > PART:
            parts.append(f"---\nnosearch: true\n---\n\n# Notebook, part {len(parts) + 1}\n\n")
        parts[-1] += entry
    return parts


def field_tables() -> dict[str, str]:
    """Tables of recorded numbers, for docs/file-formats.md."""
    from qkeel.records import HEAD_FIELDS, STEP_FIELDS, TABLE_COLUMNS

    def table(fields: Mapping[str, Field | HeadField]) -> str:
        rows = [
            f"| `{name}` | {field.unit} | {field.meaning.replace('|', '&#124;')} |" for name, field in fields.items()
        ]
        return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows]) + "\n"

    return {"step-fields": table(STEP_FIELDS), "head-fields": table(HEAD_FIELDS), "table-columns": table(TABLE_COLUMNS)}


def write_pages() -> None:
    """Writes all of them into docs/_made/, which git ignores."""
    MADE.mkdir(exist_ok=True)
    pages = command_pages() | field_tables()
    pages |= {path.stem: notebook_page(path) for path in sorted((HERE / "notebooks").glob("*.ipynb"))}
    pages |= {f"LOG-{i}": from_made(text) for i, text in enumerate(log_parts()[1:], 2)}
    for old in MADE.glob("*.md"):
        old.unlink()
    for name, text in pages.items():
        (MADE / f"{name}.md").write_text(text, encoding="utf-8")


def changed(name: str, text: str) -> str:
    """What is read of a page instead of its file: the first part of the notebook, and what to do next."""
    if name == "index":  # a pattern that fits no page yet is a warning, which ends the build
        kept = [
            line for line in text.splitlines() if not re.fullmatch(r"[\w/-]+\*", line) or any(HERE.glob(f"{line}.md"))
        ]
        text = "\n".join(kept) + "\n"
    if name == "LOG":
        first, *more = log_parts()
        names = "\n".join(f"_made/LOG-{i}" for i in range(2, len(more) + 2))
        contents = f"\n```{{toctree}}\n:maxdepth: 1\n:caption: Earlier entries\n\n{names}\n```\n"
        text = first + (contents if more else "")
    home = "../" if name.startswith("results/") else ""
    after = NEXT.get(name, f"[What the lab found]({home}claims.md)." if name.startswith(RESULTS) else "")
    return f"{text}\n\n**Next:** {after}\n" if after and "**Next:**" not in text else text
