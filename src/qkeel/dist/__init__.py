"""The layer over torch.distributed: which processes run this model, what they agree on, how its weights are split."""

from qkeel.dist.agreement import Verdict as Verdict
from qkeel.dist.agreement import agree as agree
from qkeel.dist.agreement import ordinal as ordinal
from qkeel.dist.sharding import is_split as is_split
from qkeel.dist.sharding import sharded as sharded
from qkeel.dist.sharding import splits_heads as splits_heads
from qkeel.dist.sharding import whole as whole
from qkeel.dist.shards import PartialSums as PartialSums
from qkeel.dist.shards import Shard as Shard
from qkeel.dist.shards import Span as Span
from qkeel.dist.shards import local as local
from qkeel.dist.shards import shard as shard
from qkeel.dist.shards import shards_of as shards_of
from qkeel.dist.together import ApartError as ApartError
from qkeel.dist.together import Membership as Membership
from qkeel.dist.together import together as together
from qkeel.dist.together import words_of_all as words_of_all
from qkeel.dist.world import collective_device as collective_device
from qkeel.dist.world import gather as gather
from qkeel.dist.world import rank as rank
from qkeel.dist.world import world as world
from qkeel.dist.wrappers import is_flat as is_flat
from qkeel.dist.wrappers import mates as mates
from qkeel.dist.wrappers import wrapped_by as wrapped_by
from qkeel.dist.wrappers import wrappers as wrappers
