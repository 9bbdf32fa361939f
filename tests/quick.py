"""A parameter's values of which `make test` takes some, and `make slow` the rest."""

import pytest


def quick(values, keep):
    """All values, those that `keep` does not hold for marked as slow."""
    return [
        value
        if keep(value)
        else pytest.param(
            *value if type(value) is tuple else (value,), marks=pytest.mark.slow
        )
        for value in values
    ]


def one_in(values, every):
    """All values, but for the first of each `every` marked as slow: where they differ in kind by their neighbours."""
    return [_slow(value) if i % every else value for i, value in enumerate(values)]


def _slow(value):
    if isinstance(value, type(pytest.param())):
        return pytest.param(
            *value.values, id=value.id, marks=[*value.marks, pytest.mark.slow]
        )
    return pytest.param(
        *value if type(value) is tuple else (value,), marks=pytest.mark.slow
    )
