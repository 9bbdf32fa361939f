"""Retrofit: inserts a q/k norm into a trained model, fits its gains, and measures the cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.example import arguments
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import InvalidTypeError, RefusedError, check
from qkeel.handle import Handle
from qkeel.patching.forward import extra_pass, unwrapped
from qkeel.remedies.apply import apply, parse
from qkeel.remedies.base import evaluating
from qkeel.remedies.qk_norm import QKNorm
from qkeel.remedies.retrofit.fit_gains import InsertedNorm
from qkeel.remedies.retrofit.outputs import Reference, by_name, held_out, predictions
from qkeel.remedies.retrofit.report import RetrofitReport
from qkeel.sites.find import find_sites


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrofitConfig:
    """Settings of a retrofit.

    Attributes:
        iterations: the number of L-BFGS iterations after the least-squares start; 0 keeps the start.
        eps: the eps of the norm. By default this is rms_norm_eps of the model's config, if present, so that the model
            can be exported.
    """

    iterations: int = 40
    eps: float | None = None

    def __post_init__(self) -> None:
        is_count = type(self.iterations) is int and self.iterations >= 0
        check(is_count, "iterations of at least 0", repr(self.iterations))
        check(self.eps is None or self.eps > 0, "an eps above 0", self.eps)


@final
class Retrofit(Handle):
    """A norm in a trained model, inserted by `retrofit`.

    `report` contains the cost of the norm, and `remove()` restores the old model bit for bit.
    """

    def __init__(self, undo: Callable[[], None], report: RetrofitReport) -> None:
        super().__init__(undo)
        self.report = report


# Its optimizer was the fourth argument in 0.1.0.
@accepts_earlier_calls(
    lambda *args, **named: (
        (args[:3], {**named, "optimizer": args[3]}) if len(args) > 3 else None
    )
)
def retrofit(
    model: nn.Module,
    remedy: str | QKNorm,
    batch: object,
    *,
    optimizer: Optimizer | None = None,
    config: RetrofitConfig | None = None,
) -> Retrofit:
    """Inserts a q/k norm into a *trained* model so that its outputs stay as close to the old ones as the norm allows.

    The gains start at the lengths that the norm takes away (see `retrofit.fit_gains` for the derivation), and are then
    fitted on the model's outputs: by the KL divergence if these are scores of classes, else by the squared error. The
    gap to the old model is measured before and after, on a fifth of the data (the last batches, or the last rows of a
    single batch) that is not fitted.

    Args:
        model: the trained model.
        remedy: "qk_norm" with its options, such as "qk_norm:gain=head_dim".
        batch: the data, as in `apply`: a tensor of tokens, a tuple of positional or a dict of keyword arguments; or a
            list of several batches. Give several sequences, since with a single one the gap can only be measured on what
            was fitted.
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
        raise InvalidTypeError(
            f"expected a torch.nn.Module to retrofit, got {type(model).__name__}"
        )
    norm_remedy = _norm_remedy(remedy)
    inner_model = unwrapped(model)
    # As everywhere, a tuple holds the positional arguments of one batch.
    several = batch if isinstance(batch, list) else [batch]
    batches = [by_name(inner_model, arguments(single)) for single in several]
    if not batches or not all(map(any, batches)):
        raise InvalidTypeError(
            f"expected a batch or a list of one or more batches, got {batch!r}"
        )
    # A fit is always better on what it has seen.
    fitted_batches, measured_batches, measured_on = held_out(batches)
    if dist.world() > 1 and (wrapper := dist.wrapped_by(inner_model)):
        raise RefusedError(
            f"retrofit fits gains on complete weights, but {wrapper} has already spread this model across processes. "
            "Retrofit it before it is wrapped or split"
        )
    with evaluating(inner_model), extra_pass(inner_model):
        reference = Reference(inner_model, fitted_batches)
        measured = Reference(inner_model, measured_batches)
        # One site of each module: its attention calls share the norm.
        by_module = {}
        for site in find_sites(inner_model, several[0]):
            by_module.setdefault(id(site.module), site)
        sites = list(by_module.values())
    with ExitStack() as undo:
        undo.callback(
            apply(inner_model, norm_remedy, optimizer, batch=several[0]).remove
        )
        # The requested eps, or that of the model's other norms.
        config_eps = getattr(getattr(inner_model, "config", None), "rms_norm_eps", None)
        eps = fitting.eps or (config_eps if isinstance(config_eps, float) else None)
        norms = [InsertedNorm(site, eps) for site in sites]
        with evaluating(inner_model), extra_pass(inner_model):
            report = _fit(reference, measured, norms, fitting.iterations, measured_on)
        return Retrofit(undo.pop_all().close, report)


def _fit(
    reference: Reference,
    measured: Reference,
    norms: Sequence[InsertedNorm],
    iterations: int,
    measured_on: str,
) -> RetrofitReport:
    """Fits the norms in two stages, and takes a stage back unless it reduces the gap on the fitted data."""
    gains = [p for norm in norms for p in norm.gains]
    naive = measured.gap()

    @torch.no_grad()
    def run() -> object:
        return predictions(reference.model, reference.batches[0])

    def start() -> None:
        # In the order of the layers, so that each start sees the queries that the norms before it leave.
        for norm in norms:
            norm.start(run)

    def descend() -> None:
        optimizer = torch.optim.LBFGS(
            gains, max_iter=iterations, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            with torch.enable_grad():
                distance = reference.distance()
            for gain, gradient in zip(gains, torch.autograd.grad(distance, gains)):
                gain.grad = gradient
            return distance.detach()

        optimizer.step(closure)
        for gain in gains:
            gain.grad = None

    # A naive insertion may overflow; anything finite is better than that.
    distance = reference.gap().distance
    smallest = math.inf if math.isnan(distance) else distance
    for stage in (start, descend) if iterations else (start,):
        values = [gain.detach().clone() for gain in gains]
        stage()
        distance = reference.gap().distance
        if distance < smallest:
            smallest = distance
            continue
        with torch.no_grad():
            for gain, value in zip(gains, values):
                gain.copy_(value)
    return RetrofitReport(naive=naive, gap=measured.gap(), held_out=measured_on)


def _norm_remedy(remedy: str | QKNorm) -> QKNorm:
    remedies = parse(remedy)
    if len(remedies) != 1 or not isinstance(remedies[0], QKNorm):
        raise RefusedError(
            f"expected 'qk_norm' with its options to retrofit, got {remedy!r}; apply() takes any remedy"
        )
    if remedies[0].gain == "none" or remedies[0].kind == "l2":
        raise RefusedError(
            f"{remedy} has no gains of q and k to fit; use kind=rms or layer with gain=dim, head, head_dim or scalar"
        )
    return remedies[0]
