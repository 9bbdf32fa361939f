"""Peers' own tests with qkeel's attention in them or every model watched; `make suites` writes docs/internals/suites.md."""
