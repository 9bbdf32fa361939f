"""A search leaves gradient checkpointing on: it finds what it finds without, and takes no more memory than a step."""

import warnings
import weakref
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from tests.attention import Joint, fused_causal
from tests.drawing import randn
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkeel import find_sites

H, D, T, LAYERS = 2, 8, 128, 3


class Block(Joint):
    """Attention with normed heads, fused, written out or head by head, and an MLP."""

    def __init__(self, attend):
        super().__init__(attend, H * D, H)
        self.gain = nn.Parameter(torch.rand(D) + 0.5)
        self.mlp = nn.Sequential(
            nn.Linear(H * D, 4 * H * D), nn.GELU(), nn.Linear(4 * H * D, H * D)
        )

    def heads(self, x):
        q, k, v = super().heads(x)
        return F.rms_norm(q, (D,), self.gain), F.rms_norm(k, (D,), self.gain), v

    def forward(self, x):
        x = x + super().forward(x)
        return x + self.mlp(x)


class Stack(nn.Module):
    """Blocks, each called by `call`."""

    def __init__(self, call=lambda block, x: block(x), attend=fused_causal):
        super().__init__()
        torch.manual_seed(0)
        self.call, self.blocks = (
            call,
            nn.ModuleList(Block(attend) for _ in range(LAYERS)),
        )

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


def by_function(reentrant):
    return lambda block, x: torch_checkpoint.checkpoint(
        block, x, use_reentrant=reentrant
    )


def nested(block, x):
    return by_function(False)(lambda y: by_function(True)(block, y), x)


def wrapped(**_):
    model = Stack()
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Block)
    )
    return model


def composed(**_):
    model = Stack()
    for block in model.blocks:
        composable(block)
    return model


class Live(TorchDispatchMode):
    """Counts the bytes of all memory that operators have made and that is still there; `peak` is the most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = {}

    def _gone(self, key):
        self.now -= self.known.pop(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for memory in [
            x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)
        ]:
            key = memory._cdata
            if key not in self.known:
                self.known[key] = memory.nbytes()
                self.now += memory.nbytes()
                weakref.finalize(memory, self._gone, key)
        self.peak = max(self.peak, self.now)
        return out


@contextmanager
def most():
    found = []
    with Live() as live:
        yield found
    found.append(live.peak)


def batch():
    return randn(6, T, H * D, seed=1)


def known(model, x):
    """All that a search says of the sites of a model, without the names that a wrapper puts in between."""
    sites = find_sites(model, x)
    assert all(site.verified for site in sites)
    return [
        str((s.name, s.n_heads, s.terms, s.query_gains, s.key_gains)).replace(
            _WRAPPER, ""
        )
        for s in sites
    ]


_WRAPPER = "._checkpoint_wrapped_module"
KINDS = {
    "reentrant": lambda: Stack(by_function(True)),
    "not reentrant": lambda: Stack(by_function(False)),
    "one inside the other": lambda: Stack(nested),
    "FSDP's wrapper": wrapped,
    "composable": composed,
}


def test_a_checkpointed_model_is_searched_as_one_that_is_not_within_the_memory_of_its_step():
    x = batch()
    plain = known(Stack(), x)
    assert len(plain) == LAYERS
    for kind, build in KINDS.items():
        model = build()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with most() as search:
                assert known(model, x) == plain, kind
        # torch's composable hooks leave the part of a run that was stopped early open.
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, kind
        with most() as step:
            model(x.requires_grad_()).square().mean().backward()
        assert search[0] <= step[0], (kind, search, step)
