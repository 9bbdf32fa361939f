"""The former name of qkeel.distributed; code of this repository that still imports it moves over."""

from qkeel.distributed import *  # noqa: F403
from qkeel.distributed import agree as run_on_all  # noqa: F401
from qkeel.distributed import gathered_axes as fully_sharded  # noqa: F401
from qkeel.distributed import is_sharded as sharded  # noqa: F401
