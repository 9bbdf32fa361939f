"""The option `heads` of qk_clip and lalr: those named are treated as without it, all others keep their bits."""

import pytest
import torch
from tests.autopilot.runs import adamw, batches, decoder
from torch.nn import functional as F

import qkeel
from qkeel.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from qkeel.remedies.lalr import LALR
from qkeel.remedies.qk_clip import QKClip

SITE = "blocks.1.attention"


def stepped(remedy):
    """Query and key weights [heads rows m] after a step."""
    model = decoder()
    optimizer = adamw(model, 0.05)
    handle = None if remedy is None else qkeel.apply(model, remedy, optimizer)
    for tokens in batches(0, 1):
        F.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    sites = qkeel.find_sites(model)
    found = {f"{s.name} {w.parameter}": w.heads(model.get_parameter(w.parameter)).detach().clone()
             for s in sites for w in (*s.query, *s.key)}  # fmt: skip
    if handle is not None:
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("make", "heads"),
    [
        (lambda heads: QKClip(threshold=0.05, heads=heads), (0, 3)),
        (lambda heads: LALR(heads=heads), ()),  # all of a site
    ],
)
def test_named_heads_are_treated_as_without_the_option_and_others_keep_their_bits(
    make, heads
):
    plain, whole, some = (
        stepped(None),
        stepped(make(None)),
        stepped(make(((SITE, heads),))),
    )
    everything = stepped(make(((SITE, ()), ("blocks.0.attention", ()))))
    changed = 0
    for name, weight in some.items():
        assert torch.equal(everything[name], whole[name])
        for head in range(4):
            named = name.startswith(SITE) and head in (heads or range(4))
            assert torch.equal(weight[head], (whole if named else plain)[name][head])
            changed += not torch.equal(weight[head], plain[name][head])
    assert changed


def test_heads_that_are_not_there_are_one_sentence():
    model = decoder()
    for error, make in (
        (InvalidTypeError, lambda: QKClip(heads=SITE)),
        (InvalidTypeError, lambda: LALR(heads=((SITE, (-1,)),))),
        (InvalidTypeError, lambda: LALR(heads=())),
        (
            UnknownNameError,
            lambda: qkeel.apply(model, QKClip(heads=(("blocks.7", ()),)), adamw(model)),
        ),
        (InvalidValueError, lambda: LALR(heads=((SITE, (0,)),))),
        (
            InvalidValueError,
            lambda: qkeel.apply(model, QKClip(heads=((SITE, (4,)),)), adamw(model)),
        ),
    ):
        with pytest.raises(error):
            make()
