"""Training in 8-bit floats, with fake quantisation, or with quantised weights: measured, and remedies act or say why not."""

import math
import random
import warnings

import pytest
import torch
from tests import attention
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from qkeel.errors import QkeelError, QkeelWarning

WIDTH, HEADS, TOKENS = 16, 2, 6
REMEDIES = (
    "qk_clip:threshold=2",
    "qk_clip:threshold=2,steps=matched",
    "lalr:tau=0.3",
    "qk_norm",
    "qk_norm:gain=scalar",
    "softcap:cap=2",
    "frozen_qk",
    "qk_lr:factor=0",
    "spectral_cap:cap=1",
    "sigma_reparam",
)


class FakeQuantised(nn.Linear):
    """A layer whose weight is rounded to a grid of 8 bits a row in each pass, with gradients passed straight through."""

    def forward(self, x):
        step = self.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (
            self.weight + ((self.weight / step).round() * step - self.weight).detach()
        )
        return F.linear(x, rounded, self.bias)


class Hidden(Tensor):
    """A tensor that supports one product and nothing else, as activations in 8-bit floats do."""

    @staticmethod
    def __new__(cls, values):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    def __tensor_flatten__(self):
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Hidden(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            return torch.mm(*(x.values if isinstance(x, Hidden) else x for x in args))
        if function is torch.ops.aten.detach.default:
            return Hidden(args[0].values)
        raise NotImplementedError(f"attempting to run {function}")


class HiddenProduct(torch.autograd.Function):
    """x Wᵀ of hidden tensors."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(Hidden(x), Hidden(weight.mT))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.mT @ x


class EightBit(nn.Linear):
    """A layer that multiplies in numbers of its own, inside an autograd.Function."""

    def forward(self, x):
        out = HiddenProduct.apply(x.flatten(0, -2), self.weight)
        return out.unflatten(0, x.shape[:-1])


class Stored(Tensor):
    """A weight stored as int8 with one scale a row, which is multiplied as what it stands for and cannot be written."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Stored(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, w, *bias = args
            return F.linear(x, w.codes * w.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Stored(args[0].codes, args[0].scale)
        raise NotImplementedError(f"attempting to run {function}")


class Attention(attention.Attention):
    def __init__(self):
        super().__init__(self.causal, WIDTH, HEADS, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def causal(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        return self.o(super().forward(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)))
        return self.head(x)


def converted(model, kind):
    """Exchanges the layers of attention, as libraries for training in few bits do: the new ones hold the old weights."""
    for layer in model.layers:
        for name, old in list(layer.named_children()):
            if kind == "stored":
                scale = old.weight.detach().abs().amax(1, keepdim=True) / 127
                codes = (old.weight.detach() / scale).round().to(torch.int8)
                old.weight = nn.Parameter(Stored(codes, scale), requires_grad=False)
            else:
                cls = {"fake": FakeQuantised, "eight bit": EightBit}[kind]
                new = cls(WIDTH, WIDTH, bias=False)
                new.weight = old.weight
                setattr(layer, name, new)


def largest(model, x):
    """The largest logits [layers, heads] of a pass, from q and k as attention gets them, in float64."""
    tops = []
    shown = F.scaled_dot_product_attention

    def seen(q, k, v, **options):
        z = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
        tops.append(z.masked_fill(hidden, -torch.inf).amax((0, 2, 3)))
        return shown(q, k, v, **options)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", seen)
        model(x)
    return torch.stack(tops)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(2, TOKENS, WIDTH, generator=generator) for _ in range(3)]


def made(kind):
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for layer in model.layers:
            layer.q.weight *= 4
            layer.k.weight *= 4
    if kind:
        converted(model, kind)
    return model


def trained(model, optimizer):
    losses = []
    for x in batches():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)


@pytest.mark.parametrize("kind", ["fake", "eight bit", "stored"])
def test_what_is_measured_is_exact_and_changes_no_loss(kind):
    is_stored = kind == "stored"
    plain = made(kind)
    losses = trained(plain, optimizer_of(plain))
    for is_first in (True, False):
        # The monitor may be there before the layers are converted.
        model = made("" if is_first and not is_stored else kind)
        optimizer = optimizer_of(model)
        with qkeel.watch(model, optimizer, every=1) as monitor:
            if is_first and not is_stored:
                converted(model, kind)
            exact = []
            for x in batches():
                exact.append(largest(made_like(model, kind), x))
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert loss.item() == losses[len(exact) - 1]
        recorded = torch.as_tensor(
            monitor.history.heads["max_logit"], dtype=torch.float64
        )
        torch.testing.assert_close(recorded, torch.stack(exact), rtol=1e-5, atol=1e-5)


def made_like(model, kind):
    """Another model with the same weights, so that no reference touches the watched one."""
    other = made(kind)
    for p, q in zip(other.parameters(), model.parameters()):
        p.data = q.data
    return other


def outcome(seed):
    """What a drawn remedy does to a drawn kind of layers: "acts", "told: …", "refused: …", or what is wrong."""
    draw = random.Random(seed)
    kind = draw.choice(("fake", "eight bit", "stored"))
    is_stored = kind == "stored"
    remedy = draw.choice(REMEDIES)
    is_first = draw.random() < 0.5 and not is_stored and remedy != "sigma_reparam"
    x = batches()[0]
    model = made("" if is_first else kind)
    optimizer = optimizer_of(model)
    title = f"{remedy} {'before' if is_first else 'after'} {kind}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            qkeel.apply(model, remedy, optimizer, batch=x)
        except QkeelError as error:
            return f"refused: {title}: {error}"
        if is_first:
            converted(model, kind)
        with torch.no_grad():
            is_changed = not torch.equal(model(x), made(kind)(x))
        old = [a.q.weight.detach().clone() for a in model.layers if not is_stored]
        trained(model, optimizer)
    if any(issubclass(w.category, QkeelWarning) for w in caught):
        return f"told: {title}: {[str(w.message) for w in caught]}"
    after = largest(model, batches()[-1])
    acts = {
        # The grid that weights are rounded to moves logits by some thousandths.
        "qk_clip": bool((after < 2.1).all()),
        "spectral_cap": bool((after < 8).all()),
        "qk_norm": is_changed,
        "softcap": is_changed,
        "frozen_qk": all(map(torch.equal, old, (a.q.weight for a in model.layers))),
        "qk_lr": all(map(torch.equal, old, (a.q.weight for a in model.layers))),
        "lalr": True,
        "sigma_reparam": True,
    }[remedy.partition(":")[0]]
    return f"acts: {title}" if acts else f"SILENT: {title}: {after}"


@pytest.mark.parametrize("seed", range(16))
def test_a_remedy_acts_or_says_why_it_does_not(seed):
    assert outcome(seed).startswith(("acts", "told", "refused"))


def test_a_norm_whose_projection_is_exchanged_says_so_once():
    model = made("")
    optimizer = optimizer_of(model)
    handle = qkeel.apply(model, "qk_norm", optimizer, batch=batches()[0])
    converted(model, "fake")
    with pytest.warns(
        QkeelWarning, match=r"no longer acts at layers\.0\.k, layers\.0\.q"
    ):
        model(batches()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batches()[0])
    handle.remove()


def test_a_projection_that_is_wrapped_is_no_exchange():
    model = made("")
    qkeel.apply(model, "qk_norm", optimizer_of(model), batch=batches()[0])
    model.layers[0].q = nn.Sequential(model.layers[0].q)
    model.layers[1] = nn.Sequential(model.layers[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batches()[0])


def test_sites_found_before_a_conversion_are_clipped_after_it():
    model = made("")
    sites = qkeel.find_sites(model, batches()[0])
    converted(model, "eight bit")
    optimizer = optimizer_of(model)
    with pytest.raises(QkeelError, match=r"autograd.Function.*find the sites before"):
        qkeel.apply(model, "qk_clip:threshold=2", optimizer, batch=batches()[0])
    qkeel.apply(model, "qk_clip:threshold=2", optimizer, sites=sites)
    trained(model, optimizer)
    assert float(largest(model, batches()[-1]).max()) < 2.1
