"""Kinds of what a user's program does around a model, drawn by a seed: hooks that collect, and models of numbers.

Each is compared with the same program without qkeel, and with numbers that are computed in float64 without it.
"""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from tests.attention import Attention, from_heads, fused, scores, written
from tests.training import warned
from torch import nn

import qkeel
from qkeel.errors import QkeelError, QkeelWarning

WIDTH = 16


class Block(Attention):
    """Attention without a norm, which notes its largest logit of each head in float64."""

    def __init__(self, heads, is_fused, notes):
        super().__init__(fused if is_fused else written, WIDTH, heads)
        self.n_heads, self.notes = heads, notes
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.heads(x)
        with torch.no_grad():
            self.notes.append(scores(q.double(), k.double()).amax((0, 2, 3)))
        return x + self.o(from_heads(self.attend(q, k, v)))


class Store:
    """What hooks put their features into, as programs keep them."""

    def __init__(self, kind):
        self.kind, self.features = kind, {} if kind == "by name" else []

    def keep(self, value):
        if self.kind == "by name":
            # The name of a call is its number, so a call more is a feature more.
            self.features[f"{len(self.features)}"] = value
        elif self.kind == "concatenated":
            self.features = [*self.features, value]
        else:
            self.features.append(value)

    def values(self):
        features = self.features
        return [*(features.values() if isinstance(features, dict) else features)]


def _register(kind, module, store):
    """A hook of a kind, which keeps what the module has returned or received; returns its handle."""

    def after(called, args, *rest):
        if called is module:
            store.keep(rest[-1])

    def returned(called, args, output):
        store.keep(output)
        return output * 1.0

    if kind == "before":
        return module.register_forward_pre_hook(lambda m, args: store.keep(args[0]))
    if kind == "in all":
        return nn.modules.module.register_module_forward_hook(after)
    hook = {"returned": returned, "method": functools.partial(after)}.get(kind, after)
    options = {"with_kwargs": kind == "keywords", "always_call": kind == "always"}
    return module.register_forward_hook(hook, **options)


HOOKS = ["after", "keywords", "always", "before", "returned", "in all", "method"]
# What is asked of qkeel beside a watched training.
QUESTIONS = {
    "nothing": lambda model, optimizer, x: None,
    "find": lambda model, optimizer, x: qkeel.find_sites(model, x),
    "check": lambda model, optimizer, x: qkeel.check(model, x),
    "explain": lambda model, optimizer, x: qkeel.explain(model, x),
    "maps": lambda model, optimizer, x: qkeel.attention_maps(model, x),
    "rate": lambda model, optimizer, x: qkeel.apply(
        model, "qk_lr:factor=1", optimizer, batch=x
    ),
    "clip": lambda model, optimizer, x: qkeel.apply(
        model, "qk_clip:threshold=1e9", optimizer
    ),
}
LOSSES = {
    "stack": lambda features: torch.stack([f.flatten() for f in features]).square(),
    "sum": lambda features: sum(f.square().mean() for f in features),
    "first": lambda features: features[0].abs(),
    "last": lambda features: features[-1].abs(),
}


def collected(seed, is_watched):
    """Losses, the features of each step, and what is wrong with the recorded logits, of a drawn program."""
    draw = random.Random(f"hooks {seed}")
    torch.manual_seed(seed)
    n_layers, notes, wrong = draw.choice([1, 2, 3]), [], ""
    heads, is_fused = draw.choice([1, 2, 4]), draw.random() < 0.5
    model = nn.Sequential(*(Block(heads, is_fused, notes) for _ in range(n_layers)))
    store = Store(draw.choice(["list", "by name", "concatenated"]))
    places = draw.sample(["0", "0.q", "0.o", f"{n_layers - 1}.v"], 2)
    hooks = [
        _register(draw.choice(HOOKS), model.get_submodule(place), store)
        for place in places
    ]
    use, question = draw.choice([*LOSSES]), draw.choice([*QUESTIONS])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
    monitor = qkeel.watch(model, optimizer) if is_watched else None
    if is_watched:
        QUESTIONS[question](model, optimizer, x)
    losses, counts = [], []
    for step in range(3):
        notes.clear()
        y = model(x + step)
        features = store.values()
        extra = LOSSES[use](features).mean()
        counts.append((len(features), len(notes)))
        store.features.clear()
        optimizer.zero_grad()
        loss = (y - x.roll(1, 1)).square().mean() + extra
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            expected = torch.stack(notes[-n_layers:])
            recorded = torch.as_tensor(monitor.sample.heads["max_logit"]).double()
            if not torch.allclose(recorded, expected, rtol=1e-5, atol=1e-6):
                wrong = f"step {step}: {recorded.tolist()} for {expected.tolist()}"
    for hook in [*hooks, monitor] if monitor is not None else hooks:
        hook.remove()
    return f"{question}, {use}, {store.kind}, {places}", losses, counts, wrong


def wrong_about_hooks(seed):
    """What a program with hooks that collect features sees of qkeel, or "" for nothing."""
    _, losses, counts, _ = collected(seed, is_watched=False)
    with warned(QkeelWarning) as said:
        title, watched, counts_watched, wrong = collected(seed, is_watched=True)
    if (losses, counts) != (watched, counts_watched):
        return f"{title}: {losses} {counts}, watched {watched} {counts_watched} {said}"
    return f"{title}: {wrong} {said}" if wrong else ""


class Outputs(nn.Module):
    """Two layers of attention, and outputs of a drawn form."""

    def __init__(self, draw):
        super().__init__()
        heads, is_fused = draw.choice([1, 2, 4]), draw.random() < 0.5
        self.form = draw.choice(["pooled", "tokens", "channels", "picture", "classes"])
        self.held = draw.choice(["tensor", "dict", "tuple"])
        self.read = nn.Linear(3, WIDTH)
        self.blocks = nn.Sequential(*(Block(heads, is_fused, []) for _ in range(2)))
        widths = {"pooled": 1, "tokens": 1, "channels": 3, "picture": 2, "classes": 9}
        self.write = nn.Linear(WIDTH, widths[self.form])

    def forward(self, x):
        h = self.blocks(self.read(x))
        y = self.write(h.mean(1) if self.form == "pooled" else h)
        if self.form == "picture":
            y = y.mT.unflatten(2, (2, -1))
        if self.held == "dict":
            key = "logits" if self.form == "classes" else "prediction"
            return {key: y}
        return (y,) if self.held == "tuple" else y

    def numbers(self, x):
        y = self(x)
        if isinstance(y, dict):
            (y,) = y.values()
        return y if isinstance(y, torch.Tensor) else y[0]


def _distance(model, x, old):
    """The mean squared error of numbers, or the KL divergence of classes, in float64."""
    new = model.numbers(x).double()
    if model.form != "classes":
        return (new - old).square().mean()
    p, q = old.log_softmax(-1), new.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def wrong_about_retrofit(seed):
    """What is wrong with a retrofit of a model of numbers or classes, or "" for nothing."""
    draw = random.Random(f"retrofit {seed}")
    torch.manual_seed(seed)
    model = Outputs(draw)
    x = torch.randn(320, 6, 3)
    with torch.no_grad():
        for block in model.blocks:
            block.q.weight.mul_(draw.choice([3.0, 6.0]))
    title = f"{seed}: {model.form} in a {model.held}, {model.blocks[0].n_heads} heads"
    before = copy.deepcopy(model)
    with torch.no_grad():
        old, old_held = (before.numbers(part).double() for part in (x[:256], x[256:]))
    # The same by gradients of gains alone, on the rows that a retrofit fits.
    fitted = copy.deepcopy(model)
    qkeel.apply(fitted, "qk_norm", batch=x)
    gains = [p for name, p in fitted.named_parameters() if "_norm" in name]
    optimizer = torch.optim.LBFGS(gains, max_iter=40, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        distance = _distance(fitted, x[:256], old)
        distance.backward()
        return distance

    optimizer.step(closure)
    try:
        report = qkeel.retrofit(model, "qk_norm", x).report
    except QkeelError as error:
        return f"{title}: refused: {error}"
    with torch.no_grad():
        expected, changed = (
            float(_distance(m, x[256:], old_held)) for m in (fitted, model)
        )
        spread = float(old_held.var(correction=0))
    is_classes = model.form == "classes"
    told = report.gap.kl if is_classes else report.gap.error
    right = changed if is_classes else changed / spread
    if told is None or abs(told - right) > 1e-3 * right + 1e-7:
        return f"{title}: says {told}, and it is {right}"
    if report.held_out != "64 of 320 sequences":
        return f"{title}: held out {report.held_out}"
    if changed > 2 * expected and changed > 1e-4 * (1.0 if is_classes else spread):
        return f"{title}: changed by {changed}, gains alone can {expected}"
    return ""


@pytest.mark.parametrize("wrong", [wrong_about_hooks, wrong_about_retrofit])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_user_s_program_does_is_right_or_told(wrong, seed):
    assert not wrong(seed)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [wrong_about_hooks, wrong_about_retrofit])
@pytest.mark.parametrize("seed", [101, 102, 103])
def test_more_of_what_a_user_s_program_does_is_right_or_told(wrong, seed):
    failures = [wrong(1000 * seed + i) for i in range(12)]
    assert not [x for x in failures if x]
