"""Positions by name, for a preset with another one: kna+alibi."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.registry import Term, build, lookup
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.bias import ALiBi, Kerple
from qkeel.spec.position import NoPosition, Position, Rope
from qkeel.spec.rerope import LeakyReRope, ReRope
from qkeel.spec.xpos import XPos


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedPosition:
    """A position, one line of what it is with its source, and what options it has."""

    line: str
    kind: Callable[..., Position]


POSITIONS: dict[str, NamedPosition] = {
    "rope": NamedPosition(line="rotation, base= [arXiv 2104.09864]", kind=Rope),
    "nope": NamedPosition(line="none but the causal mask [arXiv 2305.19466]", kind=NoPosition),
    "alibi": NamedPosition(line="a bias that falls with the distance, fixed per head [2108.12409]", kind=ALiBi),
    "kerple": NamedPosition(line="a learned bias of the distance, kind=log|power [arXiv 2205.09921]", kind=Kerple),
    "xpos": NamedPosition(line="rotation whose pairs fade, base=, scale= [arXiv 2212.10554]", kind=XPos),
    "rerope": NamedPosition(line="distances clipped at window=, also in training [kexue.fm 9708]", kind=ReRope),
    "leaky_rerope": NamedPosition(line="distances 1/factor beyond window= [kexue.fm 9708]", kind=LeakyReRope),
}


def with_position(spec: AttentionSpec, term: Term) -> AttentionSpec:
    """The spec with the position of a term such as kerple:kind=power.

    Raises: UnknownNameError for a name or an option; RefusedError for hwfa, which is no position of one layer.
    """
    if term.name == "hwfa":
        raise RefusedError(
            "hwfa gives each layer a position and a window of its own, so it is no position of one spec; "
            f"here are: {', '.join(POSITIONS)}"
        )
    kind = lookup("position", POSITIONS, term.name).kind
    if term.name in ("rerope", "leaky_rerope") and "window" not in term.options:
        raise InvalidValueError(f"{term.name} needs a window; give it as {term.name}:window=32")
    return dataclasses.replace(spec, position=build(f"position {term.name!r}", kind, term.options))  # type: ignore[arg-type]
