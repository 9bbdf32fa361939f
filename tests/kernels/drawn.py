"""Calls drawn from all that the passes over logits may read: shapes, slots, masks, dtypes, layouts, rows left out."""

import random

import torch
from tests.kernels.harness import DTYPES, laid

from qkeel.spec import (
    AttentionSpec,
    Fixed,
    L2Norm,
    Learned,
    LogN,
    NoPosition,
    RMSNorm,
    Rope,
    SlidingWindow,
    Softcap,
)
from qkeel.spec.call import make_call, with_query_mask

SLOTS = {
    "norm": [RMSNorm(gain="dim"), L2Norm()],
    "position": [
        Rope(),
        *(SlidingWindow(window=w, inner=NoPosition()) for w in (1, 4, 40, 70)),
    ],
    "scale": [
        Learned(init=0.2, log=True),
        Learned(init=0.2, per="head"),
        LogN(train_length=9),
        Fixed(-0.2),
    ],
    "cap": [Softcap(1.0), Softcap(30.0)],
}


def mask_of_keys(rng, b, h, t, s):
    """A mask that is the same for every query; now and then nothing is visible."""
    shape = rng.choice([(b, 1, 1, s), (1, 1, 1, s), None])
    return None if shape is None else torch.rand(shape) < rng.choice([0.7, 0.7, 0.0])


def mask_of_pairs(rng, b, h, t, s):
    """A mask or a bias of any kind; a row of pairs may see nothing."""
    pairs = torch.rand(b, 1, t, s) < 0.7
    pairs[0, 0, t // 3] = False
    lowest = torch.finfo(torch.float16).min
    return rng.choice(
        [
            mask_of_keys(rng, b, h, t, s),
            pairs,
            (torch.arange(s) >= torch.arange(b)[:, None] * (s // 4))[:, None, None],
            torch.randn(1, h, t, s).masked_fill(~pairs[:1], -torch.inf),
            torch.randn(1, 1, 1, s),
            torch.randn(b, 1, t, s).masked_fill(~pairs, lowest).half(),
        ]
    )


def drawn(seed, mask, sizes, *, dtypes=DTYPES, windows_with_masks=True):
    """The call of a seed, with queries of one of the sizes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    b, g, share = rng.choice([1, 3]), rng.choice([1, 2]), rng.choice([1, 3])
    d, s = rng.choice([8, 24, 40, 64, 128]), rng.choice([1, 5, 64, 65, 130])
    causal, h = rng.random() < 0.6, g * share
    t = s if causal and rng.random() < 0.5 else rng.choice([1, 3, 64, 67])
    slots = {
        name: rng.choice(some) for name, some in SLOTS.items() if rng.random() < 0.4
    }
    spec, shown = AttentionSpec(**slots), mask(rng, b, h, t, s)
    if not windows_with_masks and isinstance(spec.position, SlidingWindow):
        shown = None
    q = rng.choice(sizes) * torch.randn(b, h, t, d)
    dtype, layout = rng.choice(dtypes), rng.randrange(6)
    q = laid(q.clamp(-6e4, 6e4).to(dtype), layout)
    k = laid(torch.randn(b, g, s, d).to(dtype), layout + 1)
    params = spec.init_params(h, g, d)
    call = make_call(spec, q, k, k, params=params, mask=shown, causal=causal)
    if rng.random() < 0.4:
        return with_query_mask(call, torch.rand(b, t) < rng.choice([0.6, 0.8, 0.0]))
    return call
