"""Checks the built site, for `make docs`: no dead link, no page over 200 kB, and ten answers that readers look for."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

BYTES = 200_000
CLICKS = 2
ANSWERS = {
    "which remedy for a vision transformer at a high rate": "sigma_reparam, then qk_norm:kind=layer",
    "what max logit is before or after the cap": "capped_max_logit is after the cap",
    "how to watch under torchrun": "qkeel watch -- torchrun",
    "how to undo": "handle.remove()",
    "what LALR costs": "of a fused AdamW step",
    "does it change my loss": "same bits with and without it",
    "how to read heads in pandas": "heads.to_pandas()",
    "how to add my own attention": "Describe what cannot be seen",
    "what happens at NaN": "A critical alarm comes once",
    "is my model supported": "Is my model supported?",
}


class Page(HTMLParser):
    """The links of a page, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.parts: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", "".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag == "a" and not re.match(r"https?:|mailto:|javascript:", found.get("href") or "#"):
            self.links.append(found.get("href") or "")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def main(site: Path) -> list[str]:
    """What is wrong with a site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    wrong = [f"{path.name} has {path.stat().st_size:,} bytes" for path in pages if path.stat().st_size > BYTES]
    clicks, queue = {(site / "index.html").resolve(): 0}, [(site / "index.html").resolve()]
    while queue:
        page = queue.pop(0)
        for link in pages[page].links:
            path, _, anchor = link.partition("#")
            place = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not place.exists() or (anchor and place in pages and anchor not in pages[place].anchors):
                wrong.append(f"{page.name}: dead link {link}")
            elif place in pages and place not in clicks:
                clicks[place] = clicks[page] + 1
                queue.append(place)
    for question, answer in ANSWERS.items():
        if not any(answer in pages[page].text and n <= CLICKS for page, n in clicks.items()):
            wrong.append(f"no answer within {CLICKS} clicks: {question}")
    return wrong


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))
