"""Checks the built site, for `make docs`: no dead link, nothing from other hosts, no page over 250 kB, ten answers."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

BYTES = 250_000  # the reference, which lists every public name, is the longest
CLICKS = 2
ANSWERS = {
    "which remedy for a vision transformer at a high rate": "sigma_reparam, then cosine",
    "what max logit is before or after the cap": "capped_max_logit is after the cap",
    "how to watch under torchrun": "qkeel watch -- torchrun",
    "how to undo": "handle.remove()",
    "what LALR costs": "of a fused AdamW step",
    "does it change my loss": "are bit-identical with and without it",
    "how to read heads in pandas": "heads.to_pandas()",
    "how to add my own attention": "Describe what cannot be seen",
    "what happens at NaN": "A critical alarm is raised once",
    "is my model supported": "Is my model supported?",
}


class Page(HTMLParser):
    """The links of a page, those of its text alone, and its text: the sidebar leads from everywhere to everywhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.own: set[str] = set()
        self.foreign: list[str] = []
        self.in_text = False
        self.parts: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", "".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag == "a" and not re.match(
            r"https?:|mailto:|javascript:", found.get("href") or "#"
        ):
            self.links.append(found.get("href") or "")
            self.own |= {self.links[-1]} if self.in_text else set()
        loads = {"script": "src", "img": "src", "link": "href"}.get(tag, "")
        self.foreign += (
            [found[loads] or ""]
            if re.match(r"(https?:)?//", found.get(loads) or "")
            else []
        )
        self.in_text |= tag == "article"

    def handle_endtag(self, tag: str) -> None:
        self.in_text &= tag != "article"

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def place(page: Path, link: str) -> Path:
    """The file that a link on a page leads to."""
    path = re.split(r"[#?]", link)[0]
    return (page.parent / path).resolve() if path else page


def clicks(pages: dict[Path, Page], start: Path) -> dict[Path, int]:
    """How many links lead from the first page to each other one, by the text of pages alone."""
    found, queue = {start: 0}, [start]
    while queue:
        page = queue.pop(0)
        for leads_to in sorted(place(page, link) for link in pages[page].own):
            if leads_to in pages and leads_to not in found:
                found[leads_to] = found[page] + 1
                queue.append(leads_to)
    return found


def main(site: Path) -> list[str]:
    """What is wrong with a site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    wrong = [
        f"{path.name} has {path.stat().st_size:,} bytes"
        for path in pages
        if path.stat().st_size > BYTES
    ]
    for page, read in pages.items():
        wrong += [f"{page.name} needs a network for {link}" for link in read.foreign]
        for link in read.links:
            leads_to, anchor = place(page, link), link.partition("#")[2]
            if not leads_to.exists() or (
                anchor and leads_to in pages and anchor not in pages[leads_to].anchors
            ):
                wrong.append(f"{page.name}: dead link {link}")
    near = [
        page
        for page, n in clicks(pages, (site / "index.html").resolve()).items()
        if n <= CLICKS
    ]
    for question, answer in ANSWERS.items():
        if not any(answer in pages[page].text for page in near):
            wrong.append(f"no answer within {CLICKS} clicks: {question}")
    return wrong


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))
