"""Sphinx: furo and MyST, nothing else."""

project = "qkeel"
author = "The qkeel developers"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "qkeel"
exclude_patterns = ["_build", "conftest.py"]
