"""Peers' own tests with qkeel's attention in them or every model watched; writes docs/internals/suites.md."""
