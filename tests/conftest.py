"""Shared by every test, in the processes that run them: see each_test."""

from __future__ import annotations

import gc
import importlib

import pytest


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(
        config, "workerinput"
    )
    if not hands_out:  # a process that only hands out tests needs no torch
        config.pluginmanager.register(importlib.import_module("each_test"))
