"""Sinks for experiment trackers, callbacks for trainers, and qkeel's attention in transformers.

Each module imports its external library only when it is used.
"""

import importlib

from qkeel.monitor.sinks import SINKS, sink, sinks

__all__ = ["SINKS", "register_attention", "sink", "sinks"]


def register_attention() -> str:
    """Registers `attn_implementation="qkeel"` with transformers and returns "qkeel".

    Raises:
        MissingLibraryError: transformers is not installed.

    Example:
        >>> register_attention()
        'qkeel'
    """
    return importlib.import_module("qkeel.integrations.huggingface").register()
