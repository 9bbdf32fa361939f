"""flash-attn's functions are read right and seen under every alias; a stand-in has their names and signatures."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Attention
from tests.each_row import each_row
from torch import nn
from torch.testing import assert_close

from qkeel import find_sites
from qkeel.capture.intercept import CaptureMode

from . import flash_stand_in as stand_in
from .oracle import observed, the_call

B, H, G, D = 2, 4, 2, 8
LENGTHS = (3, 0, 5, 1)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    package = types.ModuleType("flash_attn")
    for name in [n for n in vars(stand_in) if n.startswith("flash_attn")]:
        setattr(package, name, getattr(stand_in, name))
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in)

    def codes():
        functions = vars(stand_in).values()
        return [f.__code__ for f in functions if isinstance(f, types.FunctionType)]

    before = codes()
    yield
    assert codes() == before


def parts(t, s):
    generator = torch.Generator().manual_seed(t)
    shapes = ((B, t, H, D), (B, s, G, D), (B, s, G, D))
    return tuple(2 * torch.randn(shape, generator=generator) for shape in shapes)


def check_pairs(stats, pairs, options):
    """Against logits of whole sequences q [t h d], k [s g d] in float64; a cap is left out of the largest."""
    each = [
        stand_in.scores(q.double(), k.double(), *options)
        for q, k in pairs
        if len(q) and len(k)
    ]
    top = torch.stack([z.amax((1, 2)) for z, _ in each]).amax(0)
    rows = [
        torch.distributions.Categorical(logits=c[:, c[0].isfinite().any(-1)]).entropy()
        for _, c in each
    ]
    assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5)
    assert_close(
        stats.entropy.double(), torch.cat(rows, dim=1).mean(1), rtol=1e-5, atol=1e-5
    )
    assert stats.n_pairs[0] == sum(int(z[0].isfinite().sum()) for z, _ in each)
    assert len(stats.key_norm) == pairs[0][1].shape[1]


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.7},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (1, 0)},
    "one side": {"window_size": (-1, 1)},
    "cap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
}


NONE = {
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
}


def positional(given):
    return tuple({**NONE, **given}.values())


@pytest.mark.parametrize(("t", "s"), [(6, 6), (2, 6), (6, 2)])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_counts(name, t, s):
    q, k, v = parts(t, s)

    def call():
        return stand_in.flash_attn_func(q, k, v, **OPTIONS[name])

    ((_, _, stats),), out = observed(call)
    assert torch.equal(out, call())
    check_pairs(stats, list(zip(q, k)), positional(OPTIONS[name]))


def test_packed_arguments_are_unpacked_and_nested_calls_count_once():
    q, k, v = parts(5, 5)
    kv = torch.stack([k, v], dim=2)
    stats = the_call(lambda: stand_in.flash_attn_kvpacked_func(q, kv, causal=True))
    check_pairs(stats, list(zip(q, k)), positional({"causal": True}))
    qkv = torch.stack([q, q.flip(1), q], dim=2)
    stats = the_call(lambda: stand_in.flash_attn_qkvpacked_func(qkv, causal=True))
    check_pairs(stats, list(zip(q, q.flip(1))), positional({"causal": True}))


def lengths():
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(9, H, D, generator=generator),
        torch.randn(9, G, D, generator=generator),
        ends,
    )


@each_row("name", OPTIONS)
def test_sequences_packed_without_padding_attend_each_to_itself(name):
    q, k, ends = lengths()
    options = OPTIONS[name]
    stats = the_call(
        lambda: stand_in.flash_attn_varlen_func(q, k, k, ends, ends, 5, 5, **options)
    )
    pairs = list(zip(q.split(LENGTHS), k.split(LENGTHS)))
    check_pairs(stats, pairs, positional(options))


class Block(Attention):
    def __init__(self, attend):
        super().__init__(attend, H * D, H, groups=G)

    def operands(self, x):
        q, k, _ = self.projected(x)
        return q.unflatten(-1, (H, D)), k.unflatten(-1, (G, D))

    def forward(self, x):
        q, k = self.operands(x)
        return self.attend(q, k, k, causal=True).flatten(-2)


def test_a_wrapper_that_falls_back_to_torch_is_one_attention(
    monkeypatch,
):
    # As nanochat has it: a module of its own, with functions of the same names in a namespace.
    home = types.ModuleType("nanochat.flash_attention")
    source = """
import types
import torch.nn.functional as F
def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
flash_attn = types.SimpleNamespace(flash_attn_func=flash_attn_func)
"""
    exec(source, vars(home))
    monkeypatch.setitem(sys.modules, home.__name__, home)
    model, x = Block(home.flash_attn.flash_attn_func), torch.randn(B, 5, H * D)
    ((_, how, _),), _ = observed(lambda: model(x), model)
    assert how == "flash_attn_func"
    assert len(find_sites(model, x)) == 1


def test_an_option_that_cannot_be_accounted_for_is_named_and_not_guessed():
    q, k, ends = lengths()
    watcher = CaptureMode(nn.Identity(), pytest.fail)
    with watcher:
        stand_in.flash_attn_varlen_func(
            q, k, k, ends, ends, 5, 5, block_table=torch.zeros(1)
        )
        x = q[None]
        stand_in.flash_attn_func(x, x, x, softcap=2.0, alibi_slopes=SLOPES)
    assert [(missed.operation, missed.reason) for missed in watcher.missed] == [
        (
            "flash_attn_varlen_func",
            "flash_attn_varlen_func is called with block_table, whose effect is not known",
        ),
        (
            "flash_attn_func",
            "flash_attn_func is called with alibi_slopes with softcap: a bias after the cap, whose effect is not known",
        ),
    ]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors"
)  # torch's own, inside its CPU path
def test_nested_tensors_are_listed():
    q, k = (torch.randn(9, H, D) for _ in range(2))
    jagged = [
        torch.nested.nested_tensor(
            list(x.split((3, 5, 1))), layout=torch.jagged
        ).transpose(1, 2)
        for x in (q, k)
    ]
    with CaptureMode(nn.Identity(), pytest.fail) as watcher:
        F.scaled_dot_product_attention(jagged[0], jagged[1], jagged[1])
    (missed,) = watcher.missed
    assert missed.operation == "scaled_dot_product_attention"
