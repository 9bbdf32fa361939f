"""The checker that the import hook of conftest.py puts on annotated functions."""

from beartype import BeartypeConf, beartype

# An int is a float, as static checkers have it (PEP 484).
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
