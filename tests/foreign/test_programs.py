"""Remedies on programs drawn by a seed: they compute their formula, or act on what is trained, or say why they do not."""

import contextlib
import copy
import functools
import math
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.attention import from_heads, to_heads
from tests.quick import one_in
from tests.training import adamw, sgd, warned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.errors import QkeelError, QkeelWarning

WIDTH, HEADS, SIZE, T, TAU = 16, 2, 8, 6, 0.5
CHOICES = {
    "projections": ["apart", "joined", "sliced", "shared"],
    "norm": ["none", "none", "none", "own", "rms", "layer"],
    "core": ["fused", "written", "sink", "compiled", "recorded"],
    "causal": [False, True],
    "mlp": ["module", "wide", "narrow"],
    "reentrant": [None, None, False, True],
}


class OwnNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * rms(x)


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


NORMS = {
    "none": nn.Identity,
    "own": functools.partial(OwnNorm, SIZE),
    "rms": functools.partial(nn.RMSNorm, SIZE),
    "layer": functools.partial(nn.LayerNorm, SIZE),
}


def keep(z, n):
    return z


def attention(q, k, v, causal, sink=None, change=keep):
    """The output of attention [b h t d], whose logits and numbers of visible keys [t 1] are given to `change`."""
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if causal else False
    visible = torch.arange(1.0, T + 1) if causal else torch.full((T,), float(T))
    z = change(q @ k.mT * SIZE**-0.5, visible[:, None].to(q.dtype))
    if causal:
        z = z.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink[None, :, None, None].expand(*z.shape[:3], 1)
        z = torch.cat((z, column), -1)
    return z.softmax(-1)[..., :T] @ v


class Attend(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        layer = functools.partial(nn.Linear, WIDTH, bias=False)
        if plan.projections in ("joined", "sliced"):
            self.qkv = layer(3 * WIDTH)
        else:
            self.q, self.k = layer(WIDTH), layer(WIDTH)
            self.v = self.k if plan.projections == "shared" else layer(WIDTH)
        self.o = layer(WIDTH)
        self.q_norm, self.k_norm = NORMS[plan.norm](), NORMS[plan.norm]()
        self.sink = nn.Parameter(torch.ones(HEADS)) if plan.core == "sink" else None

    def heads(self, x):
        if self.plan.projections == "joined":
            y = self.qkv(x).chunk(3, -1)
        elif self.plan.projections == "sliced":
            y = [F.linear(x, w) for w in self.qkv.weight.chunk(3)]
        elif self.plan.projections == "shared":
            y = [self.q(x), *[self.k(x)] * 2]
        else:
            y = [self.q(x), self.k(x), self.v(x)]
        marks = self.plan.core == "recorded"
        with (
            torch.profiler.record_function("heads")
            if marks
            else contextlib.nullcontext()
        ):
            q, k, v = (to_heads(part, HEADS, SIZE) for part in y)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x):
        q, k, v = self.heads(x)
        plan = self.plan
        if plan.core in ("fused", "recorded"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=plan.causal)
        else:
            attend = attention
            if plan.core == "compiled":
                attend = torch.compile(attention, backend="eager")
            y = attend(q, k, v, plan.causal, self.sink)
        return self.o(from_heads(y))

    def rows_of_qk(self):
        """Copies of what makes queries and keys."""
        if self.plan.projections in ("joined", "sliced"):
            weights = [self.qkv.weight[: 2 * WIDTH]]
        else:
            weights = [self.q.weight, self.k.weight]
        gains = [*self.q_norm.parameters(), *self.k_norm.parameters()]
        return torch.cat([w.detach().clone().flatten() for w in (*weights, *gains)])


class Block(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.is_apart = Attend(plan), plan.mlp != "module"
        hidden = WIDTH if plan.mlp == "narrow" else 4 * WIDTH
        layers = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        if self.is_apart:
            self.up, self.down = layers
        else:
            self.mlp = nn.Sequential(layers[0], nn.GELU(), layers[1])

    def feed(self, x):
        return self.down(F.gelu(self.up(x))) if self.is_apart else self.mlp(x)

    def forward(self, x):
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.blocks = nn.ModuleList(Block(plan) for _ in range(2))
        self.reentrant = plan.reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def reference(model, x, change=keep, query=None, key=None, order="pre"):
    """What a model computes under a remedy, step by step: `query` and `key` norm heads."""
    for block in model.blocks:

        def attend(y, block=block):
            module = block.attend
            q, k, v = module.heads(y)
            q, k = query(q) if query else q, key(k) if key else k
            y = attention(q, k, v, module.plan.causal, module.sink, change)
            return module.o(from_heads(y))

        for branch, norm in ((attend, block.first), (block.feed, block.second)):
            if order == "swin":
                x = x + F.layer_norm(branch(x), (WIDTH,))
            else:
                y = branch(norm(x))
                x = x + (rms(y) if order == "peri" else y)
    return x


FORMULAS = {
    "softcap:cap=0.7": {"change": lambda z, n: 0.7 * torch.tanh(z / 0.7)},
    "log_n:length=4": {"change": lambda z, n: z * n.log() / math.log(4)},
    "attention_temperature:floor=2,alpha=0.5": {
        "change": lambda z, n: z * (1 + 0.5 * (1 + (n / 2).floor()).log())
    },
    "qk_norm": {"query": rms, "key": rms},
    "key_norm": {"key": rms},
    "query_norm": {"query": rms},
    "swin_norm": {"order": "swin"},
    "peri_norm": {"order": "peri"},
    "dropout:rate=0.5": {},
}


def planned(draw):
    plan = types.SimpleNamespace(**{k: draw.choice(v) for k, v in CHOICES.items()})
    model = Model(plan).double()
    with torch.no_grad():
        for block in model.blocks:
            for name, p in block.attend.named_parameters():
                p.mul_(draw.choice([1, 2, 4])) if "o." not in name else None
    x = 2 * torch.randn(2, T, WIDTH, dtype=torch.float64)
    return plan, model, x.requires_grad_(plan.reentrant is True)


def formula_outcome(seed):
    """What is wrong with a remedy on the forward pass of a drawn model, or ""."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    remedy = draw.choice([*FORMULAS])
    plan, model, x = planned(draw)
    model.eval()
    # Before anything stands in the model that the reference would run into.
    before, expected = model(x), reference(model, x, **FORMULAS[remedy])
    waits, is_traced = draw.random() < 0.3, False
    can_be_traced = plan.reentrant is None and plan.core in ("fused", "written")
    can_be_traced &= plan.projections in ("apart", "shared")
    title = f"{remedy} waits={waits} on {vars(plan)}"
    refusal, hooks, handle = "", hooked(model), None
    try:
        handle = qkeel.apply(model, remedy, **{} if waits else {"batch": x})
        output = model(x)
        output.sum().backward()
        error = float((output - expected).detach().abs().max())
        if error > 1e-9:
            return f"WRONG {title}: off by {error:.3g}"
        if can_be_traced:
            is_traced = True
            graph = torch.fx.symbolic_trace(model)
            if not torch.allclose(graph(x), output, rtol=0, atol=1e-9):
                return f"WRONG {title}: a trace computes something else"
    except QkeelError as error:
        refusal = f"told {title}: {'traced, ' if is_traced else ''}{error}"
    if handle is not None:
        handle.remove()
    if hooked(model) != hooks or not torch.equal(model(x), before):
        return f"WRONG {title}: not undone, {refusal}"
    return refusal


def hooked(model):
    """How many hooks the modules have."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def wrapped(draw, model):
    wrap = draw.choice(
        [
            nn.Sequential,
            checkpoint_wrapper,
            functools.partial(torch.compile, backend="eager"),
        ]
    )
    for block in model.blocks[draw.choice([0, 1]) :]:
        block.attend = wrap(block.attend)


EVENTS = ["nothing", "wrap", "compile", "assign", "optimizer", "assign+optimizer"]


def happen(event, draw, model):
    """What programs do to a model after qkeel has seen it."""
    if event == "wrap":
        wrapped(draw, model)
    if event == "compile":
        model.blocks[0].attend.compile(backend="eager")
    if "assign" in event:
        state = {name: p.clone() for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)


@torch.no_grad()
def largest_logits(model, attends, x):
    """The largest logit of each layer and head [l h], in float64."""
    tops = []
    for block, attend in zip(model.blocks, attends, strict=True):
        q, k, _ = attend.heads(block.first(x))
        z = q.double() @ k.double().mT * SIZE**-0.5
        hidden = torch.ones(T, T).triu(1).bool() & attend.plan.causal
        tops.append(z.masked_fill(hidden, -torch.inf).amax((0, 2, 3)))
        x = block(x)
    return torch.stack(tops)


def step_outcome(seed):
    """What is wrong with a clip or a freeze after something has happened to the model or its optimizer, or ""."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    remedy = draw.choice([f"qk_clip:threshold={TAU}", "frozen_qk"])
    plan, model, x = planned(draw)
    event, is_watched = draw.choice(EVENTS), draw.random() < 0.3
    dtype = draw.choice([torch.float64] * 4 + [torch.bfloat16, torch.float16])
    spoiled = draw.choice([None, None, math.nan, math.inf])
    model, x = model.to(dtype), x.detach().to(dtype).requires_grad_(x.requires_grad)
    title = f"{remedy} {event} {dtype} {spoiled} {is_watched} on {vars(plan)}"
    is_clip, attends = remedy != "frozen_qk", [block.attend for block in model.blocks]
    make = functools.partial(draw.choice([adamw, sgd]), lr=0.0 if is_clip else 0.1)
    optimizer = make(model)
    with warned(QkeelWarning) as told:
        try:
            example = {"batch": x} if draw.random() < 0.7 else {}
            qkeel.apply(model, remedy, optimizer, **example)
            happen(event, draw, model)
            if "optimizer" in event:
                optimizer = make(model)
            if is_watched:
                qkeel.watch(model, optimizer, rules=())
            rows = [attend.rows_of_qk() for attend in attends]
            # Another optimizer is told of in the fourth pass.
            for _ in range(5):
                model(x).float().square().mean().backward()
                if spoiled is not None and not is_clip:
                    for p in attends[0].parameters():
                        p.grad.view(-1)[:1] = spoiled
                optimizer.step()
                optimizer.zero_grad()
        except QkeelError as error:
            return f"told {title}: {error}"
    if is_clip:
        slack = 1e-6 if dtype == torch.float64 else 0.02
        top = largest_logits(model, attends, x)
        wrong = float(top.max()) > TAU * (1 + slack) and f"largest logits {top}"
    else:
        same = [torch.equal(a.rows_of_qk(), b) for a, b in zip(attends, rows)]
        wrong = not all(same) and f"moved: {same}"
    return f"{'told' if told else 'WRONG'} {title}: {wrong} {told}" if wrong else ""


FIRST = ["nothing", "meta", "fake", "export", "inference", "evaluation"]


def first_pass(kind, model, x):
    """What programs run before they train: a shape inference, an export, a validation."""
    if kind == "meta":
        copy.deepcopy(model).to("meta")(x.to("meta"))
    elif kind == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(x.detach()))
    elif kind == "export":
        torch.export.export(model, (x.detach(),))
    elif kind == "inference":
        with torch.inference_mode():
            model(x)
    elif kind == "evaluation":
        with torch.no_grad():
            model.eval()(x)
        model.train()


def trained(seed, is_watched):
    """The losses, the largest logits by step, those that were recorded, and the title of a drawn program."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    plan, model, x = planned(draw)
    first, event = draw.choice(FIRST), draw.choice(["nothing", "wrap", "compile"])
    optimizer, attends = sgd(model, 0.01), [block.attend for block in model.blocks]
    losses, tops, recorded = [], [], []
    monitor = qkeel.watch(model, optimizer, rules=()) if is_watched else None
    with contextlib.suppress(Exception):
        first_pass(first, model, x)
    happen(event, draw, model)
    for _ in range(3):
        tops.append(largest_logits(model, attends, x))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if monitor is not None:
        recorded = [*monitor.history.heads["max_logit"]]
    return losses, tops, recorded, f"{first} {event} {vars(plan)}"


def watch_outcome(seed):
    """What is wrong with the records of a drawn program, or ""."""
    expected, *_ = trained(seed, is_watched=False)
    with warned(QkeelWarning) as told:
        losses, tops, recorded, title = trained(seed, is_watched=True)
    if losses != expected:
        return f"WRONG {title}: losses {expected} {losses}"
    if len(recorded) == 3 and np.allclose(recorded, torch.stack(tops), rtol=1e-5):
        return ""
    return f"{'told' if told else 'WRONG'} {title}: {recorded} {tops} {told}"


@pytest.mark.filterwarnings("ignore")  # what torch warns of while it compiles
@pytest.mark.parametrize("outcome", [formula_outcome, step_outcome, watch_outcome])
@pytest.mark.parametrize("seed", one_in(range(12), 2))
def test_a_drawn_program_is_right_or_says_why_not(outcome, seed):
    assert not outcome(seed).startswith("WRONG")
