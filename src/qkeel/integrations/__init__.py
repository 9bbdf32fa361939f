"""The trackers a watched model's numbers can go to, trainers that watch takes part in, attention for transformers.

One file each; the outside library is imported there, when it is used.
"""

import importlib

from qkeel.monitor.sinks import SINKS, sink, sinks

__all__ = ["SINKS", "register_attention", "sink", "sinks"]


def register_attention() -> str:
    """Makes `attn_implementation="qkeel"` known to transformers and returns "qkeel".

    >>> register_attention()
    'qkeel'

    Raises: MissingLibraryError without transformers.
    """
    return importlib.import_module("qkeel.integrations.huggingface").register()
