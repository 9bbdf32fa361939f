"""The queries or the keys of one site: their norm and rotation, from their responses to the experiments."""

from __future__ import annotations

import math
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.audit.explain import responses
from qkeel.audit.explain.controlled_model import Observation, Observations, random_vector, scaled
from qkeel.audit.explain.experiment import Effect, Experiment
from qkeel.audit.explain.recipe import NormRecipe
from qkeel.audit.explain.responses import Answers
from qkeel.sites import AttentionSite, HeadSlice


@final
class QueryOrKey:
    """The queries or the keys of one site: their responses, and the norm and rotation that these show."""

    def __init__(self, experiment: Experiment, site: AttentionSite, side: Literal["q", "k"]) -> None:
        self.site, self.side = site, side
        self.slices = [(t.query if side == "q" else t.key)[-1] for t in site.terms]
        self.effects = [e for e in experiment.effects.get(site.name, []) if side in e.changes]
        self.model = experiment.model
        name = site.name

        def of(readings: Observations) -> Tensor:
            return self._of(readings[name])

        alone = len(self.slices) == 1 and self.slices[0].index.shape == of(experiment.base).shape[::2]
        self.answers = Answers(
            base=of(experiment.base),
            **{key: of(readings) for key, readings in experiment.passes.items()},
            small=tuple(of(readings) for readings in experiment.small),
            x=self._given(self.slices[0], 0) if alone else None,
            other=self._given(self.slices[0], 1) if alone else None,
            tolerance=max(2e-4, 8 * experiment.base[name].rounding),
        )
        self.fine = experiment.base[name].rounding < 1e-5

    def _of(self, reading: Observation) -> Tensor:
        return reading.q if self.side == "q" else reading.k

    def _given(self, part: HeadSlice, salt: int) -> Tensor:
        size = self.model.get_parameter(part.parameter).shape[part.axis]
        like = torch.empty(1, size, dtype=torch.float64)
        return scaled(1.0, salt)(random_vector(part.parameter, size), like)[0][part.index.cpu()]

    def norm(self) -> NormRecipe:
        """Returns the norm that acts, or the factor where none does."""
        a = self.answers
        how = responses.response(a)
        if how == "linear":
            return self._linear()
        if how != "normed":
            why = {"partly normed": f"only some of the {a.base.shape[-1]} dimensions are normed"}.get(
                how, "it neither grows with its projection nor stays the same"
            )
            return NormRecipe(kind="unknown", why=why)
        over = responses.reach(a)
        if over in ("", "some tokens"):
            why = "a number of one token reaches others, by a convolution or pooling"
            return NormRecipe(kind="unknown", why=why if over else "no number of its projection reaches it")
        if over not in ("head", "layer"):
            return NormRecipe(kind="RMS" if not responses.subtracts_mean(a) else "layer", over=over, gain="unknown")
        kind = "layer" if responses.subtracts_mean(a) else "RMS"
        gain = responses.gains(a, kind, over)
        eps, floor = responses.eps_of(a, kind, over)
        shape, bias, names = self._gain(gain, kind, over)
        width = a.base.shape[-1] * (len(a.base) if over == "layer" else 1)
        scalar = float(gain.median()) if gain is not None and shape.startswith("scalar") else math.nan
        if kind == "RMS" and abs(scalar * math.sqrt(width) - 1) < 1e-3:  # every vector of length 1
            kind, shape = "L2", "none"
        elif floor and kind == "RMS":
            kind = "L2"
            shape = responses.shape_of(gain * width**0.5, a.tolerance) if gain is not None else shape
        order = "" if self.rotation() is None else self._order(gain, shape, kind)
        return NormRecipe(kind=kind, over=over, eps=eps, gain=shape, bias=bias, parameters=names, order=order)

    def _linear(self) -> NormRecipe:
        first = responses.odd(self.answers)[:, 0]
        given = sum(self._given(s, 0).square().sum(-1).expand(len(first)) for s in self.slices)
        ratio = first.norm(dim=-1) / torch.as_tensor(given).sqrt()
        if not responses.close(ratio, ratio[:1].expand_as(ratio), 1e-2):
            return NormRecipe(why="what multiplies it differs by head")
        if responses.reach(self.answers) == "some tokens":
            return NormRecipe(why="a number of one token reaches others, by a convolution or pooling")
        value = float(ratio.median())
        return NormRecipe(factor=1.0 if abs(value - 1) < 1e-3 else value)

    def _gain(self, gain: Tensor | None, kind: str, over: str) -> tuple[str, bool, tuple[str, ...]]:
        """The shape of the gain, whether there is a bias after it, and the parameters that make them."""
        a = self.answers
        tolerance = a.tolerance
        bias = not responses.close(responses.even(a)[:, 0] + a.base[:, 0], a.base[:, 0], 10 * tolerance)
        shape = "unknown" if gain is None else responses.shape_of(gain, tolerance)
        names = []
        for effect in self.effects:
            names.append(effect.name)
            odd = (self._of(effect.plus) - self._of(effect.minus)) / 2
            old = responses.odd(a)
            if responses.close(odd, old, tolerance):
                bias = True
            elif gain is not None:
                now = gain * (odd[:, 0] / old[:, 0])
                shape = responses.shape_of(now, tolerance)
                shape += ", 1 + w" if _one_plus(effect, now / gain) else ""
        return shape, bias, tuple(names)

    def rotation(self) -> responses.Rotation | None:
        """Returns how the vectors turn with the position."""
        a = self.answers
        if a.base.shape[1] < 3:
            return responses.Rotation(dims=0, of=a.base.shape[-1], why="the example has fewer than three tokens")
        y = responses.odd(a) if responses.response(a) != "other" else a.base
        found = responses.rotation(y, a.tolerance if self.fine else 0.5)
        if found is None or found.pairing or responses.response(a) != "normed":
            return found
        gain = responses.gains(a, "layer" if responses.subtracts_mean(a) else "RMS", responses.reach(a))
        return found if gain is None else responses.rotation(y / gain[:, None], a.tolerance)

    def _order(self, gain: Tensor | None, shape: str, kind: str) -> str:
        """Returns whether the norm comes before the rotation: from lengths of pairs, under a gain that varies."""
        y = responses.odd(self.answers)
        if gain is not None:
            for effect in self.effects:
                odd = (self._of(effect.plus) - self._of(effect.minus)) / 2
                if not responses.close(odd, y, self.answers.tolerance):
                    gain, y = gain * (odd[:, 0] / y[:, 0]), odd
                    break
        among = responses.moving(responses.odd(self.answers), self.answers.tolerance)
        turned = responses.rotation(y, self.answers.tolerance, among)
        before = turned is not None and bool(turned.pairing)
        if gain is None:
            return "before RoPE" if before and shape != "none" else "order with RoPE unknown"
        divided = responses.rotation(y / gain[:, None], self.answers.tolerance, among)
        after = divided is not None and bool(divided.pairing)
        if before and after:
            return "before RoPE" if kind == "layer" else "before or after RoPE (the same without a gain per dim)"
        return "before RoPE" if before else "after RoPE" if after else "order with RoPE unknown"


def _one_plus(effect: Effect, ratio: Tensor) -> bool:
    """Returns whether the gain is 1 + w of the parameter, from how it followed a change."""
    old, new = effect.before.double().cpu().flatten(), effect.after.double().cpu().flatten()
    if old.numel() not in (ratio.shape[-1], ratio.numel()):
        return False
    expected = ((1 + new) / (1 + old)).view(-1, ratio.shape[-1]).expand_as(ratio)
    return responses.close(expected, ratio, 1e-3)
