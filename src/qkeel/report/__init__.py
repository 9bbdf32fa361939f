"""One self-contained HTML page from run directories: charts, findings in plain words, tables, provenance. No torch
here: the page is made on machines that have none, and read on machines that have no network."""

from qkeel.report.render import write

__all__ = ["write"]
