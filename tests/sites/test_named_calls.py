"""Calls of F.scaled_dot_product_attention are read by that name, and whatever arrives in another way is not lost."""

import gc
from contextlib import ExitStack

import pytest
import torch
from tests.attention import Joint, written_causal
from tests.drawing import randn
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.capture import named_attention
from qkeel.capture.intercept import CaptureMode
from qkeel.capture.readers import SDPA
from qkeel.sites import Tap, find_sites

PASSES = range(8)  # 0, 1, 2 and 4 are searched everywhere


def by_name(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_reference(q, k, v):
    return SDPA(q, k, v, is_causal=True)


def by_upper_left(q, k, v):
    mask = causal_upper_left(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_lower_right(q, k, v):
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Doubled(TorchFunctionMode):
    """Doubles the queries of every call, as a mode of the user's may."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is SDPA:
            args = (2 * args[0], *args[1:])
        return function(*args, **(kwargs or {}))


def in_a_mode(q, k, v):
    with Doubled():
        return by_name(q / 2, k, v)


def in_a_checkpoint(q, k, v):
    return checkpoint(by_name, q, k, v, use_reentrant=False)


class Layer(Joint):
    """Attention of 4 heads, by whatever `attend` holds, that notes its largest causal logits."""

    def __init__(self, attend=by_name):
        super().__init__(attend, 32, 4)

    def forward(self, x):
        self.noted = self.largest(x, ~torch.ones(x.shape[1], x.shape[1]).triu(1).bool())
        return x + super().forward(x)


def stack(*attends):
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, attends))


def batch(seed):
    return randn(2, 7, 32, seed=seed)


@pytest.fixture(autouse=True, scope="module")
def _no_clips():
    """Clips of earlier tests that wait for the garbage collector would give the name back in the middle of one here."""
    gc.collect()


@pytest.fixture(autouse=True)
def torchs_own_name(monkeypatch):
    monkeypatch.setattr(named_attention, "_holders", [0])
    monkeypatch.setattr(F, "scaled_dot_product_attention", SDPA)


@pytest.fixture(params=["sites are known", "sites are not known"])
def tapped(request):
    with ExitStack() as undo:

        def tap_of(model):
            tap = undo.enter_context(Tap(model))
            if request.param == "sites are known":
                tap.sites.extend(find_sites(model, batch(0)))
            return tap

        yield tap_of


@pytest.fixture
def callbacks(monkeypatch):
    """The torch functions that have passed through a CaptureMode."""
    passed = []
    before = CaptureMode.__torch_function__

    def note(self, func, types, args=(), kwargs=None):
        passed.append(func)
        return before(self, func, types, args, kwargs)

    monkeypatch.setattr(CaptureMode, "__torch_function__", note)
    return passed


def check(model, tap, *, silent=None):
    """The tap has the largest logits of the pass that has just run at all layers but the `silent` ones."""
    stats = tap.read()
    layers = dict(model.named_children())
    assert set(stats) == set(layers) - (silent or set())
    for name, x in stats.items():
        expected = layers[name].noted.float()
        assert_close(x.max_logit, expected, rtol=1e-5, atol=1e-6)


def test_calls_by_name_are_read_without_a_callback_for_each_torch_function(
    tapped, callbacks
):
    model = stack(by_name, by_name)
    tap = tapped(model)
    for i in PASSES:
        callbacks.clear()
        model(batch(i))
        check(model, tap)
        assert bool(callbacks) == (i in (0, 1, 2, 4)), i
    assert F.scaled_dot_product_attention is SDPA


def test_each_call_counts_in_passes_that_are_searched_everywhere_and_in_others():
    model = stack(by_name, by_name)
    with qkeel.watch(model, rules=[], every=1) as monitor:
        for i in PASSES:
            model(batch(i))
            sample = monitor.sample
            assert sample is not None
            assert sample.monitor["calls"] == 2, i


@pytest.mark.parametrize(
    "attend", [by_reference, written_causal, by_upper_left, by_lower_right, in_a_mode]
)
def test_calls_in_another_way_are_read_in_every_pass(tapped, attend):
    model = stack(by_name, attend)
    tap = tapped(model)
    for i in PASSES:
        model(batch(i))
        check(model, tap)


@pytest.mark.parametrize(
    "attend", [by_reference, written_causal, by_lower_right, in_a_mode, in_a_checkpoint]
)
def test_a_model_that_changes_its_way_is_searched_again_at_once(tapped, attend):
    """The pass of the change has no numbers of that layer, rather than wrong ones; all others have theirs."""
    model = stack(by_name, by_name)
    tap = tapped(model)
    is_seen = attend in (by_lower_right, in_a_checkpoint)
    for i in PASSES:
        if i == 5:
            model[1].attend = attend
        model(batch(i))
        check(model, tap, silent={"1"} if i == 5 and not is_seen else None)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_somebody_elses_function_under_the_name_is_read_as_what_it_calls(
    tapped, monkeypatch, factor
):
    model = stack(by_name, by_name)
    tap = tapped(model)
    for i in PASSES:
        if i == 5:
            monkeypatch.setattr(
                F,
                "scaled_dot_product_attention",
                lambda q, k, v, **kwargs: SDPA(factor * q, k, v, **kwargs),
            )
        model(batch(i))
        if i >= 5:
            for layer in model:
                layer.noted = layer.noted * factor
        check(model, tap)


def test_a_pass_that_fails_gives_the_name_back_and_the_next_is_read(
    tapped,
):
    model = stack(by_name, by_name)
    tap = tapped(model)
    for i in PASSES:
        if i in (3, 6):
            with pytest.raises(RuntimeError):
                model(batch(i)[..., :31])
            assert F.scaled_dot_product_attention is SDPA
        model(batch(i))
        check(model, tap)
