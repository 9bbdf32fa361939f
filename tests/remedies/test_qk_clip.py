"""qk_clip: every rule of O18 and the defects that others have."""

import math
import warnings

import pytest
import torch
from tests.attention import values
from tests.drawing import randn
from tests.training import adamw, sgd

import qkeel
from qkeel.errors import QkeelWarning
from qkeel.functional.statistics import LogitStats
from qkeel.nn import GAU
from qkeel.remedies import qk_clip
from qkeel.sites import Tap

from .models import D_MODEL, attention, trained


def inputs(batch=2, seed=0, dtype=torch.float32):
    return randn(batch, 7, D_MODEL, seed=seed).to(dtype)


def maxima(model, *xs, **options):
    """Largest logit per head of every site, [sites heads]; in evaluation, which no clip counts."""
    model.eval()
    with Tap(model) as tap, torch.no_grad():
        for x in xs:
            model(x, **options)
        found = torch.stack([stats.max_logit for stats in tap.read().values()])
    model.train()
    return found


def clip_once(model, remedy, *xs, **options):
    """Forwards, then a step at rate 0, so only the clip moves weights."""
    optimizer = sgd(model, 0.0)
    with qkeel.apply(model, remedy, optimizer):
        for x in xs:
            trained(model(x, **options))
        optimizer.step()


def loud(model, *scales):
    """Make the heads' queries differ in size."""
    with torch.no_grad():
        for name in ("q_proj", "q_up", "q_rope"):
            if name in model._modules:
                layer = model.get_submodule(name)
                for part in (layer.weight, layer.bias):
                    if part is not None:
                        for head, scale in zip(part.chunk(len(scales)), scales):
                            head.mul_(scale)
    return model


SCALES = (40.0, 1.0, 15.0, 2.0)


def by_name(model):
    return values(model)


def unchanged(before, after, heads):
    return [torch.equal(a, b) for a, b in zip(before.chunk(heads), after.chunk(heads))]


def fixed_maxima(monkeypatch, model, values):
    """The tap says what we want it to."""

    def take(self, phase):
        like = torch.zeros(())
        stats = LogitStats.empty(4, 4, like)
        object.__setattr__(stats, "max_logit", torch.tensor(values))
        return dict.fromkeys((s.name for s in qkeel.find_sites(model)), stats)

    monkeypatch.setattr(Tap, "take", take)


@pytest.mark.parametrize(
    "value", [-3.0, -1e-30, -0.0, 0.0, 1e-30, math.nan, -math.inf, math.inf, 10.0]
)
def test_no_maximum_that_is_not_over_the_threshold_ever_changes_a_weight(
    value, monkeypatch
):
    # Four public implementations turn a negative maximum into NaN; an infinite one would zero the head for good.
    model = attention(torch.float32, 4, bias=True)
    before = by_name(model)
    fixed_maxima(monkeypatch, model, [value, 40.0, value, value])
    clip_once(model, "qk_clip:threshold=10")
    assert unchanged(before["q_proj.weight"], model.q_proj.weight, 4) == [
        True,
        False,
        True,
        True,
    ]
    assert torch.allclose(model.q_proj.weight[4:8], before["q_proj.weight"][4:8] / 2)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_capped_site_is_clipped_by_its_logit_before_the_cap():
    model, x = (
        loud(attention(torch.float64, 4), *[40.0] * 4),
        inputs(dtype=torch.float64),
    )
    top = maxima(model, x)[0]
    assert top.max() > 6
    clip_once(model, "softcap:cap=2+qk_clip:threshold=3", x)
    assert torch.allclose(maxima(model, x)[0], top.clamp(max=3))


@pytest.mark.parametrize("bias", [False, True])
def test_gains_and_offsets_of_a_gau_are_scaled_by_the_root(bias):
    torch.manual_seed(0)
    model, x = GAU(D_MODEL, size=8, bias=bias).double(), inputs(dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.2, 0.8)
    before, top = by_name(model), maxima(model, x).item()
    assert top > 4
    clip_once(model, "qk_clip:threshold=2", x)
    assert maxima(model, x).item() == pytest.approx(2.0, rel=1e-12)
    for name, p in model.named_parameters():
        gains = name.startswith(("qk_proj.q_", "qk_proj.k_"))
        factor = (2.0 / top) ** 0.5 if gains else 1.0
        assert torch.allclose(p, before[name] * factor, rtol=1e-12, atol=0), name


def test_a_fused_step_that_a_scaler_skipped_is_clipped_by_at_the_next_one():
    # As with optimizers that are not fused, whose hooks a scaler does not run: the maxima wait.
    model, x = loud(attention(torch.float64, 4), *SCALES), inputs(dtype=torch.float64)
    before, top = by_name(model), maxima(model, x)[0]
    optimizer = adamw(model, 0.0, fused=True)
    qkeel.apply(model, "qk_clip:threshold=1", optimizer)
    trained(model(x))
    for skipped in (1.0, 1.0, 0.0, 0.0):
        optimizer.found_inf = torch.tensor(skipped)
        optimizer.step()
        clipped = by_name(model)
        assert torch.equal(before["q_proj.weight"], clipped["q_proj.weight"]) is bool(
            skipped
        )
        if not skipped:
            assert torch.allclose(maxima(model, x)[0], top.clamp(max=1))
    with torch.no_grad():
        model.q_proj.weight.mul_(3)
    top = maxima(model, x)[0]
    trained(model(x))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf  # a step without the scaler clips by them too, once
    for _ in range(2):
        optimizer.step()
        assert torch.allclose(maxima(model, x)[0], top.clamp(max=1))


def test_a_clip_that_can_read_no_logits_any_more_warns_once_and_training_goes_on(
    monkeypatch,
):
    def boom(*args, **kwargs):
        raise ValueError("boom")

    model = loud(attention(torch.float32, 4), *SCALES)
    optimizer = sgd(model, 0.01)
    monkeypatch.setattr(qk_clip, "maxima", boom)
    with qkeel.apply(model, "qk_clip:threshold=1", optimizer):
        said = "qk_clip failed while reading logits and has stopped clipping: ValueError: boom"
        with pytest.warns(QkeelWarning, match=said):
            model(inputs())
        optimizer.step()
        before = by_name(model)
        model(inputs()).sum().backward()  # a second warning would be an error
        optimizer.step()
    assert not torch.equal(before["q_proj.weight"], by_name(model)["q_proj.weight"])


def test_a_model_that_is_never_called_is_warned_of_once():
    model = attention(torch.float32)
    optimizer = sgd(model, 0.0)
    with qkeel.apply(model, "qk_clip", optimizer):
        optimizer.step()  # its pass may have preceded `apply`
        with pytest.warns(
            QkeelWarning, match="qk_clip saw no attention call that was trained"
        ):
            optimizer.step()
        optimizer.step()  # a second warning would be an error


class Parallel(torch.nn.ModuleList):
    """The sum of layers of one input, which none of them changes for another."""

    def forward(self, x):
        return sum(layer(x) for layer in self)


# By their first places, or what is put in; the last is wrapped.
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), ("new", 0, 1, 2), (1, "new")])
def test_layers_are_clipped_by_their_own_logits_after_they_were_moved(order):
    layers = [loud(attention(torch.float32), *SCALES) for _ in range(3)]
    model, x = Parallel(layers), inputs()
    optimizer = sgd(model, 0.0)
    with qkeel.apply(model, "qk_clip:threshold=0.05", optimizer):
        trained(model(x))
        optimizer.step()
        new = loud(attention(torch.float32), *SCALES)
        moved = [new if place == "new" else layers[place] for place in order]
        del model[:]
        model.extend([*moved[:-1], torch.nn.Sequential(moved[-1])])
        with torch.no_grad():  # each over the threshold by another factor
            for i, layer in enumerate(layers):
                layer.q_proj.weight.mul_(3 + i)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QkeelWarning)
            trained(model(x))
            optimizer.step()
    tops = maxima(model, x).amax(1).tolist()
    for place, top in zip(order, tops, strict=True):
        if place == "new":
            assert top > 0.051
        else:
            assert top == pytest.approx(0.05, rel=1e-5)
