"""The one place where an autopilot changes a model: remedies on the heads of some sites, put on and taken off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot.policy import Action, Held
from qkeel.errors import QkeelError, RefusedError, caution
from qkeel.handle import Handle, State
from qkeel.heads.site import AttentionSite
from qkeel.remedies import apply, parse
from qkeel.remedies.lalr import LALR
from qkeel.remedies.qk_clip import QKClip
from qkeel.remedies.retrofit import Fitting, Retrofit, retrofit

Key = tuple[str, int]  # a remedy with its options, and the number of the optimizer that it acts on
Heads = dict[str, tuple[int, ...]]  # by site, () for all
BLEND = 5  # optimizer steps from the model without a norm to that with it
Refusals = list[tuple[Action, str | None, str]]

_COMPILED = {
    Action.CLIP: "qk_clip reads the logits of a compiled model by one more pass without gradients before each pass",
    Action.NORM: "a norm is put into a compiled model: its next passes compile again",
}


@final
class Actuator:
    """Keeps in force what it is asked for, by one handle for each remedy and optimizer.

    A change of the heads takes the old handle off and puts a new one on with what it remembered. Where that is refused
    what was in force is put back, so nothing is half applied.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], sites: Sequence[AttentionSite], example: object
    ) -> None:
        self.model, self.optimizers, self.example = model, list(optimizers), example
        self.handles: dict[Key, tuple[Handle, Heads]] = {}
        self.norm: tuple[str, Retrofit] | None = None
        self.compiled = False  # whether the model runs compiled code, as far as it has been seen
        self._said: set[Action] = set()
        self.know(sites)

    def know(self, sites: Sequence[AttentionSite]) -> None:
        """Takes the sites; after a resume without remedies they are found later, in the first measured pass."""
        self.sites = list(sites)
        self._home = {site.name: self._optimizer_of(site) for site in self.sites}

    def _optimizer_of(self, site: AttentionSite) -> int:
        """The number of the optimizer that holds the site's weights; the first where they are known by copies only."""
        names = {s.parameter for s in (*site.query, *site.key)}
        own = {id(p) for name, p in self.model.named_parameters() if name in names}
        held = ({id(p) for g in o.param_groups for p in g["params"]} for o in self.optimizers)
        return next((i for i, ids in enumerate(held) if ids & own), 0)

    def try_all(self) -> Refusals:
        """Returns what sites refuse, found out by applying it and taking it off again; that changes no bit."""
        found: Refusals = []
        verified = [site for site in self.sites if site.verified]
        for action, spec in ((Action.CLIP, "qk_clip"), (Action.RATES, "lalr")):
            for i in range(len(self.optimizers)):
                own = [site.name for site in verified if self._home[site.name] == i]
                if own and self._refusal((spec, i), dict.fromkeys(own, ())):
                    refusals = {name: self._refusal((spec, i), {name: ()}) for name in own}
                    found += [(action, name, why) for name, why in refusals.items() if why]
        if self.example is None:
            found.append((Action.NORM, None, "its gains are fitted on a batch: give example=batch to the autopilot"))
        return found

    def _refusal(self, key: Key, heads: Heads) -> str:
        """Returns why these heads refuse a remedy, "" if they do not; it is applied and taken off again."""
        try:
            self._applied(key, heads).remove()
        except QkeelError as error:
            return str(error)
        return ""

    def set(self, held: Held, optimizer: int) -> Refusals:
        """Brings into force what acts on this optimizer, and no more; returns what was refused."""
        norm = next((spec for (spec, _), (action, _) in held.items() if action is Action.NORM), "")
        if refused := self.set_norm(norm):
            return refused
        wanted: dict[Key, Heads] = {}
        actions: dict[Key, Action] = {}
        for (spec, site), (action, heads) in held.items():
            if action in (Action.CLIP, Action.RATES) and site is not None and self._home[site] == optimizer:
                wanted.setdefault((spec, optimizer), {})[site] = heads
                actions[spec, optimizer] = action
        for key in [key for key in self.handles if key[1] == optimizer and key not in wanted]:
            self.handles.pop(key)[0].remove()
        for key, heads in wanted.items():
            if key not in self.handles or self.handles[key][1] != heads:
                self._say(actions[key])
                refused += [(actions[key], site, why) for site, why in self._exchange(key, heads)]
        return refused

    def _exchange(self, key: Key, wanted: Heads) -> Iterator[tuple[str, str]]:
        """Puts a remedy on these heads in place of those it was on; yields the sites that refuse, and why."""
        old, before = self.handles.pop(key, (None, {}))
        state = {} if old is None else old.state()
        if old is not None:
            old.remove()
        try:
            self.put_on(key, wanted, state)
            return
        except QkeelError:  # which of the sites?
            kept = {site: heads for site, heads in before.items() if site in wanted}
        for site, heads in wanted.items():
            if why := self._refusal(key, {**kept, site: heads}):
                yield site, why
            else:
                kept[site] = heads
        if kept:
            self.put_on(key, kept, state)

    def put_on(self, key: Key, heads: Heads, state: State) -> None:
        """Applies a remedy to these heads; `state` is what it remembered of them, as far as it did.

        Raises: QkeelError if that is refused; nothing is changed then.
        """
        handle = self._applied(key, heads)
        fresh = handle.state()
        clip = self._parsed(key).name == QKClip.name  # what it remembers depends on the step, not on the heads
        handle.load(state if clip else {name: state.get(name, value) for name, value in fresh.items()})
        self.handles[key] = handle, dict(heads)

    def _parsed(self, key: Key) -> QKClip | LALR:
        (asked,) = parse(key[0])
        if not isinstance(asked, (QKClip, LALR)):
            raise RefusedError(f"expected qk_clip or lalr, which have an option heads, got {key[0]!r} from the policy")
        return asked

    def _applied(self, key: Key, heads: Heads) -> Handle:
        remedy = dataclasses.replace(self._parsed(key), heads=tuple(heads.items()))
        return apply(remedy, self.model, self.optimizers[key[1]], sites=self.sites, partial=True)

    def set_norm(self, spec: str) -> Refusals:
        """Puts a norm with fitted gains into the whole model in place of all else, once; "" for none.

        The gains join the first optimizer that takes them; its steps blend the norm in, so the loss does not jump.
        """
        if not spec or self.norm is not None:
            return []
        self._say(Action.NORM)
        before = [(key, heads, handle.state()) for key, (handle, heads) in self.handles.items()]
        self.remove()
        reason = ""
        try:
            for optimizer in self.optimizers:
                try:
                    norm = retrofit(self.model, spec, [self.example], optimizer, fitting=Fitting(anneal=BLEND))
                    self.norm = spec, norm
                    return []
                except QkeelError as error:
                    reason = reason or str(error)
        finally:
            for one in before if self.norm is None else ():
                self.put_on(*one)
        return [(Action.NORM, None, reason)]

    def _say(self, action: Action) -> None:
        if self.compiled and action in _COMPILED and action not in self._said:
            self._said.add(action)
            caution(_COMPILED[action])

    def remove(self, *, norm: bool = True) -> None:
        """Takes everything off, the last change first; with norm=False all but a norm, which is part of the model."""
        for key in reversed(list(self.handles)):
            self.handles.pop(key)[0].remove()
        if norm and self.norm is not None:
            self.norm[1].remove()
            self.norm = None

    def state(self) -> State:
        """Returns what the remedies in force remember, by their numbers in the order of `handles`, and the norm."""
        parts = {str(i): handle for i, (handle, _) in enumerate(self.handles.values())}
        parts |= {} if self.norm is None else {"norm": self.norm[1]}
        return {f"{i}.{name}": value for i, handle in parts.items() for name, value in handle.state().items()}
