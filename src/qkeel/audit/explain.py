"""Explains which norm, rotation, scale, cap and mask each attention layer applies, from one traced pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.audit.config_differences import differences
from qkeel.audit.norm_evidence import (
    NormFit,
    fit_norm,
    gain_candidates,
    rotation_of,
    unknown_norm,
)
from qkeel.audit.one_pass import OnePass, joined
from qkeel.audit.recipes import Explanation, NormRecipe, SiteRecipe
from qkeel.audit.visible_keys import describe_visible, visible_pairs
from qkeel.capture.calls import ScoresCall
from qkeel.capture.example import Arguments, arguments, undisturbed
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import owners, unwrapped
from qkeel.sites import AttentionSite
from qkeel.sites.find import found_sites
from qkeel.sites.tap import Tap
from qkeel.spec import AttentionCall
from qkeel.spec.call import of_key

Letter = Literal["q", "k"]
_ROWS = 256  # queries whose scores are compared with q·k


def explain(model: nn.Module, batch: object = None) -> Explanation:
    """Determines from one forward pass what each attention layer of a model does to q, k and their product.

    What the projections output is compared with the q and k that arrive at attention: lengths show the norm, angles
    the rotation, and logits the scale. Names only decide where numbers leave a choice, as between gains that are all 1.
    The model stays in the mode that it is in, and bit for bit unchanged; compiled models run eagerly.

    Args:
        model: any PyTorch model whose attention `find_sites` finds.
        batch: input of a forward pass: a tensor, a tuple of arguments, or a mapping of keyword arguments. Positions
            require three tokens or more, and details that bfloat16 rounds away require float32. The default is the
            last training batch, if `qkeel.watch` has watched the model during training.

    Returns:
        An Explanation, which can be printed; its fields include `sites` and `differences` (contradictions to
        `model.config`, which may be a mapping, a dataclass or a namespace).

    Raises:
        RefusedError: no attention can be analysed.
        InvalidValueError: the forward pass fails.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
        >>> print(explain(model, torch.randn(1, 5, 16)).sites[0].lines()[0])
        heads     2 heads of 8
    """
    model = unwrapped(model)
    args, kwargs = _last_batch(model) if batch is None else arguments(batch, "batch")
    with undisturbed(model):
        sites, _ = found_sites(model, args, kwargs)
        foreign = [site for site in sites if not isinstance(site.module, SpecModule)]
        if not foreign:
            raise RefusedError(
                f"all attention in this {type(model).__name__} is qkeel's own and follows its spec; to see it, call "
                "print(module.spec.explain()) on an attention module"
            )
        trace = OnePass(model, foreign)
        trace.run(args, kwargs)
        recipes = [SiteEvidence(trace, site).recipe() for site in foreign]
    return Explanation(
        model=type(model).__name__,
        sites=tuple(recipes),
        differences=differences(model, recipes),
        linear=sites.linear,
    )


def _last_batch(model: nn.Module) -> Arguments:
    """Returns the arguments of a watched model's last training pass."""
    for tap in owners(model):
        if isinstance(tap, Tap) and tap.latest is not None:
            return tuple(tap.latest.args), dict(tap.latest.kwargs)
    raise InvalidTypeError(
        "expected a batch that the model accepts: qkeel.explain(model, batch). The batch may be left out "
        "only for a model that qkeel.watch has watched during training"
    )


@final
class SiteEvidence:
    """What one pass shows of one site: its q [b h t d], its k [b g s d] in float64, its logits and its mask."""

    def __init__(self, trace: OnePass, site: AttentionSite) -> None:
        self.trace, self.site = trace, site
        self.calls = [captured.call for captured in trace.calls.get(site.name, [])]
        first = self.calls[0] if self.calls else None
        is_packed = isinstance(first, AttentionCall) and of_key(first) is not None
        if is_packed or any(call.q is None or call.k is None for call in self.calls):
            self.calls = []
        if self.calls:
            self.rounding = float(torch.finfo(self.calls[0].q.dtype).eps)  # type: ignore[union-attr]
            self.tolerance = max(2e-4, 8 * self.rounding)
            self.arrived: dict[Letter, Tensor] = {
                "q": self._vectors("q"),
                "k": self._vectors("k"),
            }

    def _vectors(self, letter: Letter) -> Tensor:
        """Returns q or k of all heads, which may have been computed in one call each."""
        x = (
            torch.cat([getattr(call, letter).detach() for call in self.calls], 1)
            .double()
            .cpu()
        )
        if letter == "q":
            return x
        # Undoes the repetition of keys even where equality can't show it, as for zero keys.
        heads = (
            self.site.n_kv_heads if self.site.key_heads is None else self.site.n_heads
        )
        return x[:, :: max(1, x.shape[1] // heads)]

    def recipe(self) -> SiteRecipe:
        """Returns the recipe; what the pass does not show is listed in `unknown`."""
        site = self.site
        recipe = SiteRecipe(
            name=site.name,
            n_heads=site.n_heads,
            n_kv_heads=site.n_kv_heads,
            head_dim=site.head_dim,
            key_heads=site.key_heads,
            layer_type=site.layer_type,
            query=NormRecipe(kind="unknown", why="q was not seen"),
            key=NormRecipe(kind="unknown", why="k was not seen"),
        )
        if not self.calls:
            reason = site.why or "q and k of this attention could not be read"
            return dataclasses.replace(recipe, unknown=(reason,))
        pairs = visible_pairs(self.calls[0])
        visible, window = describe_visible(pairs[0])
        sees_all = (
            visible.startswith(("keys up to its own", "every key"))
            and site.layer_type != "cross"
        )
        cap = self.calls[0].spec.cap.limit
        keys = pairs.shape[-1] if sees_all else None
        recipe = dataclasses.replace(
            recipe, visible=visible, window=window, keys=keys, softcap=cap
        )
        if not site.terms:
            unread = NormRecipe(
                kind="unknown", why=f"its weights are not known: {site.why}"
            )
            return dataclasses.replace(recipe, query=unread, key=unread)
        query, key = self._fit("q"), self._fit("k")
        turns = [
            rotation_of(fit, self.tolerance, self.rounding) for fit in (query, key)
        ]
        scale, is_biased = self._scale(pairs)
        unknown = []
        if math.isinf(query.error + key.error):
            unknown.append("the rotation, because a norm is not known")
        elif (turns[0] is None) != (turns[1] is None):
            unknown.append("only one of q and k changes with position")
        if not scale:
            unknown.append(
                "the scale: logits were not q·k times a constant, or no row sees two keys"
            )
        norms = []
        for fit, turn in ((query, turns[0]), (key, turns[1])):
            norms.append(
                fit.recipe
                if turn is not None
                else dataclasses.replace(fit.recipe, order="")
            )
        return dataclasses.replace(
            recipe,
            query=norms[0],
            key=norms[1],
            rotation=turns[0] or turns[1],
            latent=self._latent(),
            scale=scale,
            scale_parameter=self._parameter_of(
                torch.tensor(scale).double(), torch.clone, torch.exp
            )
            if scale
            else "",
            sinks=self._sinks(),
            bias=is_biased,
            idle=self._idle({"q": query, "k": key}),
            unknown=tuple(unknown),
        )

    def _projected(self, letter: Letter) -> list[Tensor]:
        """Returns what the projections output [b n t d], for each order of batch and tokens; empty if it was not
        seen."""
        batch, heads, tokens, _ = self.arrived[letter].shape
        parts = {}
        for term in self.site.terms:
            weight_slice = (term.query if letter == "q" else term.key)[-1]
            parts[
                weight_slice.parameter,
                weight_slice.index.shape,
                int(weight_slice.index[0, 0]),
            ] = weight_slice
        readings = [
            self.trace.outputs(weight_slice, batch, tokens)
            for weight_slice in parts.values()
        ]
        assembled = []
        for outputs in zip(*readings):
            # One key for all heads, as the rotated part of MLA's, belongs to each of them.
            shared = [
                x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x for x in outputs
            ]
            if all(x.shape[1] == heads for x in shared):
                assembled.append(torch.cat(shared, -1))
        return [x for x in assembled if x.shape == self.arrived[letter].shape]

    def _fit(self, letter: Letter) -> NormFit:
        """Returns the norm that explains q or k of the first sample."""
        arrived = self.arrived[letter]
        fit = unknown_norm(
            arrived[0],
            "the output of its projection was not seen as a product with the stored weight",
        )
        scope, module = self.trace.scopes[self.site.name]
        projections = {
            weight_slice.parameter
            for weight_slice in (*self.site.query, *self.site.key)
        }
        parameters = {
            name: p
            for name, p in module.named_parameters()
            if joined(scope, name) not in projections
        }
        for projected in self._projected(letter):
            candidates = gain_candidates(
                parameters, self.trace.norms[self.site.name], projected
            )
            fit = fit_norm(
                projected[0], arrived[0], candidates, self.tolerance, self.rounding
            )
            if not math.isinf(fit.error):
                break
        return fit

    def _idle(self, fits: dict[Letter, NormFit]) -> tuple[str, ...]:
        """Returns the norms without effect: those never called, and those called on a q or k that is not normed."""
        sentences = []
        for norm in self.trace.norms[self.site.name]:
            title = f"{norm.name} ({type(norm.module).__name__})"
            if not norm.received:
                sentences.append(f"{title} is never called")
            for letter, fit in fits.items():
                is_plain = fit.recipe.kind == "none"
                if is_plain and any(
                    norm.called_on(x)[0] for x in self._projected(letter)
                ):
                    sentences.append(
                        f"{title} is called on {letter}, and its result is not used"
                    )
        return tuple(sentences)

    def _scale(self, pairs: Tensor) -> tuple[tuple[float, ...], bool]:
        """Returns the factor on q·k of each head, empty if unknown, and whether something else is added."""
        first = self.calls[0]
        if isinstance(first, AttentionCall):
            factor = float(
                first.spec.scale.factor(torch.zeros(1), first.q.shape[-1], {})
            )
            bias = first.bias(slice(0, first.q.shape[2]), slice(0, first.k.shape[2]))
            if bias is None:
                return (factor,) * self.site.n_heads, False
            visible_pairs_of_head, added = torch.broadcast_tensors(
                pairs, bias.detach().cpu()
            )
            return (factor,) * self.site.n_heads, bool(
                (added[visible_pairs_of_head] != 0).any()
            )
        # Two samples and the last queries say it all, and the scores of a long batch would not fit into memory.
        q, k = self.arrived["q"][:2, :, -_ROWS:], self.arrived["k"][:2]
        scores = [
            call.logits.detach()[:2, :, -_ROWS:]
            for call in self.calls
            if isinstance(call, ScoresCall)
        ]
        logits, pairs = torch.cat(scores, 1), pairs[:2, :, -_ROWS:]
        logits, products = (
            logits.double().cpu(),
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT,
        )
        pairs = pairs.expand(products.shape)
        tolerance = max(1e-3, 30 * self.rounding)
        scale = _slope(_centred(products, pairs), _centred(logits, pairs), tolerance)
        if scale or len(q) == 1:
            return scale, False
        # What is added to the scores is the same in both samples.
        shared_pairs = pairs[:1] & pairs[1:2]
        products, logits = products[:1] - products[1:2], logits[:1] - logits[1:2]
        scale = _slope(
            _centred(products, shared_pairs), _centred(logits, shared_pairs), tolerance
        )
        return scale, bool(scale)

    def _parameter_of(
        self, numbers: Tensor, *functions: Callable[[Tensor], Tensor]
    ) -> str:
        """Returns the name of the parameter near the site that holds these numbers [h], after one of the functions."""
        for name, p in self.trace.scopes[self.site.name][1].named_parameters():
            if p.numel() not in (1, len(numbers)) or p.is_meta:
                continue
            values = p.detach().double().cpu().flatten().expand_as(numbers)
            if any(
                torch.allclose(function(values), numbers, rtol=1e-3, atol=1e-6)
                for function in functions
            ):
                return name
        return ""

    def _sinks(self) -> str:
        """Describes columns of the softmax that are not keys."""
        sink = self.calls[0].sink if isinstance(self.calls[0], ScoresCall) else None
        if sink is None:
            return ""
        name = self._parameter_of(sink[0, :, 0].detach().double().cpu(), torch.clone)
        return (
            f"1 sink logit per head in the softmax ({name})"
            if name
            else "sink logits in the softmax"
        )

    def _latent(self) -> str:
        """Describes MLA: which dimensions of a key come from which weight."""
        parts = []
        for term in self.site.terms:
            weight_slice = term.key[-1]
            is_shared = weight_slice.n == 1 and self.site.n_heads > 1
            weight = (
                weight_slice.parameter.rpartition(".")[0].rpartition(".")[2]
                or weight_slice.parameter
            )
            parts.append(
                f"{weight_slice.index.shape[1]} from {weight}{', one key for all heads' if is_shared else ''}"
            )
        return f"MLA-like, q·k = {' + '.join(parts)}" if len(parts) > 1 else ""


def _centred(scores: Tensor, pairs: Tensor) -> Tensor:
    """Returns scores minus their mean over the visible keys of a row, and 0 elsewhere.

    This removes what is equal for all keys of a row (a bias of k, a subtracted maximum), which the softmax does not
    see.
    """
    count = pairs.sum(-1, keepdim=True).clamp_min(1)
    visible = torch.where(pairs, scores, 0.0)
    return torch.where(pairs, visible - visible.sum(-1, keepdim=True) / count, 0.0)


def _slope(x: Tensor, y: Tensor, tolerance: float) -> tuple[float, ...]:
    """Fits s per head in y = s x for [b h t s]; empty if no s fits."""
    x, y = x.transpose(0, 1).flatten(1), y.transpose(0, 1).flatten(1)
    energy = x.square().sum(1)
    if not bool((energy > 0).all()):
        return ()  # no row sees two keys, so there is nothing to compare
    slope = (x * y).sum(1) / energy
    error = (y - slope[:, None] * x).abs().amax(1)
    is_close = error <= tolerance * y.abs().amax(1).clamp_min(1e-30)
    return tuple(slope.tolist()) if bool(is_close.all()) else ()
