"""What a watched step records of a model of transformers, next to numbers made without qkeel.

Both from one model in float64. The reference sees the operators of one eager pass (`aten`): what enters each softmax,
and the product of queries and keys before it; and the weights before and after the step. All else is numpy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import qkeel
from tools.zoo.build import build
from tools.zoo.tables import Entry

HIDDEN = -9000.0  # an added number from which on a pair carries no weight
MASKS = {"swin": -60.0}  # those that add -100 and nothing lower
ABOVE = 100.0
LR, EPS = 1e-2, 1e-6
DROPOUTS = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "layerdrop",
    "resid_dropout",
    "hidden_dropout",
)

Found = dict[str, np.ndarray]  # by field [h]
Pair = tuple[np.ndarray, np.ndarray]  # of q and of k, by query head [h d m]


class Wide(TorchFunctionMode):
    """Whoever asks for float32, as norms and softmax do, gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        given = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **given)


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


class Operators(TorchDispatchMode):
    """Keeps what enters each softmax, the product of two activations before it, and the cap between them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]] = []
        self._product: tuple[Tensor, Tensor, Tensor] | None = None
        self._capped: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        aten, op = torch.ops.aten, func.overloadpacket
        if op in (aten.bmm, aten.baddbmm):
            a, b = args[-2:]
            self._product, self._capped = (a.detach(), b.detach(), out.detach()), None
        elif (
            op is aten.tanh
            and self._product is not None
            and out.numel() == self._product[2].numel()
        ):
            self._capped = args[0].detach()
        elif (
            op in (aten._softmax, aten._safe_softmax)
            and self._product is not None
            and out.ndim >= 3
        ):
            q, k, z = self._product
            if z.numel() == args[0].numel() or args[0].shape[-1] == z.shape[-1] + 1:
                self.seen.append((args[0].detach(), q, k, z, self._capped))
                self._product = None
        return out


def statistics(
    logits: Tensor,
    q: Tensor,
    k: Tensor,
    product: Tensor,
    capped: Tensor | None,
    hidden: float = HIDDEN,
) -> Found:
    """Every statistic of one call, by head, row by row in numpy."""
    width = product.shape[-1]
    z = logits[..., :width].numpy()
    z = z if z.ndim == 4 else z[None]
    b, h, t = z.shape[:3]
    seen = z > hidden
    sink = None
    if (
        logits.shape[-1] > width
    ):  # a column that is no key; each row was made smaller by its largest number
        products = product.reshape(z.shape).numpy()
        one = np.unravel_index(np.argmax(seen.sum(-1)), (b, h, t))
        row, whole = z[one][seen[one]], products[one][seen[one]]
        scale = float(np.polyfit(whole, row, 1)[0])
        shift = np.where(seen, z - scale * products, np.nan)
        shift = np.nanmean(shift, axis=-1, keepdims=True)
        sink, z = logits[..., width:].numpy() - shift, np.where(seen, z - shift, z)
    q, k = (x.reshape(b, h, x.shape[-2], x.shape[-1]).numpy() for x in (q, k.mT))
    raw = z
    if capped is not None:  # the cap is what the hyperbolic tangent is multiplied by
        bent = np.tanh(capped.reshape(z.shape).numpy())
        cap = float(np.median(z[seen] / bent[seen]))
        raw = cap * capped.reshape(z.shape).numpy()
    found: dict[str, list[float]] = {}
    for i in range(h):
        beta = None if sink is None else float(sink.reshape(b, h, -1)[0, i, 0])
        own = by_head(raw[:, i], z[:, i], seen[:, i], q[:, i], k[:, i], beta)
        if beta is not None:
            own |= gates(z[:, i], seen[:, i], beta)
        for name, value in own.items():
            found.setdefault(name, []).append(value)
    return {name: np.array(values) for name, values in found.items()}


def by_head(
    raw: np.ndarray,
    z: np.ndarray,
    seen: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    sink: float | None,
) -> dict[str, float]:
    """The statistics of one head: raw and capped logits [b t s], which pairs are visible, q [b t d], k [b s d].

    With a sink entropies and the weight of the first key are over it too.
    """
    entropies, relative, first, lses, gaps, passed = [], [], [], [], [], []
    for n, row in np.ndindex(*z.shape[:2]):
        own = z[n, row][seen[n, row]]
        if not len(own):
            continue
        lse = float(own.max() + math.log(math.fsum(np.exp(own - own.max()))))
        every = own if sink is None else np.append(own, sink)
        p = np.exp(every - np.logaddexp.reduce(every))
        entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
        lses.append(lse)
        entropies.append(entropy)
        if len(own) > 1:
            relative.append(entropy / math.log(len(every)))
            first.append(float(p[0]))
            # Over the keys alone.
            p = np.exp(own - lse)
            passed.append(math.fsum(p * (1 - p)) / (1 - 1 / len(p)))
            own = raw[n, row][seen[n, row]]
            gaps.append(float(own.max() - math.fsum(own) / len(own)))
    lengths, widths = np.linalg.norm(q, axis=-1), np.linalg.norm(k, axis=-1)
    products = q @ k.swapaxes(-1, -2)
    cosines = (products / lengths[..., None] / widths[:, None])[seen]
    visible = raw[seen]
    found = {
        "max_logit": visible.max(),
        "min_logit": visible.min(),
        "mean_logit": visible.mean(),
        "max_abs_logit": np.abs(visible).max(),
        "capped_max_logit": z[seen].max(),
        "share_above": (visible > ABOVE).mean(),
        "entropy": np.mean(entropies),
        "entropy_min": np.min(entropies),
        "normalized_entropy": np.mean(relative) if relative else math.nan,
        "softmax_gradient": np.mean(passed) if passed else math.nan,
        "sink_share": np.mean(first) if first else math.nan,
        "logit_gap": np.mean(gaps) if gaps else math.nan,
        "logit_spread": np.max(gaps) if gaps else math.nan,
        "lse_mean": np.mean(lses),
        "lse_min": np.min(lses),
        "query_norm": lengths[seen.any(2)].mean(),
        "query_norm_max": lengths[seen.any(2)].max(),
        "key_norm": widths[seen.any(1)].mean(),
        "key_norm_max": widths[seen.any(1)].max(),
        "qk_frobenius": math.sqrt(math.fsum(products[seen] ** 2)),
        "cos_max": cosines.max(),
        "cos_mean": cosines.mean(),
    }
    return {name: float(value) for name, value in found.items()}


def gates(z: np.ndarray, seen: np.ndarray, sink: float) -> dict[str, float]:
    """The gates that a sink makes of the logsumexps of one head's rows."""
    rows = [z[n, i][seen[n, i]] for n, i in np.ndindex(*z.shape[:2])]
    values = [
        1 / (1 + math.exp(sink - float(np.logaddexp.reduce(row))))
        for row in rows
        if len(row)
    ]
    return {
        "sink_logit": sink,
        "gate_mean": float(np.mean(values)),
    }


def projections(model: nn.Module, site: str, h: int, grad: bool = False) -> Pair | None:
    """The weights of q and k by query head [h d m], where a module has them as q_proj and k_proj of full heads; or
    their gradients."""
    module = model.get_submodule(site)
    parts = [dict(module.named_children()).get(name) for name in ("q_proj", "k_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return None
    q, k = (
        (part.weight.grad if grad else part.weight).detach().numpy() for part in parts
    )  # type: ignore[union-attr]
    d = len(q) // h
    heads = [x.reshape(-1, d, x.shape[1]) for x in (q, k)] if not len(k) % d else None
    return (
        None
        if heads is None
        else (heads[0].copy(), np.repeat(heads[1], h // len(heads[1]), 0))
    )


def gained(model: nn.Module, site: str, weights: Pair | None) -> Pair | None:
    """The same weights, their rows times the gains of the norms behind them, where a module has these."""
    if weights is None:
        return None
    module, found = model.get_submodule(site), []
    for name, x in zip(("q_norm", "k_norm"), weights):
        norm = dict(module.named_children()).get(name)
        h, d = x.shape[:2]
        gain = np.ones((1, d))
        if (
            norm is not None
            and (p := dict(norm.named_parameters()).get("weight")) is not None
        ):
            gain = p.detach().numpy().reshape(-1, d) + ("Gemma" in type(norm).__name__)
        found.append(x * np.repeat(gain, h // len(gain), 0)[..., None])
    return found[0], found[1]


def of_weights(old: Pair, new: Pair, grad: Pair, gains: tuple[Pair, Pair]) -> Found:
    """The numbers of the weights before a step, of gradients and of the step, by dense matrices and singular values.

    `gains` are the weights before and after it with the gains of norms on their rows.
    """
    (q, k), (dq, dk) = old, (new[0] - old[0], new[1] - old[1])
    (gq, gk), (sq, sk) = (
        gains[0],
        (gains[1][0] - gains[0][0], gains[1][1] - gains[0][1]),
    )
    found: dict[str, list[float]] = {}
    for i in range(len(q)):
        second, third = sq[i].T @ gk[i] + gq[i].T @ sk[i], sq[i].T @ sk[i]
        own = {
            "query_weight_norm": np.linalg.norm(q[i]),
            "key_weight_norm": np.linalg.norm(k[i]),
            "qk_spectral_norm": np.linalg.svd(q[i].T @ k[i], compute_uv=False)[0],
            "query_update_ratio": np.linalg.norm(dq[i]) / np.linalg.norm(q[i]),
            "key_update_ratio": np.linalg.norm(dk[i]) / np.linalg.norm(k[i]),
            "query_grad_rms": np.sqrt(np.mean(grad[0][i] ** 2)),
            "key_grad_rms": np.sqrt(np.mean(grad[1][i] ** 2)),
        }
        for name, matrix in (("delta2", second), ("delta3", third)):
            sigma = np.linalg.svd(matrix, compute_uv=False)
            p = sigma**2 / (sigma**2).sum()
            own[f"{name}_spectral_norm"] = sigma[0]
            own[f"{name}_stable_rank"] = 1 / p[0]
            own[f"{name}_singular_entropy"] = -math.fsum(
                x * math.log(x) for x in p if x > 0
            )
        for name, value in own.items():
            found.setdefault(name, []).append(float(value))
    return {name: np.array(values) for name, values in found.items()}


class Blocks:
    """The residual stream of one pass, by hooks on the blocks that hold the sites."""

    def __init__(
        self, model: nn.Module, sites: tuple[str, ...], undo: ExitStack
    ) -> None:
        self.found: dict[tuple[str, str], float] = {}
        for site in sites:
            name, part = site.rpartition(".")[0], site.rpartition(".")[2]
            if name.rpartition(".")[2].isdigit() and part in ("self_attn", "attn"):
                block = model.get_submodule(name)
                undo.callback(
                    block.register_forward_hook(
                        self._hook(site), with_kwargs=True
                    ).remove
                )

    def _hook(self, site: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x = (args[0] if args else kwargs["hidden_states"]).detach().numpy()
            y = (output[0] if isinstance(output, tuple) else output).detach().numpy()
            for place, states in (("input", x), ("output", y)):
                peaks = np.abs(states).reshape(-1, states.shape[-1]).max(0)
                self.found[site, f"block_{place}_rms"] = float(
                    np.sqrt(np.mean(states**2))
                )
                self.found[site, f"block_{place}_max"] = float(peaks.max())
                self.found[site, f"block_{place}_channel_ratio"] = float(
                    peaks.max() / np.median(peaks)
                )

        return hook


def still(model: nn.Module) -> nn.Module:
    """The model in training mode, without dropout of any kind."""
    for module in model.modules():
        for name in DROPOUTS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def loss_of(output: Any) -> Tensor:
    """A number of all the floats that a model gives."""
    values = output.values() if isinstance(output, Mapping) else output
    return sum(
        x.double().square().mean()
        for x in values
        if isinstance(x, Tensor) and x.is_floating_point()
    )  # type: ignore[return-value]


def differences(entry: Entry) -> dict[str, float]:
    """By field the largest difference from the reference over all attentions and heads, relative to its size.

    Of numbers under 0.001 it is relative to that. A field that only the reference has is named "… not measured".
    """
    torch.manual_seed(0)
    model = still(build(entry, "eager").double())
    model.config._experts_implementation = (
        "eager"  # grouped products of matrices have no float64
    )
    with Wide(), warnings.catch_warnings(), ExitStack() as undo:
        warnings.simplefilter("ignore")
        for p in model.parameters():
            p.requires_grad_(True)
        batch = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for k, v in entry.maker(model).items()
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
        operators = Operators()
        with operators, torch.no_grad():
            model(**batch)
        with qkeel.watch(
            model, optimizer, stats="all+gates+updates+residual", rules=()
        ) as monitor:
            loss_of(model(**batch)).backward()
            sites = tuple(site.name for site in monitor.sites)
            blocks = Blocks(model, sites, undo)
            with torch.no_grad():
                model.eval()(**batch)
                still(model)
            heads = {site.name: site.n_heads for site in monitor.sites}
            old = {
                site: projections(model, site.partition("#")[0], heads[site])
                for site in sites
            }
            first = {
                site: gained(model, site.partition("#")[0], weights)
                for site, weights in old.items()
            }
            grad = {
                site: projections(model, site.partition("#")[0], heads[site], grad=True)
                for site in sites
            }
            optimizer.step()
            new = {
                site: projections(model, site.partition("#")[0], heads[site])
                for site in sites
            }
            then = {
                site: gained(model, site.partition("#")[0], weights)
                for site, weights in new.items()
            }
            sample = next(
                s
                for s in (monitor.sample_before(1), monitor.sample)
                if s is not None and s.phase == "train"
            )
    worst: dict[str, float] = {}

    def compare(name: str, found: np.ndarray, expected: np.ndarray) -> None:
        both = np.abs(found - expected) / np.maximum(1e-3, np.abs(expected))
        both = np.where(
            np.isnan(found) & np.isnan(expected),
            0.0,
            np.where(np.isnan(both), np.inf, both),
        )
        worst[name] = max(worst.get(name, 0.0), float(both.max()))

    calls = [statistics(*one, MASKS.get(entry.name, HIDDEN)) for one in operators.seen]
    assert len(calls) == len(sample.layers), (len(calls), sample.layers)
    for i, (site, expected) in enumerate(zip(sample.layers, calls)):
        weights: Found = {}
        if old[site] is not None:
            weights = of_weights(
                old[site], new[site], grad[site], (first[site], then[site])
            )  # type: ignore[arg-type]
        for name, values in (expected | weights).items():
            known = sample.heads.get(name)
            own = (
                np.full(len(values), np.nan)
                if known is None
                else known[i, : len(values)]
            )
            if known is None or np.isnan(own).all():
                worst.setdefault(f"{name} not measured", 0.0)
                worst[f"{name} not measured"] += 1
            else:
                compare(name, own, values)
        for name in blocks_of(blocks, site):
            compare(
                name,
                np.array([sample.values.get(f"{name}/{site}", math.nan)]),
                np.array([blocks.found[site, name]]),
            )
    return worst


def blocks_of(blocks: Blocks, site: str) -> Iterator[str]:
    """The fields that the reference has of the block of a site."""
    return (name for of, name in blocks.found if of == site)
