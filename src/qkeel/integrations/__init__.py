"""The trackers a watched model's numbers can go to besides qkeel's own files, and trainers that watch takes part in.

One file each; the outside library is imported there, when it is used.
"""

from qkeel.monitor.record.sink_table import SINKS, sink, sinks

__all__ = ["SINKS", "sink", "sinks"]
