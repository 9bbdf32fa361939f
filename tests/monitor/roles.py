"""Training programs drawn by a seed, which know themselves which of their passes were trained."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qkeel

WIDTH, HEADS, LAYERS = 8, 2, 2
ABSENT = -np.inf


@dataclasses.dataclass
class Output:
    """What a model of transformers returns: an object with tensors."""

    logits: Tensor
    value: Tensor | None = None
    loss: Tensor | None = None


class Block(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.log, self.factor = log, 1.0

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        q = q * self.factor
        z = q.detach().double() @ k.detach().double().mT * (WIDTH // HEADS) ** -0.5
        self.log.append(z.amax((0, 2, 3)).numpy())
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class Model(nn.Module):
    """Returns its numbers in one of several forms; checkpoints its blocks in one of several ways."""

    def __init__(self, form, repeat):
        super().__init__()
        self.logs = [[] for _ in range(LAYERS)]
        self.blocks = nn.ModuleList([Block(log) for log in self.logs])
        self.policy, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.form, self.repeat = (
            form,
            repeat,
        )  # repeat: None for no checkpoints, else whether they are reentrant
        self.loss = None

    def forward(self, x):
        for block in self.blocks:
            x = (
                block(x)
                if self.repeat is None
                else checkpoint(block, x, use_reentrant=self.repeat)
            )
        logits, value = self.policy(x), self.critic(x)
        loss = (logits - 1).square().mean() + value.square().mean()
        self.loss = None
        match self.form:
            case "tensor":
                return logits
            case "tuple":
                return logits, value
            case "object":
                return Output(logits, value, loss)
            case _:
                self.loss = loss
                return logits.detach()


def losses(model, output):
    """The losses that can be computed from an output, each of them enough for a gradient."""
    match model.form:
        case "tensor":
            return [output.square().mean()]
        case "tuple":
            return [output[0].square().mean(), output[1].square().mean()]
        case "object":
            return [output.loss, output.value.square().mean()]
        case _:
            assert model.loss is not None
            return [model.loss]


class Program:
    """One drawn program: `run` trains some steps and returns, for each, the largest logits [layers heads] of the passes
    that were trained before it and of those that were not."""

    FORMS = ("tensor", "tuple", "object", "itself")

    def __init__(self, seed):
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        pick = self.draw.choice
        self.repeat = pick([None, None, False, True])
        self.model = Model(pick(self.FORMS), self.repeat)
        self.model.train(pick([True, True, False]))
        self.frozen = pick([False, False, True])
        if self.frozen:
            for block in self.model.blocks:
                block.requires_grad_(False)
            if (
                self.repeat is True
            ):  # a reentrant checkpoint of frozen blocks needs an input with gradients
                self.frozen = False
                self.model.requires_grad_(True)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        heads = len([*self.model.policy.parameters(), *self.model.critic.parameters()])
        self.two = pick([False, False, True])
        self.closure = not self.two and pick([False, False, True])
        if self.two:
            self.optimizers = [
                torch.optim.SGD(part, 0.0)
                for part in (trained[:-heads] or trained[:1], trained[-heads + 1 :])
            ]
        else:
            self.optimizers = [torch.optim.SGD(trained, 0.0)]
        self.trained, self.others = self.nothing(), self.nothing()
        self.right = []
        self.said = []

    def nothing(self):
        return np.full((LAYERS, HEADS), ABSENT)

    def batch(self):
        size = self.draw.choice([0.3, 1.0, 3.0, 8.0])
        return (
            torch.randn(self.draw.choice([1, 2]), self.draw.choice([4, 6]), WIDTH)
            * size
        )

    def forward(self, x, *, trained, factor=1.0):
        """Runs the model and notes its logits under its role."""
        for log in self.model.logs:
            log.clear()
        for block in self.model.blocks:
            block.factor = factor
        out = self.model(x)
        for block in self.model.blocks:
            block.factor = 1.0
        top = np.stack([log[0] for log in self.model.logs])
        if trained:
            self.trained = np.maximum(self.trained, top)
        else:
            self.others = np.maximum(self.others, top)
        return out

    def train(self):
        """Passes that are trained."""
        way = self.draw.choice(
            ["one", "accumulate", "together", "two losses", "one of two", "grad"]
        )
        self.said.append(way)
        if self.repeat is True and way == "grad":
            way = "one"
        if self.model.form == "itself" and way == "together":
            way = "accumulate"
        if way == "together":
            outputs = [self.forward(self.batch(), trained=True) for _ in range(2)]
            sum(losses(self.model, out)[0] for out in outputs).backward()
            return
        for _ in range(3 if way == "accumulate" else 1):
            found = losses(self.model, self.forward(self.batch(), trained=True))
            if way == "two losses":
                found[0].backward(retain_graph=True)
                found[-1].backward()
            elif way == "grad":
                weights = [p for p in self.model.parameters() if p.requires_grad]
                grads = torch.autograd.grad(found[0], weights, allow_unused=True)
                for p, gradient in zip(weights, grads):
                    p.grad = gradient
            else:
                found[-1 if way == "one of two" else 0].backward()
            if self.draw.random() < 0.3:
                self.disturb()

    def disturb(self):
        """Passes that are not trained, in the modes in which programs run them."""
        kind = self.draw.choice(
            [
                "reference",
                "rollouts",
                "dropped",
                "kept",
                "detached",
                "evaluation",
                "inference",
            ]
        )
        self.said.append(kind)
        big = self.draw.choice([1.0, 5.0, 50.0])
        if kind in ("reference", "rollouts"):
            with torch.no_grad():
                for _ in range(1 if kind == "reference" else 3):
                    self.forward(self.batch(), trained=False, factor=big)
        elif kind == "inference":
            with torch.inference_mode():
                self.forward(self.batch(), trained=False, factor=big)
        elif kind == "evaluation":
            mode = self.model.training
            self.model.eval()
            with (
                torch.no_grad()
                if self.draw.random() < 0.5
                else contextlib.nullcontext()
            ):
                self.forward(self.batch(), trained=False, factor=big)
            self.model.train(mode)
        else:
            out = self.forward(self.batch(), trained=False, factor=big)
            if kind == "kept":
                self.kept = out
            elif kind == "detached":
                self.kept = [loss.detach() for loss in losses(self.model, out)]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.closure:
            self.said.append("closure")
            if self.draw.random() < 0.5:
                self.disturb()

            def again():
                self.train()
                return 0.0

            self.optimizers[0].step(again)
        else:
            for _ in range(self.draw.choice([0, 0, 1, 2])):
                self.disturb()
            self.train()
            for _ in range(self.draw.choice([0, 0, 1])):
                self.disturb()
            if self.draw.random() < 0.1:  # as a GradScaler does after an overflow
                self.said.append("skipped")
                return self.step()
            for optimizer in self.optimizers:
                optimizer.step()
        self.right.append((self.trained, self.others))
        self.trained, self.others = self.nothing(), self.nothing()
        return None

    def run(self, steps=3):
        for _ in range(steps):
            self.step()

    def __str__(self):
        return (
            f"form {self.model.form}, checkpoints {self.repeat}, training {self.model.training}, frozen {self.frozen}, "
            f"two optimizers {self.two}: {self.said}"
        )


class Samples(qkeel.monitor.Sink):
    """Keeps every sample."""

    def __init__(self):
        self.samples = []

    def open(self, about):
        pass

    def write(self, sample):
        self.samples.append(sample)

    def alarm(self, alarm):
        pass

    def close(self, complete):
        pass


def watch_differences(seed):
    """What the records of a watched program say that is not so, each in a sentence."""
    program, kept = Program(seed), Samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = program.optimizers if program.two else program.optimizers[0]
        with qkeel.watch(program.model, optimizer, sinks=kept, rules=()):
            program.run()
    wrong = []
    for phase, which in (("train", 0), ("eval", 1)):
        samples = {
            int(s.step): s.heads["max_logit"] for s in kept.samples if s.phase == phase
        }
        for step, tops in enumerate(program.right):
            top = tops[which]
            if (top == ABSENT).all():
                if step in samples:
                    wrong.append(f"step {step}: a record of {phase}, where no pass was")
            elif step not in samples:
                wrong.append(f"step {step}: no record of {phase}")
            elif not np.allclose(samples[step], top, rtol=1e-4, atol=1e-6):
                wrong.append(
                    f"step {step}, {phase}: right {top.tolist()}, qkeel {samples[step].tolist()}"
                )
    return [f"seed {seed}, {program}: {text}" for text in wrong]


def clip_differences(seed):
    """What qk_clip did in a program that is not what its trained passes ask for."""
    program, threshold = Program(seed), 1.5
    if program.frozen:
        return []
    model = program.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = program.optimizers if program.two else program.optimizers[0]
        x = torch.randn(1, 4, WIDTH)
        qkeel.apply(
            program.model,
            "qk_clip",
            optimizer,
            batch=x,
            threshold=threshold,
            groups="group",
        )
        wrong = []
        for step in range(3):
            weights = [
                [f.weight.detach().clone() for f in (block.q, block.k)]
                for block in model.blocks
            ]
            program.step()
            top = program.right[-1][0]
            for i, block in enumerate(model.blocks):
                gamma = torch.tensor(
                    np.where(top[i] > threshold, threshold / top[i], 1.0)
                )
                for old, layer in zip(weights[i], (block.q, block.k)):
                    right = (
                        old.double().unflatten(0, (HEADS, -1))
                        * gamma.sqrt()[:, None, None]
                    )
                    if not torch.allclose(
                        layer.weight.double(), right.flatten(0, 1), rtol=1e-4
                    ):
                        wrong.append(
                            f"step {step}, layer {i}: factors {gamma.sqrt().tolist()} were not applied"
                        )
    return [f"seed {seed}, {program}: {text}" for text in wrong]
