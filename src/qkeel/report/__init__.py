"""Writes one self-contained HTML page from run directories, with charts, findings in plain words, tables and
provenance. This package does not import torch, because pages are also made on machines without torch. They are read on
machines without a network.

The files from a directory to a page:

    render               `qkeel report`: which page a set of directories gets
    study_runs           reads studies; compare: pairs their runs by seed, and compares; study_page: their page
    watched_runs         reads watched runs; watch_page: their page
    html                 numbers as text, cells of tables; assets: templates, styles, and the scripts that draw charts
    figures              figures for a paper
"""

from qkeel.report.render import write

__all__ = ["write"]
