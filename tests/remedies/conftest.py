"""Remedies are tested on models that many tests build alike: each is searched once."""

from tests.searched_once import searched_once  # noqa: F401
