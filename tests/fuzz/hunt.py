"""A class of input, and the hunt for one that ends in anything but a right answer or a QkeelError."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from qkeel.errors import QkeelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hunt:
    """Inputs and what is done with each: `check` returns, or raises QkeelError where `refusal` allows it."""

    inputs: Callable[[], SearchStrategy[Any]]
    check: Callable[[Any], object]
    few: int = 100
    """Cases in the quick tests."""


def hunt(one: Hunt, cases: int, seed: int) -> int:
    """Runs so many cases; returns how many were refused with a QkeelError.

    A case that raises anything else, or fails an assertion, is made as small as it gets and raised.
    """
    refused = 0

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(one.inputs())
    def each(case: Any) -> None:
        nonlocal refused
        try:
            one.check(case)
        except QkeelError as error:
            if not str(error).strip():
                raise AssertionError("an error without a word") from error
            refused += 1

    log = logging.getLogger("qkeel")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            each()
    finally:
        log.setLevel(before)
    return refused
