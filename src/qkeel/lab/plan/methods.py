"""The treatment of a form's trained weights: a method, for which form, and whether they are trained on under it."""

from __future__ import annotations

import dataclasses
from typing import Self, final

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.registry import Term, parse


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """[FORM/]METHOD[+METHOD][@LENGTH]: of AttentionSpec.extrapolate, with options as in rerope:window=16+log_n.
    Without a form it is for all; with a length the weights are trained on at it, the attention changed so.
    """

    terms: tuple[Term, ...]
    """Applied one after the other."""
    form: str = ""
    trained_at: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one.

        >>> str(Method.parse("baseline/abf:base=500000@256"))
        'baseline/abf:base=500000@256'
        """
        if not isinstance(text, str):
            raise InvalidTypeError(f"expected a post-hoc method like 'rerope:window=16', got {type(text).__name__}")
        form, _, rest = text.rpartition("/")
        name, at, length = rest.partition("@")
        if at and not (length.isdigit() and int(length) > 0):
            raise InvalidValueError(f"expected a length in tokens behind the @, as in pi@256, got {text!r}")
        return cls(terms=parse(name), form=form, trained_at=int(length) if at else 0)

    @property
    def label(self) -> str:
        """It without its form."""
        name = "+".join(map(str, self.terms))
        return f"{name}@{self.trained_at}" if self.trained_at else name

    def __str__(self) -> str:
        return f"{self.form}/{self.label}" if self.form else self.label
