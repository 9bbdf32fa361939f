"""Explains which norm, rotation, scale, cap and mask each attention layer applies, from one traced pass.

The command `qkeel explain`, which explains a preset, a remedy or a recorded number, is in `cli.report`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.audit.config_differences import comparisons, differences
from qkeel.audit.norm_evidence import (
    NormFit,
    fit_norm,
    head_gains,
    rotation_of,
    unknown_norm,
)
from qkeel.audit.one_pass import OnePass
from qkeel.audit.output_gates import gate_text
from qkeel.audit.recipes import Explanation, NormRecipe, SiteRecipe, compress
from qkeel.audit.visibility import describe_visible, visible_pairs
from qkeel.capture.calls import ScoresCall
from qkeel.capture.example import arguments, undisturbed
from qkeel.errors import RefusedError
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import unwrapped
from qkeel.sites import AttentionSite
from qkeel.sites.find import found_sites
from qkeel.spec import AttentionCall
from qkeel.spec.call import of_key

Letter = Literal["q", "k"]
# Queries whose scores are compared with q·k.
_ROWS = 256


def explain(model: nn.Module, batch: object) -> Explanation:
    """Determines from one forward pass what each attention layer of a model does to q, k and their product.

    What the projections output is compared with the q and k that arrive at attention: lengths show the norm, angles
    the rotation, and logits the scale. Names only decide where numbers leave a choice, as between gains that are all 1.
    The model stays in the mode that it is in, and bit for bit unchanged; compiled models run eagerly.

    Args:
        model: any PyTorch model whose attention `find_sites` finds.
        batch: input of a forward pass: a tensor, a tuple of arguments, or a mapping of keyword arguments. Positions
            require three tokens or more, and details that bfloat16 rounds away require float32.

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
    args, kwargs = arguments(batch, "batch")
    # Two passes, to find the sites and to look at them: what the model stores in them is put back.
    with undisturbed(model):
        sites = found_sites(model, args, kwargs)
        foreign = [site for site in sites if not isinstance(site.module, SpecModule)]
        if not foreign:
            raise RefusedError(
                f"all attention in this {type(model).__name__} is qkeel's own and follows its spec; to see it, call "
                "print(module.spec.explain()) on an attention module"
            )
        trace = OnePass(model, foreign, args, kwargs)
        recipes = [SiteEvidence(trace, site).recipe() for site in foreign]
    compared = comparisons(model, recipes)
    return Explanation(
        model=type(model).__name__,
        sites=tuple(recipes),
        differences=differences(compared, recipes),
        compared=tuple((*x[:3], compress(names)) for x, names in compared.items()),
    )


@final
class SiteEvidence:
    """What one pass shows of one site: its q [b h t d], its k [b g s d] in float64, its logits and its mask."""

    def __init__(self, trace: OnePass, site: AttentionSite) -> None:
        self.trace, self.site = trace, site
        self.calls = [captured.call for captured in trace.calls.get(site.name, [])]
        first = self.calls[0] if self.calls else None
        # Packed sequences share one batch entry, so that positions start again within it: nothing here tells where.
        is_packed = isinstance(first, AttentionCall) and of_key(first) is not None
        if is_packed or any(call.q is None or call.k is None for call in self.calls):
            self.calls = []
        if self.calls:
            self.rounding = float(torch.finfo(self.calls[0].q.dtype).eps)  # type: ignore[union-attr]
            # Float32 rounds a head's length by much less; in bfloat16, rounding itself decides.
            self.tolerance = max(2e-4, 8 * self.rounding)
            # All heads, which may have been computed in one call each.
            q, k = (
                torch.cat([getattr(call, letter).detach() for call in self.calls], 1)
                for letter in "qk"
            )
            # Undoes the repetition of keys even where equality can't show it, as for zero keys.
            heads = site.n_kv_heads if site.key_heads is None else site.n_heads
            k = k[:, :: max(1, k.shape[1] // heads)]
            if site.key_heads is not None:
                firsts = map(site.key_heads.index, range(site.n_kv_heads))
                k = k[:, [*firsts]]
            self.arrived: dict[Letter, Tensor] = {
                "q": q.double().cpu(),
                "k": k.double().cpu(),
            }

    def recipe(self) -> SiteRecipe:
        """Returns the recipe; what the pass does not show is listed in `unknown`."""
        site = self.site
        unread = NormRecipe(kind="unknown", why="q and k were not seen")
        recipe = SiteRecipe(
            name=site.name,
            n_heads=site.n_heads,
            n_kv_heads=site.n_kv_heads,
            head_dim=site.head_dim,
            key_heads=site.key_heads,
            layer_type=site.layer_type,
            query=unread,
            key=unread,
        )
        if not self.calls:
            reason = site.why or "q and k of this attention could not be read"
            return dataclasses.replace(recipe, unknown=(reason,))
        pairs = visible_pairs(self.calls[0])
        # The first sample speaks for all: what padding hides in the others is no property of the layer.
        visible, window = describe_visible(pairs[0])
        sees_all = visible.startswith(("keys up to its own", "every key"))
        recipe = dataclasses.replace(
            recipe,
            visible=visible,
            window=window,
            keys=pairs.shape[-1] if sees_all and site.layer_type != "cross" else None,
            softcap=self.calls[0].spec.cap.limit,
        )
        if not site.terms:
            reason = f"its weights are not known: {site.why}"
            unread = NormRecipe(kind="unknown", why=reason)
            return dataclasses.replace(recipe, query=unread, key=unread)
        projected = {x: self._projected(x) for x in self.arrived}
        fits = {x: self._fit(x, projected[x]) for x in self.arrived}
        turns, norms, idle = [], [], list[str]()
        for fit in fits.values():
            turn = rotation_of(fit, self.tolerance, self.rounding)
            turns.append(turn)
            # Without a rotation there is no order to speak of.
            order = "" if turn is None else fit.recipe.order
            norms.append(dataclasses.replace(fit.recipe, order=order))
        for norm in self.trace.norms[site.name].values():
            title = f"{norm.name} ({type(norm.module).__name__})"
            if not norm.received:
                idle.append(f"{title} is never called")
            for letter, fit in fits.items():
                is_called = any(norm.called_on(x)[0] for x in projected[letter])
                if fit.recipe.kind == "none" and is_called:
                    idle.append(
                        f"{title} is called on {letter}, and its result is not used"
                    )
        for name in self.trace.unused.get(site.name, ()):
            # Norms are named above.
            if not any(
                f".{norm}." in f".{name}" for norm in self.trace.norms[site.name]
            ):
                idle.append(f"{name} has no effect: no output depends on it")
        repeats = self._repeats()
        if repeats > 1:
            idle.append(
                f"each key stands {repeats} times among the tokens: keys of grouped queries are repeated along the heads"
            )
        scale, is_biased = self._scale(pairs)
        unknown = []
        if any(math.isinf(fit.error) for fit in fits.values()):
            unknown.append("the rotation, because a norm is not known")
        elif (turns[0] is None) != (turns[1] is None):
            unknown.append("only one of q and k changes with position")
        if not scale:
            reason = "logits were not q·k times a constant, or no row sees two keys"
            unknown.append(f"the scale: {reason}")
        return dataclasses.replace(
            recipe,
            query=norms[0],
            key=norms[1],
            rotation=turns[0] or turns[1],
            scale=scale,
            sinks=self._sinks(),
            gate=gate_text(self.trace.gates.get(site.name)),
            bias=is_biased,
            idle=tuple(idle),
            unknown=tuple(unknown),
        )

    def _repeats(self) -> int:
        """How often each key stands in the sequence of keys, one after the other or all of them again; usually 1."""
        t, k = self.calls[0].query_shape[1], self.arrived["k"]
        repeats, remainder = divmod(k.shape[2], t)
        if repeats < 2 or remainder or t < 2:
            return 1
        in_a_row = k.unflatten(2, (t, repeats))
        for copies in (in_a_row, k.unflatten(2, (repeats, t)).transpose(2, 3)):
            if torch.equal(copies, copies[:, :, :, :1].expand_as(copies)):
                return repeats
        return 1

    def _projected(self, letter: Letter) -> list[Tensor]:
        """Returns what the projections output [b n t d], for each order of batch and tokens; empty if it was not
        seen."""
        batch, heads, tokens, _ = self.arrived[letter].shape
        # Adapters give a path its last weight twice.
        parts = {}
        for term in self.site.terms:
            last = (term.query if letter == "q" else term.key)[-1]
            parts[last.parameter, last.index.shape, int(last.index[0, 0])] = last
        outputs = [
            self.trace.outputs(weight_slice, batch, tokens)
            for weight_slice in parts.values()
        ]
        assembled = []
        for pieces in zip(*outputs):
            # One key for all heads, as the rotated part of MLA's, belongs to each of them.
            pieces = [
                x.expand(-1, heads if len(x[0]) == 1 else -1, -1, -1) for x in pieces
            ]
            if all(x.shape[1] == heads for x in pieces):
                assembled.append(torch.cat(pieces, -1))
        # Weights of one head count that the projections do not have, as after head mixing, are another recipe.
        return [x for x in assembled if x.shape == self.arrived[letter].shape]

    def _fit(self, letter: Letter, readings: list[Tensor]) -> NormFit:
        """Returns the norm that explains q or k of the first sample."""
        arrived = self.arrived[letter][0]
        reason = "the output of its projection was not seen as a product with the stored weight"
        fit = unknown_norm(arrived, reason)
        gains = self.site.query_gains if letter == "q" else self.site.key_gains
        scope, norms = (
            self.trace.scopes[self.site.name][0],
            self.trace.norms[self.site.name],
        )
        for projected in readings:
            of_heads = head_gains(gains, self.trace.model, scope, norms, projected)
            fit = fit_norm(
                projected[0], arrived, of_heads, self.tolerance, self.rounding
            )
            if not math.isinf(fit.error):
                break
        return fit

    def _scale(self, pairs: Tensor) -> tuple[tuple[float, ...], bool]:
        """Returns the factor on q·k of each head, empty if unknown, and whether something else is added."""
        call = self.calls[0]
        if isinstance(call, AttentionCall):
            factor = call.spec.scale.factor(torch.zeros(1), call.q.shape[-1], {})
            scale = (float(factor),) * self.site.n_heads
            bias = call.bias(slice(0, call.q.shape[2]), slice(0, call.k.shape[2]))
            if bias is None:
                return scale, False
            pairs, added = torch.broadcast_tensors(pairs, bias.detach().cpu())
            return scale, bool((added[pairs] != 0).any())
        # Two samples and the last queries say it all, and the scores of a long batch would not fit into memory.
        q, k = self.arrived["q"][:2, :, -_ROWS:], self.arrived["k"][:2]
        of_queries = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        if self.site.key_heads is not None:
            of_queries = k[:, [*self.site.key_heads]]
        products = q @ of_queries.mT
        unbiased = [
            call.logits if call.bias is None else call.logits - call.bias
            for call in self.calls
            if isinstance(call, ScoresCall)
        ]
        logits = torch.cat(
            [x.detach()[:2, :, -_ROWS:].double().cpu() for x in unbiased], 1
        )
        pairs = pairs[:2, :, -_ROWS:].expand(products.shape)
        scale = _slope(products, logits, pairs, max(1e-3, 30 * self.rounding))
        return scale, bool(scale) and any(call.is_biased for call in self.calls)

    def _sinks(self) -> str:
        """Describes columns of the softmax that are not keys."""
        call = self.calls[0]
        if not isinstance(call, ScoresCall) or call.sink is None:
            return ""
        return "1 sink logit per head in the softmax"


def _slope(
    products: Tensor, logits: Tensor, pairs: Tensor, tolerance: float
) -> tuple[float, ...]:
    """Fits s per head in logits = s · products for [b h t s], up to a constant of each row; empty if no s fits.

    A constant of a row (a bias of k, a subtracted maximum) is nothing that the softmax sees.
    """
    count = pairs.sum(-1, keepdim=True).clamp_min(1)
    centred = []
    for scores in (products, logits):
        visible = torch.where(pairs, scores, 0.0)
        visible = torch.where(pairs, visible - visible.sum(-1, keepdim=True) / count, 0)
        centred.append(visible.transpose(0, 1).flatten(1))
    x, y = centred
    # NaN where no row sees two keys.
    slope = (x * y).sum(1) / x.square().sum(1)
    error = (y - slope[:, None] * x).abs().amax(1)
    is_close = error <= tolerance * y.abs().amax(1)
    return tuple(slope.tolist()) if bool(is_close.all()) else ()
