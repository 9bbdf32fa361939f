"""Finds the sites of a model in one pass, which is the program's own or one that `sites_in_pass` makes.

When a module is about to make its first attention call, a copy of the smallest module around the call that holds the
projections runs, with a part of what that module was called with, and is read and verified (see `trace`). Nothing else
of the model runs for it, and what the copy and its objects store is the copy's.

`find_sites` returns the sites.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import nn

from qkeel import distributed as dist
from qkeel.capture.calls import HIDES, HeadLayout, ScoresCall, Seen
from qkeel.capture.example import (
    Caller,
    ModuleCall,
    copied,
    undisturbed,
)
from qkeel.capture.intercept import (
    CapturedCall,
    CaptureMode,
    name_of,
)
from qkeel.capture.known_sites import INDEX, KnownSites
from qkeel.capture.visible_pattern import VisiblePattern, told_apart, visible_pattern
from qkeel.errors import (
    InvalidValueError,
    NoAttentionError,
    QkeelError,
    RefusedError,
)
from qkeel.patching.forward import extra_pass
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import modules_of, parameters_in
from qkeel.patching.torch_state import uncompiled
from qkeel.sites.graph import names_of
from qkeel.sites.module_copy import (
    TOKENS,
    CannotRerunError,
    LoneCall,
    PartOfArguments,
    copy_of,
    parts_of_arguments,
    unnoticed,
)
from qkeel.sites.repeated_layers import KnownModule
from qkeel.sites.search_passes import check_devices, forward, whole_weights
from qkeel.sites.site import (
    AttentionSite,
    Sites,
    renamed,
    within,
)
from qkeel.sites.trace import (
    ModuleTrace,
    common_module,
    is_product,
    read_module,
)
from qkeel.sites.verify import Verification

_LOG = logging.getLogger(__name__)


@final
class SiteSearch:
    """Finds the sites of a model while it runs.

    Args:
        model: the model.
        may_wait: says whether all processes make this search, so that they may wait for each other in it.

    Attributes:
        sites: those that were found so far.
        failure: why a module around an attention call whose weights are unknown does not run alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> None:
        self.sites = Sites()
        self.failure: Exception | None = None
        wrapper = dist.hides_weights(model)
        if wrapper:
            self.failure = RefusedError(
                f"{wrapper} keeps its weights in flat pieces, which are whole only inside a forward"
            )
        # The error of the latest module that did not run.
        self._error: Exception | None = None
        self._model = model
        self._may_wait = may_wait
        # By id, the names of the model's modules and of its parameters.
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._held: list[nn.Parameter] = []
        self._verification = Verification()
        uses = collections.Counter(
            id(p) for _, p in model.named_parameters(remove_duplicate=False)
        )
        # Parameters of several layers.
        self._shared = {parameter for parameter, n in uses.items() if n > 1}
        # Modules whose attention is known wherever they are called, as it depends on their own weights alone.
        self._known: set[int] = set()
        # Modules by which others are known.
        self._known_modules: list[KnownModule] = []
        # Calls of other modules that were looked at, and whether they choose keys.
        self._known_calls: set[tuple[Caller | None, bool]] = set()
        # Set when the whole model has been tried.
        self._is_over = bool(wrapper)

    def at(self, frame: ModuleCall, *, chooses: bool) -> bool:
        """Finds the sites of a running module that is about to make an attention call, or has made scores of which keys
        are chosen (`chooses`). Returns whether more is known now; the module's call may have another name then."""
        is_known = self._is_over or (frame.caller, chooses) in self._known_calls
        is_known = is_known or (not chooses and id(frame.module) in self._known)
        # A call without tokens, as of an expert that received none, shows nothing.
        is_empty = bool(frame.inputs) and not frame.inputs[0].numel()
        if is_empty or is_known:
            return False
        self._known_calls.add((frame.caller, chooses))
        self._error = None
        latest: ModuleTrace | None = None
        if not chooses:
            latest = self._alike(frame)
        for around in frame.line() if latest is None else ():
            self._name_modules(around)
            has_weights = any(True for _ in around.module.parameters())
            trace = self._trace(around) if around.given and has_weights else None
            if trace is None:
                continue
            latest = trace
            # An indexer may stand beside the attention for which it chooses.
            if any(
                (site.terms or site.normed)
                and (chooses or trace.module_of(site) is frame.module)
                for site in trace.sites
            ):
                self._keep_known(around, trace)
                break
        if latest is None:
            self.failure = self.failure or self._error
            return False
        self._is_over = latest.is_whole
        self._add(latest, frame)
        return True

    def _name_modules(self, frame: ModuleCall) -> None:
        """Names what the model consists of, again if a forward has replaced modules, or has weights of its own while it
        runs, as one that fully_shard has split."""
        tree = modules_of(frame.module).values()
        is_named = all(id(x) in self._names for x in tree)
        if not is_named or any(
            id(p) not in self._parameters for p in parameters_in(tree)
        ):
            model = self._model
            self._names = {id(x): name for name, x in modules_of(model).items()}
            self._parameters = names_of(model)
            # Kept, so that no other parameter gets the same id.
            self._held = [*model.parameters()]

    def _keep_known(self, frame: ModuleCall, trace: ModuleTrace) -> None:
        """Keeps a module by which others that are alike are known: one that has been verified, and has one site and its
        weights for itself."""
        if len(trace.sites) != 1 or trace.sites.indexers or trace.sites.missed:
            return
        (site,) = trace.sites
        is_confirmed = self._verification.confirms(site.name)
        if not is_confirmed or site.callers or trace.is_whole:
            return
        if any(id(p) in self._shared for p in frame.module.parameters()):
            return
        name = self._names[id(frame.module)]
        try:
            self._known_modules.append(KnownModule(frame, name, trace))
        except Exception as failure:
            _LOG.debug("%s does not run with other weights: %s", name, failure)

    def _alike(self, frame: ModuleCall) -> ModuleTrace | None:
        """The trace of the module of a call, or of one around it, if it is like one that is known."""
        for around in frame.line() if self._known_modules else ():
            if around.given is None:
                continue
            self._name_modules(around)
            tree = modules_of(around.module).values()
            if any(id(p) in self._shared for p in parameters_in(tree)):
                continue
            for known in self._known_modules:
                trace = self._trace_alike(around, known)
                if trace is not None:
                    return trace
        return None

    def _trace_alike(self, frame: ModuleCall, known: KnownModule) -> ModuleTrace | None:
        """The trace of a module if it computes what a known one computes."""
        name = self._names[id(frame.module)]
        try:
            with unnoticed(waits=False):
                # Tensors of some layouts and dtypes can't be compared.
                return known.trace_of(frame, name)
        except Exception as failure:
            _LOG.debug("%s does not run like another: %s", name, failure)
            return None

    def tell(self) -> None:
        """Says once which sites are known from gradients alone."""
        self._verification.tell()

    def _trace(self, frame: ModuleCall) -> ModuleTrace | None:
        """The trace of a copy of a module that runs as it was called, with the smallest part of its arguments by which
        all its sites are verified."""
        trace = None
        for arguments in parts_of_arguments(frame):
            latest = self._run(frame, arguments)
            if latest is None:
                continue
            trace = latest
            # In attention between channels, the tokens are the features.
            is_of_tokens = arguments.tokens and any(
                site.head_dim == TOKENS for site in trace.sites
            )
            if not is_of_tokens and all(site.verified for site in trace.sites):
                break
        is_split = any(map(dist.is_split, frame.module.parameters()))
        is_apart = isinstance(self._error, CannotRerunError) and trace is None
        if is_apart and not is_split and self._may_wait():
            # As in context parallel, where attention gathers keys: all processes run their copies together.
            trace = self._run(frame, PartOfArguments(), waits=True)
        if trace is not None and frame.batch == 1 and not trace.has_plain_layouts:
            # With one sample, (h b) and (b h) look alike, and larger batches may follow.
            return self._run(frame, PartOfArguments(doubles=True)) or trace
        return trace

    def _run(
        self, frame: ModuleCall, arguments: PartOfArguments, *, waits: bool = False
    ) -> ModuleTrace | None:
        """The trace of a copy of a module with a part of what it was called with, which is verified; None if that fails."""
        module, name = frame.module, self._names[id(frame.module)]
        try:
            with unnoticed(waits=waits):
                given = arguments.given(frame)
                lone = LoneCall(name, copy_of(module, self._held), given)
            trace = read_module(frame, arguments, lone, waits=waits)
            trace.verify(self._verification, waits=waits)
            return trace
        except Exception as failure:
            _LOG.debug("%s does not run alone: %s", frame.name, failure)
            self._error = failure
            return None

    def _add(self, trace: ModuleTrace, frame: ModuleCall) -> None:
        """Adds the sites that a trace shows; `frame` is the call that is about to be read."""
        by_name = {site.name: site for site in self.sites}
        modules, parameters = self._names_in_model(trace)
        for part in trace.sites:
            module = trace.module_of(part)
            callers = tuple(
                (modules[name], modules.get(caller, caller), number)
                for name, caller, number in part.callers
            )
            called = self._names[id(module)]
            name = name_of(called, trace.calls[part.name][0].ordinal)
            site = renamed(part, lambda weight: parameters.get(weight, weight))
            weights = weights_of(site)
            held = parameters_in(modules_of(module).values())
            if weights <= {self._parameters[id(p)] for p in held}:
                self._known.add(id(module))
            elif name in by_name and weights != weights_of(by_name[name]):
                callers = callers or (frame.caller,) * (module is frame.module)
            else:
                callers = ()
            if callers:
                name = f"{common_module(sorted(weights))}#{called}"
            if name in by_name:
                continue
            if frame.caller in callers:
                frame.name = name
            self._known_calls.update((caller, False) for caller in callers)
            if callers:
                module = self._model.get_submodule(name.partition("#")[0])
            by_name[name] = dataclasses.replace(
                site, name=name, module=module, callers=callers
            )
        indexers = {
            modules[site.name.removesuffix(INDEX)] + INDEX: site
            for site in trace.sites.indexers
        }
        known_indexers = {site.name for site in self.sites.indexers}
        more = [
            dataclasses.replace(site, name=name, module=trace.original(site.module))
            for name, site in indexers.items()
            if name not in known_indexers
        ]
        self.sites = Sites(by_name.values(), (), [*self.sites.indexers, *more])

    def _names_in_model(
        self, trace: ModuleTrace
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The names in the model of the modules and of the weights of a part, by their names in the part. They differ
        where several parts share a module or a weight."""
        name, module = self._names[id(trace.module)], trace.module
        modules = {
            within(name, path): self._names[id(inner)]
            for path, inner in module.named_modules(remove_duplicate=False)
        }
        parameters = {
            within(name, path): self._parameters[id(p)]
            for path, p in module.named_parameters(remove_duplicate=False)
        }
        return modules, parameters


def weights_of(site: AttentionSite) -> set[str]:
    """The names of the weights from which the logits of a site are computed."""
    return {s.parameter for s in (*site.query, *site.key)}


# --- A pass that qkeel makes


def sites_in_pass(
    model: nn.Module, args: Args, kwargs: Kwargs, *, expected: bool = True
) -> Sites:
    """Returns the sites of a pass over an example, in the order of their calls.

    Args:
        model: the model.
        args, kwargs: the example.
        expected: whether a pass without attention is an error.

    Raises:
        NoAttentionError: no attention was observed although it was `expected`.
        InvalidValueError: the forward pass with this example fails.
    """
    model = uncompiled(model)
    check_devices(model, args, kwargs)
    with extra_pass(model), torch.inference_mode(False), undisturbed(model):
        search = SiteSearch(model)
        observed = _ObservedPass(model, search)
        observed.run(args, kwargs)
    search.tell()
    if not observed.order and expected:
        raise NoAttentionError(unseen(model, observed.watcher))
    return observed.sites()


def run_once(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    observer: AbstractContextManager[object] | None = None,
) -> None:
    """Makes a pass whose results are discarded, for the sake of what the model itself records in it, or an observer.

    Raises:
        InvalidValueError: the pass fails; its error is the cause of this one.
    """
    model = uncompiled(model)
    around = nullcontext() if observer is None else observer
    try:
        # fully_shard may keep weights whole after a pass, which are then no longer the model's own.
        with (
            whole_weights(model),
            extra_pass(model),
            torch.inference_mode(False),
            undisturbed(model),
        ):
            forward(model, around, copied(args), copied(kwargs), graph=False)
    except Exception as error:
        raise _failed(model, error) from error


def _failed(model: nn.Module, error: Exception) -> InvalidValueError:
    return InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {type(error).__name__}: {error}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    )


@final
class _ObservedPass:
    """One pass of a model without gradients, which is searched for sites.

    Attributes:
        order: the first call of each site, by name, in the order of the calls.
    """

    def __init__(self, model: nn.Module, search: SiteSearch) -> None:
        self._model, self._search = model, search
        self.watcher = CaptureMode(model, self._note, search=self._find)
        self.order: dict[str, AttentionSite] = {}
        self._visible: dict[str, VisiblePattern] = {}
        self._unclear: dict[str, str] = {}
        # The number of heads of each site, of which a module may compute each in a call of its own.
        self._heads: collections.Counter[str] = collections.Counter()
        # The first names of such calls, by the module's call, which is kept so that its id is not used again.
        self._groups: dict[int, tuple[str, ModuleCall]] = {}

    def run(self, args: Args, kwargs: Kwargs) -> None:
        """Runs the pass.

        Raises: InvalidValueError if it fails.
        """
        try:
            forward(
                self._model,
                self.watcher,
                copied(args),
                copied(kwargs),
                graph=False,
            )
        except dist.ApartError:
            raise
        except Exception as error:
            raise _failed(self._model, error) from error

    def _find(self, frame: ModuleCall, /, *, chooses: bool) -> KnownSites | None:
        is_more_known = self._search.at(frame, chooses=chooses)
        return KnownSites.of(self._search.sites) if is_more_known else None

    def _note(self, captured: CapturedCall) -> None:
        name = captured.name
        if captured.headless:
            name, _ = self._groups.setdefault(
                id(captured.frame), (name, captured.frame)
            )
        if name in self.order and not captured.headless:
            return
        self._heads[name] += captured.call.scores_shape[1]
        if name in self.order:
            return
        sites = {site.name: site for site in self._search.sites}
        site = sites.get(name) or unknown_site(
            name,
            captured.frame.module,
            captured.call,
            self._search.failure,
            captured.layout,
        )
        self.order[name] = site
        self._unclear[name] = _unclear_scores(captured.call)
        self._visible[name] = visible_pattern(captured.call, site.origin)

    def _other_heads(self, site: AttentionSite) -> str:
        """Says that some of the tokens have shown other heads than all of them, or "" if they haven't."""
        heads = self._heads[site.name]
        if not site.terms or heads == site.n_heads:
            return ""
        return f"the pass showed {heads} heads instead of {site.n_heads}"

    def sites(self) -> Sites:
        """The sites of the pass."""
        types = told_apart(self._visible)
        sites = [
            dataclasses.replace(
                site,
                visible=types.get(name, site.visible),
                unverified=site.unverified or self._other_heads(site),
                unclear_scores=self._unclear[name],
            )
            for name, site in self.order.items()
        ]
        return Sites(sites, self.watcher.missed, self._search.sites.indexers)


def unknown_site(
    name: str,
    module: nn.Module,
    call: Seen,
    failure: Exception | None,
    layout: HeadLayout | None = None,
) -> AttentionSite:
    """The site of a call whose module does not run alone, because of this failure."""
    heads = call.scores_shape[1]
    keys = None if isinstance(call, ScoresCall) else call.k.shape[1]
    why = "it was not seen when its module ran alone"
    if 0 in call.scores_shape:
        why = "it received no tokens in this example"
    elif failure is not None:
        reason = str(failure)
        if not isinstance(failure, QkeelError):
            reason = f"{type(failure).__name__}: {reason}"
        why = f"no module around it runs alone: {reason}"
    return AttentionSite(
        name=name,
        module=module,
        spec=call.spec,
        n_heads=heads,
        n_kv_heads=heads if keys is None else keys,
        head_dim=0 if isinstance(call, ScoresCall) else call.q.shape[-1],
        why=why,
        layout=layout,
        is_sum=isinstance(call, ScoresCall) and not is_product(call),
    )


def _unclear_scores(call: object) -> str:
    """Why the hidden pairs of a hand-written call can't be told from others by their scores, or "". Rows that see no
    key are left out, since padding may have added them."""
    if not isinstance(call, ScoresCall):
        return ""
    if call.sink is not None:
        return "a sink, or another column that is no key, is joined to its scores"
    is_low = call.capped <= HIDES
    hidden = torch.zeros_like(is_low)
    if call.mask is not None:
        hidden = hidden | ~call.mask
    if bool((hidden & ~is_low & ~hidden.all(-1, keepdim=True)).any()):
        return f"its mask hides keys by a number above {HIDES:.0f} (such as -100)"
    if bool((is_low & ~hidden & call.capped.isfinite()).any()):
        return f"a logit that no mask hides is below {HIDES:.0f} on this example"
    return ""


def unseen(model: nn.Module, watcher: CaptureMode) -> str:
    """The message for a pass without observed attention: what was looked for, why nothing was found, and what to do."""
    if watcher.missed:
        missed = "; ".join(map(str, dict.fromkeys(watcher.missed)))
        why = f"Seen but not understood: {missed}. {_BY_HAND}"
    elif watcher.handwritten.multiplied:
        ends = ", ".join(watcher.handwritten.ends)
        why = (
            "Activations are multiplied with each other, but none of the products reaches a softmax over keys, and only "
            "attention with one is watched, no linear attention and no state-space model"
        )
        why += f". They were followed to {ends}. {_BY_HAND}" if ends else ""
    else:
        hidden = "".join(f"{place}, " for place in watcher.hidden)
        why = (
            f"None of these was found: no two activations were multiplied. Inside {hidden}torch.jit.script and custom "
            f"C++, CUDA or Triton operators nothing can be seen. {_BY_HAND}"
        )
    return (
        f"saw no attention in a forward pass of this {type(model).__name__}. Looked for "
        "F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, varlen_attn, flash-attn's "
        "functions, and a product of two activations that reaches a softmax through scaling, masks, caps, casts and "
        f"views. {why}"
    )


_BY_HAND = (
    "If the logits are just scaled products of queries and keys, describe it by hand, as in\n"
    "    from qkeel.sites import Reading, describe\n"
    '    site = describe(model, "name.of.its.module", query=Reading(module="q_proj"), '
    'key=Reading(module="k_proj"), heads=8)'
)
