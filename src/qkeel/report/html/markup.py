"""HTML by construction: whatever is not already markup is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


VOID = frozenset({"br", "hr", "meta"})


def tag(name: str, attributes: Mapping[str, str | None], *children: str) -> Markup:
    """Returns one element; a child that is not Markup is escaped; an attribute of None is written without a value.

    >>> tag("p", {"class": "note"}, "a < b")
    '<p class="note">a &lt; b</p>'
    """
    head = name + "".join(
        f" {key}" if value is None else f' {key}="{html.escape(value)}"' for key, value in attributes.items()
    )
    if name in VOID:
        return Markup(f"<{head}>")
    return Markup(f"<{head}>{join(children)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Returns parts one after the other, each escaped unless it is Markup."""
    return Markup(between.join(p if isinstance(p, Markup) else html.escape(p) for p in parts))


def json_script(identifier: str, value: object) -> Markup:
    """Returns data for the page's scripts; no text inside can end the element.

    >>> json_script("d", ["</script>"])
    '<script type="application/json" id="d">["\\\\u003c/script>"]</script>'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')
