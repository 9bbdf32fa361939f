"""Retrofit: inserts a q/k norm into a trained model, fits its gains, and measures the cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.capture.example import arguments
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import InvalidTypeError, RefusedError, check
from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.patching.forward import unwrapped
from qkeel.remedies.apply import apply, parse
from qkeel.remedies.base import evaluating
from qkeel.remedies.qk_norm import QKNorm
from qkeel.remedies.retrofit.fit_gains import Balance, Best, InsertedNorm, copies, descend, fit, put_back
from qkeel.remedies.retrofit.replay import (
    Gap,
    LayerGap,
    Reference,
    Replay,
    RetrofitReport,
    captured,
    divergence,
    predictions,
)
from qkeel.sites.find import find_sites


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitConfig:
    """Settings of a retrofit.

    Attributes:
        iterations: the number of L-BFGS iterations per site after the least-squares start; 0 keeps the start.
        balance: whether to rescale queries against keys in the weights, which leaves the old model's logits unchanged
            (see `fit_gains`).
        distil: the number of AdamW steps that train the q and k weights and the gains on the old model's predictions.
        lr: the learning rate of these steps.
        eps: the eps of the norm. By default this is rms_norm_eps of the model's config, if present, so that the model
            can be exported.
    """

    iterations: int = 20
    balance: bool = True
    distil: int = 0
    lr: float = 1e-3
    eps: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("iterations", self.iterations), ("distil", self.distil)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            check(whole, f"{name} to be a whole number of at least 0", repr(value))
        check(self.lr > 0 and (self.eps is None or self.eps > 0), "lr and eps above 0", f"{self.lr} and {self.eps}")


@final
class Retrofit(Handle):
    """A norm in a trained model, inserted by `retrofit`.

    `report` contains the cost of the norm, and `remove()` restores the old model bit for bit.
    """

    def __init__(self, undo: Callable[[], None], report: RetrofitReport) -> None:
        super().__init__(undo)
        self.report = report


# Its optimizer was the fourth argument in 0.1.0.
@accepts_earlier_calls(lambda *args, **named: (args[:3], {**named, "optimizer": args[3]}) if len(args) > 3 else None)
def retrofit(
    model: nn.Module,
    remedy: str | QKNorm,
    batch: object,
    *,
    optimizer: Optimizer | None = None,
    config: RetrofitConfig | None = None,
) -> Retrofit:
    """Inserts a q/k norm into a *trained* model so that its outputs stay as close to the old ones as the norm allows.

    The gains are fitted site by site on the inputs of the old model (see `retrofit.fit_gains` for the derivation), and
    q and k are optionally distilled. The gap to the old model is measured before and after fitting, and for each layer.

    Args:
        model: the trained model.
        remedy: "qk_norm" with its options, such as "qk_norm:gain=head_dim".
        batch: a tensor of tokens or a dict of arguments, or a list of several batches, which may also be tuples of
            arguments. The gains are fitted and the gaps are measured on these batches.
        optimizer: the optimizer to which the gains are added.
        config: the settings of the retrofit, by default RetrofitConfig().

    Raises:
        RefusedError: q and k are already normed, the norm has no gains, the attention cannot be read, or several
            processes train the model and it is already wrapped or split. The model is then unchanged.

    Example:
        >>> from qkeel.nn import Decoder, DecoderConfig
        >>> model = Decoder(DecoderConfig(vocab_size=8, d_model=16, n_heads=2, n_layers=1))
        >>> retrofit(model, "qk_norm", torch.arange(8)[None]).report.gap.kl < 0.01
        True
    """
    fitting = config or RetrofitConfig()
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module to retrofit, got {type(model).__name__}")
    norm_remedy = _norm_remedy(remedy)
    several = _several(batch)
    given = [arguments(one) for one in several]
    plain = unwrapped(model)
    if dist.world() > 1 and (wrapper := dist.wrapped_by(plain)):
        raise RefusedError(
            f"retrofit fits gains on complete weights, but {wrapper} has already spread this model across processes. "
            "Retrofit it before it is wrapped or split"
        )
    with evaluating(plain):
        reference = Reference(plain, given)
        found_sites = find_sites(plain, several[0])
        # Only the first site of each module.
        sites = list({id(site.module): site for site in reversed(found_sites)}.values())[::-1]
        balance = Balance.of(reference, sites) if fitting.balance else None
        replays = captured(plain, sites, given)
    with ExitStack() as undo:
        undo.callback(apply(plain, norm_remedy, optimizer, batch=several[0]).remove)
        # The requested eps, or that of the model's other norms.
        eps = fitting.eps or getattr(getattr(plain, "config", None), "rms_norm_eps", None)
        norms = [InsertedNorm(site, eps if isinstance(eps, float) else None) for site in sites]
        with evaluating(plain):
            report, restore = _fit_all(reference, sites, norms, (replays, balance), fitting)
        undo.callback(restore)
        return Retrofit(undo.pop_all().close, report)


def _fit_all(
    reference: Reference,
    sites: Sequence[AttentionSite],
    norms: Sequence[InsertedNorm],
    known: tuple[Sequence[Replay], Balance | None],
    fitting: RetrofitConfig,
) -> tuple[RetrofitReport, Callable[[], None]]:
    """Fits the norms in stages, and keeps the result of a stage only if it reduces the gap.

    Returns the report, and a function that restores the weights."""
    replays, balance = known
    gains = [p for norm in norms for p in norm.gains]
    best = Best(gains, reference.gap)
    naive, naive_kl = best.gap, [_per_head(replay) for replay in replays]
    for norm, replay in zip(norms, replays):
        fit(norm, replay, iterations=fitting.iterations)
    best.offer()
    if fitting.iterations:
        descend(gains, reference.divergence, fitting.iterations)
        best.offer()
    layers = tuple(
        LayerGap(name=site.name, attention_kl_naive=before, attention_kl=_per_head(replay))
        for site, before, replay in zip(sites, naive_kl, replays)
    )
    with ExitStack() as undo:
        balanced, distilled = None, None
        if balance is not None and fitting.iterations:
            undo.callback(balance.restore)
            kept = Best([*balance.weights, *gains], reference.gap)
            balance.descend(gains, reference.divergence, fitting.iterations)
            balanced = kept.gap if kept.offer() else None
        if fitting.distil:
            distilled = _distil(reference, sites, gains, fitting, undo)
        restore = undo.pop_all().close
    steps = {"naive": naive, "fitted": best.gap, "balanced": balanced, "distilled": distilled}
    return RetrofitReport(old_loss=reference.loss, layers=layers, **steps), restore


def _per_head(replay: Replay) -> tuple[float, ...]:
    with torch.no_grad():
        return tuple(replay.divergence().tolist())


def _distil(
    reference: Reference,
    sites: Sequence[AttentionSite],
    gains: Sequence[nn.Parameter],
    fitting: RetrofitConfig,
    undo: ExitStack,
) -> Gap:
    """Trains the q and k weights and the gains to reduce KL(old ‖ new), and keeps the result only if the KL fell."""
    model = reference.model
    names = dict.fromkeys(s.parameter for site in sites for s in (*site.query, *site.key))
    weights = [model.get_parameter(name) for name in names]
    undo.callback(put_back, weights, copies(weights))
    trained = [*weights, *gains]
    grads, best = [p.grad for p in trained], Best(trained, reference.gap)
    optimizer = torch.optim.AdamW(trained, lr=fitting.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, fitting.distil)
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
        best.offer()
    finally:
        for p, g in zip(trained, grads):
            p.grad = g
    return best.gap


def _norm_remedy(remedy: str | QKNorm) -> QKNorm:
    found = parse(remedy)
    if len(found) != 1 or not isinstance(found[0], QKNorm):
        raise RefusedError(f"expected 'qk_norm' with its options to retrofit, got {remedy!r}; apply() takes any remedy")
    if found[0].gain == "none" or found[0].kind == "l2":
        raise RefusedError(
            f"{remedy} has no gains of q and k to fit; use kind=rms or layer with gain=dim, head, head_dim or scalar"
        )
    return found[0]


def _several(batches: object) -> list[object]:
    """Returns one or several batches as a list."""
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if isinstance(batches, str) or not isinstance(batches, Sequence):
        raise InvalidTypeError(f"expected a batch or a list of one or more batches, got {type(batches).__name__}")
    if not batches:
        raise InvalidTypeError("expected a batch or a list of one or more batches, got an empty list")
    if isinstance(batches, tuple) and len(batches) > 1 and all(isinstance(one, Tensor) for one in batches):
        raise InvalidTypeError(
            "expected a batch or a list of batches, got a tuple of tensors, which may mean the arguments of one batch "
            "or several batches: pass a list of batches, where a batch with several arguments is a tuple or a dict"
        )
    return list(batches)
