"""The line of an alarm that applies to a model: which remedies its attention, its weights and its norms allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from qkeel.heads.site import APPLIED, AttentionSite, Sites
from qkeel.monitor.alarms.rule import HOLD, Rule
from qkeel.monitor.alarms.setup_rules import DECAY_GAINS, LOOK
from qkeel.nn.spec_module import SpecModule
from qkeel.sites.find import is_normed

LOOK_AT_SPEC = "print(qkeel.find_sites(model)[0].spec.explain())  # qkeel's own attention does what its spec says"
LOWER_RATE = 'for group in optimizer.param_groups: group["lr"] *= 0.1'


def fitted(rules: Sequence[Rule], model: nn.Module, sites: Sequence[AttentionSite]) -> tuple[Rule, ...]:
    """Returns the rules with lines that can be pasted for this model, in place of the general ones.

    >>> from qkeel.monitor.alarms.rules import Growth
    >>> fitted([Growth()], nn.Identity(), [])[0].remedy == HOLD
    True
    """
    lines = {HOLD: hold(model, sites), DECAY_GAINS: decay_gains(sites)}
    if sites and all(isinstance(site.module, SpecModule) for site in sites):
        lines[LOOK] = LOOK_AT_SPEC
    return tuple(dataclasses.replace(rule, remedy=_replaced(rule.remedy, lines)) for rule in rules)


def _replaced(text: str, lines: dict[str, str]) -> str:
    for general, own in lines.items():
        text = text.replace(general, own)
    return text


def hold(model: nn.Module, sites: Sequence[AttentionSite]) -> str:
    """Returns the line that holds the logits of a model whose attention is `sites`.

    Per-head rates and a clip where the weights of every head are known and no norm comes behind them; the clip alone
    where weights are in half precision, which round small steps away; the rates alone where weights are frozen, as
    below an adapter. Else a cap on the logits, where every site takes one. Else, and where remedies on the steps of
    these weights are in force already, a lower learning rate.
    """
    if any({"lalr", "qk_clip"} & set(vars(site.module).get(APPLIED, {})) for site in sites):
        return LOWER_RATE
    partial = ", partial=True" if isinstance(sites, Sites) and sites.missed else ""
    spec = _steps(model, sites) or ("softcap:cap=50" if all(map(_takes_a_cap, sites)) else "")
    return f'qkeel.apply("{spec}", model, optimizer{partial})' if spec else LOWER_RATE


def _steps(model: nn.Module, sites: Sequence[AttentionSite]) -> str:
    if not all(site.verified and not is_normed(site) and not site.reparametrised for site in sites):
        return ""
    weights = dict(model.named_parameters(remove_duplicate=False))
    if any("lora_magnitude_vector" in name for name in weights):  # DoRA computes its weights from others
        return ""
    own = [weights[s.parameter] for site in sites for s in (*site.query, *site.key) if s.parameter in weights]
    half = any(weight.dtype in (torch.bfloat16, torch.float16) for weight in own)
    frozen = any(not weight.requires_grad for weight in own)
    return "+".join([*["lalr:tau=0.1"][half:], *["qk_clip:threshold=100"][frozen:]])


def _takes_a_cap(site: AttentionSite) -> bool:
    free = site.spec.cap.kind == "none" and site.spec.normalizer.kind == "softmax"
    return free and site.description is None and not site.below


def decay_gains(sites: Sequence[AttentionSite]) -> str:
    """Returns the line that decays the gains of the norms on queries and keys, by their names in this model."""
    gains = (gain.parameter for site in sites for gain in (*site.query_gains, *site.key_gains))
    ends = tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in gains if name))
    return DECAY_GAINS.replace('"q_norm" in n or "k_norm" in n', f"n.endswith({ends!r})") if ends else DECAY_GAINS
