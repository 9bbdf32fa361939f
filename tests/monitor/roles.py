"""Training programs drawn by a seed, which know themselves which of their passes were trained."""

import dataclasses
import random
import warnings

import numpy as np
import torch
from numpy.testing import assert_allclose
from tests.attention import from_heads, to_heads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel

WIDTH, HEADS, LAYERS, STEPS, THRESHOLD = 8, 2, 2, 3, 1.5
TRAINED, OTHERS = 0, 1


@dataclasses.dataclass
class Output:
    """What a model of transformers returns: an object with tensors."""

    logits: Tensor
    value: Tensor
    loss: Tensor


class Block(nn.Module):
    """Attention that logs its largest logits, of queries times a factor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.log, self.factor = [], 1.0

    def forward(self, x):
        q, k, v = (to_heads(f(x), HEADS, -1) for f in (self.q, self.k, self.v))
        q = q * self.factor
        z = q.detach().double() @ k.detach().double().mT * (WIDTH // HEADS) ** -0.5
        self.log.append(z.amax((0, 2, 3)).numpy())
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(from_heads(y))


class Model(nn.Module):
    """Returns its numbers in one of several forms; checkpoints its blocks in one of several ways, or not (None)."""

    def __init__(self, form, is_reentrant):
        super().__init__()
        self.form, self.is_reentrant = form, is_reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.policy, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            if self.is_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        logits, value = self.policy(x), self.critic(x)
        losses = logits.square().mean(), value.square().mean()
        # From each of them a gradient reaches all blocks.
        is_one = self.form in ("tensor", "itself", "in a tuple")
        self.losses = losses[:1] if is_one else losses
        self.loss = losses[0] if self.form == "itself" else None
        return {
            "tensor": logits,
            "tuple": (logits, value),
            "object": Output(logits, value, losses[0]),
            "itself": logits.detach(),
            "in a tuple": logits.detach(),
        }[self.form]


class Program:
    """A drawn program: after each step, `right` has the largest logits [roles layers heads] of the passes before it, of
    those that were trained and of the others; -inf where there was none."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        pick = self.draw.choice
        is_reentrant = pick([None, None, False, True])
        forms = ["tensor", "tuple", "object", "itself", "in a tuple"]
        self.model = Model(pick(forms), is_reentrant)
        self.model.train(pick([True, True, False]))
        # A reentrant checkpoint of frozen blocks needs an input with gradients.
        self.is_frozen = not is_reentrant and pick([False, False, True])
        self.model.blocks.requires_grad_(not self.is_frozen)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        # One optimizer, or two, beside which the weight of the policy belongs to none.
        two = [weights[:-4] or weights[1:2], weights[-3:-1]]
        parts = pick([[weights], [weights], two])
        self.optimizers = [torch.optim.SGD(part, 0.0) for part in parts]
        self.has_closure = len(parts) == 1 and pick([False, False, True])
        self.tops, self.right = self.nothing(), []

    def nothing(self):
        return np.full((2, LAYERS, HEADS), -np.inf)

    def forward(self, role, factor=1.0):
        """Runs the model and notes its logits under a role; returns its losses."""
        pick = self.draw.choice
        for block in self.model.blocks:
            block.log.clear()
            block.factor = factor
        shape = pick([1, 2]), pick([4, 6]), WIDTH
        self.output = self.model(torch.randn(shape) * pick([0.3, 1.0, 3.0, 8.0]))
        top = np.stack([block.log[0] for block in self.model.blocks])
        self.tops[role] = np.maximum(self.tops[role], top)
        return self.model.losses

    def train(self):
        """Passes that are trained."""
        way = self.draw.choice(
            ["one", "accumulate", "together", "two losses", "one of two", "grad"]
        )
        if way == "together":
            sum(self.forward(TRAINED)[0] for _ in range(2)).backward()
            return
        for _ in range(3 if way == "accumulate" else 1):
            losses = self.forward(TRAINED)
            if way == "grad" and not self.model.is_reentrant:
                weights = [p for p in self.model.parameters() if p.requires_grad]
                torch.autograd.grad(losses[0], weights, allow_unused=True)
            elif way == "two losses":
                losses[0].backward(retain_graph=True)
                losses[-1].backward()
            else:
                losses[-1 if way == "one of two" else 0].backward()
            if self.draw.random() < 0.3:
                self.disturb()

    def disturb(self):
        """Passes that are not trained, in the modes in which programs run them."""
        kind = self.draw.choice(
            ["no_grad", "inference", "evaluation", "dropped", "kept", "detached"]
        )
        factor, is_training = self.draw.choice([1.0, 5.0, 50.0]), self.model.training
        if kind == "evaluation":
            self.model.eval()
        with (
            torch.inference_mode(kind == "inference"),
            torch.set_grad_enabled(kind not in ("no_grad", "inference")),
        ):
            for _ in range(self.draw.choice([1, 3])):
                losses = self.forward(OTHERS, factor)
        self.model.train(is_training)
        if kind in ("kept", "detached"):
            self.kept = [x.detach() if kind == "detached" else x for x in losses]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(self.draw.choice([0, 0, 1, 2])):
            self.disturb()
        if self.has_closure:
            self.optimizers[0].step(self.train)
        else:
            self.train()
            if self.draw.random() < 0.3:
                self.disturb()
            if self.draw.random() < 0.1:  # as a GradScaler does after an overflow
                self.step()
                return
            for optimizer in self.optimizers:
                optimizer.step()
        self.right.append(self.tops)
        self.tops = self.nothing()


class Samples(qkeel.monitor.Sink):
    """Keeps the largest logits of every sample, by phase and step."""

    def open(self, about):
        self.tops = {}

    def write(self, sample):
        self.tops[sample.phase, int(sample.step)] = sample.heads["max_logit"]

    def alarm(self, alarm):
        pass

    def close(self, complete):
        pass


def check_records(seed):
    """A watched program has a record of each role in each step that had such passes, with their largest logits."""
    program, samples = Program(seed), Samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with qkeel.watch(program.model, program.optimizers, sinks=samples, rules=()):
            for _ in range(STEPS):
                program.step()
    right = {
        (phase, step): program.right[step][role]
        for role, phase in enumerate(("train", "eval"))
        for step in range(STEPS)
        if np.isfinite(program.right[step][role]).all()
    }
    assert samples.tops.keys() == right.keys()
    for place, top in right.items():
        assert_allclose(samples.tops[place], top, rtol=1e-4, atol=1e-6)


def check_clip(seed):
    """qk_clip scales the weights of each head by what the trained passes of a step ask for."""
    program = Program(seed)
    if program.is_frozen:
        return
    weights = [(block.q.weight, block.k.weight) for block in program.model.blocks]
    remedy, x = f"qk_clip:threshold={THRESHOLD},groups=group", torch.randn(1, 4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qkeel.apply(program.model, remedy, program.optimizers, batch=x)
        for _ in range(STEPS):
            before = [[w.detach().clone() for w in pair] for pair in weights]
            program.step()
            gamma = torch.from_numpy(THRESHOLD / program.right[-1][TRAINED])
            gamma = torch.where(gamma > 0, gamma, 1.0).clamp(max=1)
            for pair, old, factors in zip(weights, before, gamma):
                rows = factors.sqrt().repeat_interleave(WIDTH // HEADS)[:, None]
                for w, was in zip(pair, old):
                    assert_close(w.double(), was.double() * rows, rtol=1e-4, atol=1e-8)
