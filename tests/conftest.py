"""Shared by every test, in the processes that run them: see each_test."""

import functools
import gc
import importlib

import pytest


def pytest_configure(config):
    gc.disable()  # until all is collected
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(
        config, "workerinput"
    )
    if not hands_out:  # a process that only hands out tests needs no torch
        config.pluginmanager.register(importlib.import_module("each_test"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files go to a process, and all that fork to the same one, whose server imports torch and models once."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def forks(file):
        return "forked" in (config.rootpath / file).read_text(encoding="utf-8")

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "forked" if forks(file) else file

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None
