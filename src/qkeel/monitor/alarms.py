"""The alarms of a run: rules that depend on its setting, the advice that an alarm gives, and the evaluation of rules
record by record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import nn

from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.monitor.finite_stages import Facts
from qkeel.monitor.history import History, Recording
from qkeel.monitor.rules import (
    DEFAULT,
    HOLD,
    LOWER_RATE,
    Alarm,
    NonFinite,
    Rule,
    Saturation,
    Severity,
    measured,
    peak,
    trend,
)
from qkeel.monitor.thresholds import ROUNDING
from qkeel.patching.forward import first_adapter
from qkeel.sites.site import APPLIED, AttentionSite, Sites, is_normed

# The rule that depends on the setting: the number format and the head width.

KEEP_FLOAT32 = f"{HOLD}  # or q, k and logits in float32"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolution(Rule):
    """The rounding error of a logit reaches `tolerance` (nats, standard deviation), so that the ranking of keys is
    noise.

    kernel: "fused" uses the error from rounding q and k (see metrics.fused_logit_error); "eager" uses the error of
    stored scores (see metrics.stored_logit_error; it is up to √2 larger if the code rounds both the product and the
    scaled product). Both errors are computed from per-head records. scale: the factor applied to q·k, for the same q
    and k whose norms are recorded as query_norm and key_norm; 1/√head_dim if not given. Eager attention needs no scale,
    because the largest logits are recorded after scaling.

    >>> Resolution(dtype="bf16", kernel="fused", head_dim=64).tolerance
    0.25
    """

    dtype: Literal["bf16", "fp16"]  #: number format of q and k, or of the scores
    kernel: Literal["fused", "eager"]  #: "eager" writes scores to memory
    head_dim: int  #: d, the size of one head's query
    scale: float | None = None
    tolerance: float = ROUNDING
    severity: Severity = Severity.ALARM
    source: str = "derived, checked against rounding by torch in tests/monitor; the tolerance is a choice"
    remedy: str = KEEP_FLOAT32
    cause: str = "rounding is as large as the differences between logits"

    @property
    def name(self) -> str:
        """The name of the rule, which includes the kernel and the dtype."""
        return f"resolution {self.dtype} {self.kernel}"

    def check(self, history: History) -> Alarm | None:
        if self.kernel == "eager":
            name, stored = "max_abs_logit", "scores stored in"
            if np.isnan(measured(history, name)[-1]).all():
                name = "max_logit"
            series = measured(history, name)
        else:
            name, stored = "query_norm", "q and k rounded to"
            series = measured(history, name) * measured(history, "key_norm")
        if np.isnan(series[-1]).all():
            return None
        at = peak(name, series[-1])
        course = at.of(series)
        value = float(course[-1])
        if self.kernel == "eager":
            error = stored_logit_error(value, self.dtype)
        else:
            error = fused_logit_error(value, 1.0, self.head_dim, self.dtype, self.scale)
        if not error > self.tolerance:
            return None
        meaning = f"{stored} {self.dtype} move a logit by {error:.2g} nats (standard deviation), over {self.tolerance:g}"
        return self.alarm(history, meaning, error, at=at, trend=trend(history, course))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The facts about a run that its records do not contain; None means unknown.

    dtype: the dtype of q, k and the scores. kernel: "fused" if the scores are not written to memory. head_dim, scale:
    as in Resolution.

    >>> Setting(dtype="bf16", kernel="fused", head_dim=64).scale is None
    True
    """

    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    kernel: Literal["fused", "eager"] | None = None
    head_dim: int | None = None
    scale: float | None = None


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """Returns the default rules, and the rules for which `setting` provides the required facts.

    >>> [rule.name for rule in rules_for(Setting(dtype="bf16", kernel="eager", head_dim=64))][-2:]
    ['saturation', 'resolution bf16 eager']
    """
    dtype, kernel, width = setting.dtype, setting.kernel, setting.head_dim
    facts = Facts(dtype=dtype or "")
    rules = [
        dataclasses.replace(rule, facts=facts) if isinstance(rule, NonFinite) else rule
        for rule in DEFAULT
    ]
    # A rule whose field is not recorded raises no alarm.
    rules.append(Saturation())
    if width is not None and kernel is not None and dtype in ("bf16", "fp16"):
        rules.append(
            Resolution(dtype=dtype, kernel=kernel, head_dim=width, scale=setting.scale)
        )
    return tuple(rules)


# The line of code that an alarm recommends for a model: which remedies its attention, weights and norms allow.


def fitted(
    rules: Sequence[Rule],
    model: nn.Module,
    sites: Sequence[AttentionSite],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> tuple[Rule, ...]:
    """Returns the rules with the names of this model's weights, and lines of code that can be pasted for it in place of
    the general lines.

    >>> from qkeel.monitor.rules import Growth
    >>> fitted([Growth()], nn.Identity(), [])[0].remedy == HOLD
    True
    """
    names = "optimizers" if len(optimizers) > 1 else "optimizer"
    held = hold(model, sites).replace(", optimizer", f", {names}")
    weights = {}
    for site in sites:
        sides = (site.query, site.key)
        if all(sides):
            query, key = ([x.parameter for x in slices] for slices in sides)
            weights[site.name] = query, key
    suited = []
    for rule in rules:
        if isinstance(rule, NonFinite):
            facts = dataclasses.replace(rule.facts, weights=weights)
            rule = dataclasses.replace(rule, facts=facts)
        remedy = rule.remedy.replace(HOLD, held)
        suited.append(dataclasses.replace(rule, remedy=remedy))
    return tuple(suited)


def hold(model: nn.Module, sites: Sequence[AttentionSite]) -> str:
    """Returns the line that limits the logits of a model whose attention is `sites`.

    If the weights of every head are known and no norm follows them, the line applies a clip with matched steps, which
    was the best remedy on steps in the drawn tests (experiments/notes/autopilot-drawn-2.md). Where a logit is a sum of
    products, as in latent attention, per-head rates with a clip were better. If weights are in half precision, the
    line applies a
    clip alone, because small steps would be rounded away, and if weights are frozen, as they are below an adapter,
    per-head rates alone. Otherwise it caps the logits, if every site accepts a cap. If that is not possible either, or
    if remedies for the steps of these weights are already active, it lowers the learning rate.
    """
    for site in sites:
        active = vars(site.module).get(APPLIED, {})
        for name in ("lalr", "qk_clip"):
            if name in active:
                return f"{LOWER_RATE}  # {active[name]} is active"
    spec = _step_remedy(model, sites)
    takes_a_cap = all(
        site.spec.cap.kind == "none"
        and site.spec.normalizer.kind == "softmax"
        and site.description is None
        for site in sites
    )
    # A cap would change the base below adapters.
    if not spec and (not takes_a_cap or first_adapter(model) is not None):
        return LOWER_RATE
    partial = ", partial=True" if isinstance(sites, Sites) and sites.missed else ""
    return f'qkeel.apply(model, "{spec or "softcap:cap=50"}", optimizer{partial})'


def _step_remedy(model: nn.Module, sites: Sequence[AttentionSite]) -> str:
    """Returns the spec of the remedy on steps; "" if a weight is not known, normed or computed from others."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = []
    for site in sites:
        if not site.verified or is_normed(site) or site.reparametrised:
            return ""
        names = [part.parameter for part in (*site.query, *site.key)]
        weights += [parameters[name] for name in names if name in parameters]
    if any("lora_magnitude_vector" in name for name in parameters):
        # DoRA computes its weights from others.
        return ""
    half = any(
        weight.dtype in (torch.bfloat16, torch.float16)
        for weight in weights
        if weight.requires_grad
    )
    frozen = any(not weight.requires_grad for weight in weights)
    if half or frozen or any(len(site.terms) > 1 for site in sites):
        names = []
        # Small steps would be rounded away in half precision.
        if not half:
            names.append("lalr:tau=0.1")
        # A clip changes weights, and frozen ones are to stay.
        if not frozen:
            names.append("qk_clip:threshold=100")
        return "+".join(names)
    return "qk_clip:threshold=15,steps=matched"


def logit_limits(sites: Sequence[AttentionSite]) -> dict[str, str]:
    """Returns the clip or cap that holds the logits of each site now, in words by the site's name."""
    limits = {}
    for site in sites:
        cap = site.spec.cap.limit
        if cap is not None:
            limits[site.name] = f"a cap of {cap:g}"
        for remedy in vars(site.module).get(APPLIED, {}).values():
            if remedy.limit is not None:
                limits[site.name] = str(remedy)
    return limits


# The alarms that the records of a run have raised.


@final
class AlarmLog:
    """The alarms that `rules` have raised. Each rule raises one, and a forecast that was taken back another one if it is
    made again of a number at least twice as large: a run may calm down and grow again.

    >>> AlarmLog([]).alarms
    []
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT) -> None:
        self.rules = tuple(rules)
        # Each step asks for the names, which are put together from words and thresholds.
        self._named = [(rule.name, rule) for rule in self.rules]
        self.alarms: list[Alarm] = []
        # Rules whose notice or forecast no longer holds.
        self._over: set[str] = set()

    def update(
        self,
        history: History,
        effect: Callable[[Alarm, History], str] = lambda *_: "",
    ) -> list[Alarm]:
        """Returns the alarms that the last record raises, the most severe first. `effect` says what the line of an alarm
        would do."""
        raised = {alarm.rule: alarm for alarm in self.alarms}
        alarms = []
        for name, rule in self._named if len(history) else ():
            earlier = raised.get(name)
            may_return = rule.forecasts and name in self._over
            if earlier is not None and not may_return:
                continue
            alarm = rule.check(history)
            # Twice as large, so that a forecast at the edge does not come and go.
            if alarm is None or (earlier and alarm.value < 2 * earlier.value):
                continue
            self._over.discard(name)
            effect_of_line = effect(alarm, history)
            alarms.append(dataclasses.replace(alarm, effect=effect_of_line))
        alarms.sort(key=lambda alarm: -list(Severity).index(alarm.severity))
        self.alarms += alarms
        return alarms

    def over(self, history: History) -> list[Alarm]:
        """Returns the notices and forecasts that hold no longer with the last record, each once: a page that is read
        afterwards must not say of a few early steps what was true of them alone."""
        rules, over = dict(self._named), []
        latest = {alarm.rule: alarm for alarm in self.alarms}
        # A forecast of what has happened came true.
        happened = {
            alarm.cause
            for name, alarm in latest.items()
            if alarm.severity is not Severity.NOTICE
            and name in rules
            and not rules[name].forecasts
        }
        for alarm in latest.values():
            rule = rules.get(alarm.rule)
            if rule is None or alarm.rule in self._over:
                continue
            may_end = alarm.severity is Severity.NOTICE or (
                rule.forecasts and alarm.cause not in happened
            )
            if may_end and rule.check(history) is None:
                self._over.add(alarm.rule)
                over.append(alarm)
        return over


def replay(history: History, rules: Sequence[Rule] = DEFAULT) -> list[Alarm]:
    """Every alarm of a run, in the order in which the run would have raised them.

    >>> import numpy as np
    >>> [alarm.rule for alarm in replay(History(steps=np.arange(2), values={"train_loss": np.ones(2)}, heads={}))]
    []
    """
    log, recording = AlarmLog(rules), Recording(history.layers, planned=history.planned)
    for n, step in enumerate(history.steps):
        values = {name: column[n] for name, column in history.values.items()}
        values["step"] = step
        if history.rates is not None:
            values["lr"] = history.rates[n]
        recording.append(values, {name: x[n] for name, x in history.heads.items()})
        log.update(
            dataclasses.replace(
                recording.history, types=history.types, limits=history.limits
            )
        )
    return log.alarms
