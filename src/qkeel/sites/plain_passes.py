"""Forward passes of which nothing is kept: the heads, modules and logits that they show."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, nullcontext

import torch
from torch import nn

from qkeel.patching.forward_passes import extra_pass
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.kept_state import copied, undisturbed
from qkeel.sites.missed import Sites
from qkeel.sites.probe import forward, is_product, scored
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.see.running_modules import Frame


def heads_seen(model: nn.Module, args: Args, kwargs: Kwargs, sites: Sites) -> dict[str, int] | None:
    """The number of heads of each site that a pass without a graph shows, of which nothing is kept. None if it
    misses something else than these sites did."""
    found: dict[str, int] = {}
    names: set[str] = set()
    groups: dict[int, tuple[str, Frame]] = {}  # the frame is kept so that no other gets its number

    def note(sighting: Sighting) -> None:
        name = sighting.name
        if name in names:
            return
        names.add(name)
        if sighting.headless:
            name, _ = groups.setdefault(id(sighting.frame), (name, sighting.frame))
        found[name] = found.get(name, 0) + scored(sighting).shape[1]

    layouts = {site.name: site.layout for site in sites if site.layout is not None}
    watcher = Interceptor(model, note, dispatch=True, layouts=layouts)
    with extra_pass(model), undisturbed(model):
        forward(model, watcher, copied(args), copied(kwargs), graph=False)
    same = {str(m) for m in watcher.missed} == {str(m) for m in sites.missed}
    return found if same else None


def modules_called(model: nn.Module, modules: Iterable[nn.Module], args: Args, kwargs: Kwargs) -> set[int]:
    """The ids of those of these modules that run in a forward pass on this example."""
    called: set[int] = set()
    with ExitStack() as hooks, extra_pass(model), undisturbed(model):
        for module in modules:
            hook = module.register_forward_pre_hook(lambda module, _: called.add(id(module)))
            hooks.callback(hook.remove)
        forward(model, nullcontext(), copied(args), copied(kwargs), graph=False)
    return called


def biased(model: nn.Module, args: Args, kwargs: Kwargs) -> set[str]:
    """Names of sites written out by hand whose logits are something else than a scale times q·k: with a bias, say."""
    found: set[str] = set()

    def note(sighting: Sighting) -> None:
        call = sighting.call
        if isinstance(call, ScoresCall) and not is_product(call):
            found.add(sighting.name)

    with extra_pass(model), undisturbed(model):
        forward(model, Interceptor(model, note, probing=True), copied(args), copied(kwargs))
    return found


def visible_minima(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, float]:
    """The smallest finite logit that no mask hides, of every site written out by hand, by name."""
    found: dict[str, float] = {}

    def note(sighting: Sighting) -> None:
        call = sighting.call
        if isinstance(call, ScoresCall):
            seen = torch.isfinite(call.logits) if call.hidden is None else ~call.hidden & torch.isfinite(call.logits)
            least = float(call.logits.detach().masked_fill(~seen, torch.inf).amin())
            found[sighting.name] = min(found.get(sighting.name, least), least)

    with extra_pass(model), undisturbed(model):
        forward(model, Interceptor(model, note, probing=True), copied(args), copied(kwargs))
    return found
