"""qk_clip on models nobody prepared: every head ends at the threshold, nothing else moves by a bit."""

import copy

import pytest
import torch
from tests.quick import quick

import qkeel
from qkeel.sites import Tap

from .families import FAMILIES, batch, run
from .models import trained

TOO_MUCH = 1 + 1e-5


def maxima(model, *xs):
    """Largest logit per head of each site; in evaluation, which no clip counts."""
    model.eval()
    # torch's encoder has a fast path in evaluation with logits of its own rounding.
    with Tap(model) as tap, torch.no_grad():
        for x in xs:
            run(model, x)
        found = {name: stats.max_logit for name, stats in tap.read().items()}
    model.train()
    return found


def clip_once(model, remedy, *xs):
    """Forwards, then a step at rate 0: only the clip moves weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.apply(model, remedy, optimizer, batch=xs[0]):
        for x in xs:
            trained(run(model, x))
        optimizer.step()


def alone(before, after, layer, *xs):
    """A layer's maxima with its own weights clipped and the others' not: a clip below changes its input."""
    model = copy.deepcopy(before)
    with torch.no_grad():
        for part in (*layer.q, *layer.k, *layer.q_rope, *layer.k_rope):
            model.get_parameter(part.name).copy_(after.get_parameter(part.name))
            if part.bias:
                model.get_parameter(part.bias).copy_(after.get_parameter(part.bias))
    return maxima(model, *xs)[layer.site]


def ratio(before, after, part):
    """By what a part's weight (and bias) was multiplied."""
    found = [part.of(after) / part.of(before)]
    return found + ([part.of_bias(after) / part.of_bias(before)] if part.bias else [])


def same(before, after, part):
    kept = torch.equal(part.of(before), part.of(after))
    return kept and (
        not part.bias or torch.equal(part.of_bias(before), part.of_bias(after))
    )


def louder(model, layers):
    """Head 0 of every layer far above the others."""
    with torch.no_grad():
        for part in (p for layer in layers for p in (*layer.q[:1], *layer.q_rope[:1])):
            w = model.get_parameter(part.name)
            rows = torch.tensor(part.index)
            w.index_copy_(part.axis, rows, w.index_select(part.axis, rows) * 6)
            if part.bias:
                model.get_parameter(part.bias)[rows] *= 6
    return model


@pytest.mark.parametrize(
    "dtype",
    quick([torch.float64, torch.float32], lambda dtype: dtype is torch.float64),
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_over_ends_at_the_threshold_and_the_rest_are_bit_identical(
    family, dtype
):
    layers = FAMILIES[family].layers()
    model, x = louder(FAMILIES[family].model(dtype), layers), batch()
    before, top = copy.deepcopy(model), maxima(model, x)
    assert list(top) == [layer.site for layer in layers]
    every = torch.cat(list(top.values())).sort(descending=True).values
    threshold = float(every[2:4].mean())  # 3 of 8 heads are over
    clip_once(model, f"qk_clip:threshold={threshold}", x)
    touched = set()
    for layer in layers:
        was, now = top[layer.site], alone(before, model, layer, x)
        over = was > threshold
        assert (now <= threshold * TOO_MUCH).all()
        assert torch.allclose(
            now[over], torch.tensor(threshold, dtype=dtype), rtol=1e-5
        )
        assert torch.equal(now[~over], was[~over])
        gamma = (threshold / was).clamp(max=1)
        power = (
            0.5 if len(layer.k) == len(layer.q) else 1.0
        )  # grouped: all of it on the query
        for parts, exponent in (
            (layer.q, power),
            (layer.q_rope, 1.0),
            (layer.k if power == 0.5 else [], 0.5),
        ):
            for h, part in enumerate(parts):
                assert same(before, model, part) is not bool(over[h]), part
                for by in ratio(before, model, part):
                    assert torch.allclose(by, gamma[h] ** exponent, rtol=1e-5), part
                touched.add(part.name)
        assert all(same(before, model, part) for part in layer.k_rope)
        assert power == 0.5 or all(same(before, model, part) for part in layer.k)
    changed = {
        n
        for n, p in model.named_parameters()
        if not torch.equal(p, before.get_parameter(n))
    }
    assert {n for n in changed if n.endswith("weight")} <= touched
    assert all(p.isfinite().all() for p in model.parameters())
