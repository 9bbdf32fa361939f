"""Writes one self-contained HTML page from run directories, with charts, findings in plain words, tables and
provenance. This package does not import torch, because pages are also made on machines without torch. They are read on
machines without a network."""

from qkeel.report.render import write

__all__ = ["write"]
