"""The layer over torch.distributed: which processes run this model, what they agree on, how its weights are split."""

from qkeel.dist.agreement import Verdict as Verdict
from qkeel.dist.agreement import agree as agree
from qkeel.dist.agreement import ordinal as ordinal
from qkeel.dist.sharding import sharded as sharded
from qkeel.dist.sharding import splits_heads as splits_heads
from qkeel.dist.sharding import whole as whole
from qkeel.dist.world import collective_device as collective_device
from qkeel.dist.world import gather as gather
from qkeel.dist.world import rank as rank
from qkeel.dist.world import world as world
