"""A q/k norm put into a trained model, fitted, measured, and blended in if wanted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.forward_passes import unwrapped
from qkeel.patching.module_tables import submodules_of
from qkeel.remedies.apply import apply, parse
from qkeel.remedies.attention.projection_norms import HeadNorm
from qkeel.remedies.qk_norm import QKNorm
from qkeel.remedies.retrofit.balance import Balance
from qkeel.remedies.retrofit.blend import Blend
from qkeel.remedies.retrofit.cost import Gap, LayerGap, RetrofitReport
from qkeel.remedies.retrofit.fit_gains import Gains, descend, fit
from qkeel.remedies.retrofit.predictions import Reference, divergence, predictions
from qkeel.remedies.retrofit.replay import Rows, capture, mean, rows_of
from qkeel.remedies.retrofit.replay import divergence as attention_divergence
from qkeel.sites.example import Arguments, arguments
from qkeel.sites.find import find_sites
from qkeel.sites.probe import undisturbed
from qkeel.sites.site import AttentionSite
from qkeel.spec.norm import GainNorm


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The settings by which a retrofit is fitted.

    iterations: of L-BFGS per site after the least-squares start; 0 keeps that. balance: whether queries are scaled
    against keys in the weights, which the old model would not notice (`retrofit.balance`); not while anneal blends in,
    which starts at the old model bit for bit. distil: steps of AdamW at rate `lr` on
    the q and k weights and the gains against the old model's predictions. anneal: optimizer steps over which the norm
    is blended in, from the old model to the new. eps: of the norm; by default rms_norm_eps of the model's config, if it
    has that, so that it can be exported as it is. Not both distil and anneal: training goes on while it is blended in.
    """

    iterations: int = 20
    balance: bool = True
    distil: int = 0
    lr: float = 1e-3
    anneal: int = 0
    eps: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("iterations", self.iterations), ("distil", self.distil), ("anneal", self.anneal)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidValueError(f"expected {name} to be a whole number of at least 0, got {value!r}")
        if self.distil and self.anneal:
            raise InvalidValueError(
                "distilled q and k belong to the whole norm, and a norm that is blended in starts from the old ones: "
                "give distil or anneal, not both"
            )
        if not self.lr > 0 or (self.eps is not None and not self.eps > 0):
            raise InvalidValueError(f"expected lr and eps above 0, got {self.lr} and {self.eps}")


@final
class Retrofit(Handle):
    """A norm in a trained model: `report` says what it cost; `remove()` gives the old model back bit for bit.

    While it is blended in, `share` goes from 0 to 1 with the optimizer's steps; `state()` and `load()` carry it over a
    checkpoint.
    """

    def __init__(self, undo: Callable[[], None], report: RetrofitReport, blends: list[Blend], steps: int) -> None:
        super().__init__(undo, state=lambda: {"step": torch.tensor(self.step)}, load=self._load)
        self.report = report
        self._blends, self._steps = blends, steps
        self.step = 0

    @property
    def share(self) -> float:
        """The share of the norm that is in force."""
        return min(1.0, self.step / self._steps) if self._steps else 1.0

    def advance(self, steps: int = 1) -> None:
        """So many steps of blending more; each step of the optimizer, where one was given, is one."""
        self.step += steps
        for blend in self._blends:
            if blend.active:
                blend.set(self.share)
                if self.share == 1 and self._steps:
                    blend.remove()

    def _load(self, state: dict[str, Tensor]) -> None:
        self.step = int(state["step"])
        self.advance(0)


def retrofit(
    model: nn.Module,
    named: str | QKNorm,
    batches: Sequence[object],
    optimizer: Optimizer | None = None,
    *,
    fitting: Fitting | None = None,
) -> Retrofit:
    """Put a q/k norm into a *trained* model so that its first outputs are as close to the old ones as the norm allows.

    The gains are fitted site by site on what the old model feeds it (`retrofit.gains` has the derivation), optionally
    q and k are distilled for some steps, and the gap to the old model is measured: before, after, and layer by layer.

    Args:
        named: "qk_norm" with its options, such as "qk_norm:gain=head_dim". batches: a few, as for `apply(example=)`:
            tensors of tokens, tuples or dicts of arguments; what is measured is measured on them.
        optimizer: the gains join it; with fitting.anneal its steps blend the norm in.

    Raises:
        RefusedError: q and k are normed already, the norm has no gains, or the attention cannot be read; the model is
        then as it was.

    >>> from qkeel.nn import Decoder, DecoderConfig
    >>> model = Decoder(DecoderConfig(vocab_size=8, d_model=16, n_heads=2, n_layers=1))
    >>> retrofit(model, "qk_norm", [torch.arange(8)[None]]).report.gap.kl < 0.01
    True
    """
    fitting = fitting or Fitting()
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module to retrofit, got {type(model).__name__}")
    remedy = _remedy(named)
    given = _batches(batches)
    plain = unwrapped(model)
    with _evaluating(plain):
        reference = Reference(plain, given)
        sites = _firsts(find_sites(plain, *given[0][0], **given[0][1]))
        balance = Balance.of(reference, sites) if fitting.balance and not fitting.anneal else None
        inputs = [capture(plain, sites, batch) for batch in given]
        with torch.no_grad():
            old = {s.name: _replayed(s, inputs) for s in sites}
    with ExitStack() as undo:
        handle = apply(remedy, plain, optimizer, example=batches[0])
        undo.callback(handle.remove)
        blends = [Blend(site) for site in sites]
        for blend in blends:
            undo.callback(blend.remove)
        _set_eps(plain, sites, fitting.eps)
        with _evaluating(plain):
            report, restore = _fit_all(reference, sites, blends, (inputs, old, balance), fitting)
        undo.callback(restore)
        if not fitting.anneal:
            for blend in blends:
                blend.remove()
        undone = undo.pop_all()
        found = Retrofit(undone.close, report, blends, fitting.anneal)
        if fitting.anneal:
            found.advance(0)
            if optimizer is not None:
                undone.callback(optimizer.register_step_post_hook(lambda *_: found.advance()).remove)
        return found


Captured = tuple[list[dict[str, Arguments]], dict[str, list[Rows]], Balance | None]


def _fit_all(
    reference: Reference, sites: Sequence[AttentionSite], blends: Sequence[Blend], captured: Captured, fitting: Fitting
) -> tuple[RetrofitReport, Callable[[], None]]:
    inputs, old, balance = captured
    naive = reference.gap()
    kls: list[tuple[tuple[float, ...], Callable[[], list[Rows]]]] = []
    start: list[tuple[Tensor, Tensor]] = []
    gains = [Gains.of(site) for site in sites]
    for site, gain in zip(sites, gains):
        replay = functools.partial(_replayed, site, inputs)
        before = _attention(old[site.name], replay)
        start.append((gain.query.detach().clone(), gain.key.detach().clone()))
        fit(gain, old[site.name], replay, iterations=fitting.iterations)
        kls.append((before, replay))
    fitted = _fit_all_gains(reference, gains, (naive, start), fitting.iterations)
    alone = []
    for one in blends:
        for other in blends:
            other.set(float(other is one))
        alone.append(reference.gap(1))
    for one in blends:
        one.set(1.0)
    layers = tuple(
        LayerGap(name=s.name, attention_kl_naive=k[0], attention_kl=_attention(old[s.name], k[1]), alone=a)
        for s, k, a in zip(sites, kls, alone)
    )
    with ExitStack() as undo:
        balanced, distilled = None, None
        if balance is not None and fitting.iterations:
            undo.callback(balance.restore)
            balanced = _balance(reference, gains, balance, fitting.iterations)
        if fitting.distil:
            undo.callback(_distil(reference, sites, gains, fitting))
            distilled = reference.gap()
        restore = undo.pop_all().close
    steps = {"naive": naive, "fitted": fitted, "balanced": balanced, "distilled": distilled}
    return RetrofitReport(old_loss=reference.loss, layers=layers, **steps), restore


def _fit_all_gains(
    reference: Reference, gains: Sequence[Gains], naive: tuple[Gap, list[tuple[Tensor, Tensor]]], iterations: int
) -> Gap:
    """All gains on the KL of the output, from those fitted site by site; the best of naive, these and those."""
    parameters = [p for g in gains for p in (g.query, g.key)]

    def values() -> list[Tensor]:
        return [p.detach().clone() for p in parameters]

    found = [(naive[0], [p for pair in naive[1] for p in pair]), (reference.gap(), values())]
    _put_back(parameters, min(found, key=lambda one: one[0].kl)[1])
    if iterations:
        descend(parameters, functools.partial(_output_loss, reference), iterations)
        found.append((reference.gap(), values()))
    best = min(found, key=lambda one: one[0].kl if one[0].kl == one[0].kl else torch.inf)
    _put_back(parameters, best[1])
    return best[0]


def _output_loss(reference: Reference) -> Tensor:
    pairs = zip(reference.old, reference.batches)
    return mean(divergence(old, predictions(reference.model, batch), batch) for old, batch in pairs)


def _balance(reference: Reference, gains: Sequence[Gains], balance: Balance, iterations: int) -> Gap | None:
    """The gap after queries were scaled against keys, the gains with them; None if it did not fall: all as it was."""
    parameters, before = [p for g in gains for p in (g.query, g.key)], reference.gap()
    kept = [p.detach().clone() for p in parameters]
    balance.descend(parameters, functools.partial(_output_loss, reference), iterations)
    after = reference.gap()
    if after.kl < before.kl:
        return after
    balance.restore()
    _put_back(parameters, kept)
    return None


def _distil(
    reference: Reference, sites: Sequence[AttentionSite], gains: Sequence[Gains], fitting: Fitting
) -> Callable[[], None]:
    """Steps on KL(old ‖ new) by the q and k weights and the gains; kept only if the KL fell. Returns what undoes it."""
    model = reference.model
    names = dict.fromkeys(s.parameter for site in sites for s in (*site.query, *site.key))
    weights = [model.get_parameter(name) for name in names]
    trained = [*weights, *(p for g in gains for p in (g.query, g.key))]
    kept, frozen = [p.detach().clone() for p in trained], [p for p in trained if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=fitting.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, fitting.distil)
    grads = [p.grad for p in trained]
    before, better = reference.gap().kl, False
    try:
        for step in range(fitting.distil):
            i = step % len(reference.batches)
            with torch.enable_grad():
                new = predictions(model, reference.batches[i])
                loss = divergence(reference.old[i], new, reference.batches[i])
            for p, g in zip(trained, torch.autograd.grad(loss, trained)):
                p.grad = g
            optimizer.step()
            schedule.step()
        better = reference.gap().kl < before
    finally:
        if not better:
            _put_back(trained, kept)
        for p, g in zip(trained, grads):
            p.grad = g
        for p in frozen:
            p.requires_grad_(False)
    return functools.partial(_put_back, weights, kept[: len(weights)])


@torch.no_grad()
def _put_back(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for p, value in zip(parameters, values):
        p.copy_(value)


def _remedy(named: str | QKNorm) -> QKNorm:
    found = parse(named)
    if len(found) != 1 or not isinstance(found[0], QKNorm):
        raise RefusedError(f"expected 'qk_norm' with its options to retrofit, got {named!r}; apply() takes any remedy")
    if found[0].gain == "none" or found[0].kind == "l2":
        raise RefusedError(
            f"{named} has no gain of q and of k to fit; use kind=rms or layer with gain=dim, head, head_dim or scalar"
        )
    return found[0]


def _batches(batches: Sequence[object]) -> list[Arguments]:
    if isinstance(batches, (Tensor, dict, str)) or not isinstance(batches, Sequence) or not batches:
        raise InvalidTypeError(f"expected a list of one or more batches, got {type(batches).__name__}")
    return [arguments(batch, "batch") for batch in batches]


def _firsts(sites: Sequence[AttentionSite]) -> list[AttentionSite]:
    """One site per module: a module's second call has the same norms."""
    return list({id(site.module): site for site in reversed(sites)}.values())[::-1]


def _replayed(site: AttentionSite, inputs: Sequence[dict[str, Arguments]]) -> list[Rows]:
    return [rows_of(site, one[site.name]) for one in inputs]


def _attention(old: Sequence[Rows], replay: Callable[[], list[Rows]]) -> tuple[float, ...]:
    with torch.no_grad():
        return tuple(mean(attention_divergence(a, b) for a, b in zip(old, replay())).tolist())


def _set_eps(model: nn.Module, sites: Sequence[AttentionSite], eps: float | None) -> None:
    """The eps of the new norms: the one asked for, or that of the model's other norms."""
    wanted = eps if eps is not None else getattr(getattr(model, "config", None), "rms_norm_eps", None)
    if not isinstance(wanted, float):
        return
    for site in sites:
        if isinstance(site.module, SpecModule):
            norm = site.module.spec.norm
            assert isinstance(norm, GainNorm)
            site.module.spec = site.module.spec.replace(norm=dataclasses.replace(norm, eps=wanted))
        for side in "qk":
            held = submodules_of(site.module).get(f"{side}_norm")
            if isinstance(held, HeadNorm):
                held.norm = dataclasses.replace(held.norm, eps=wanted)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, random streams and buffers put back afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        with undisturbed(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
