"""Whether a model runs in a context of torch's Join, in which processes may end at different steps."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.join import Joinable


def joined(model: nn.Module) -> bool:
    """True if it does; asked of the wrapper, such as DistributedDataParallel, that the context was given."""
    return isinstance(model, Joinable) and model._join_config.enable
