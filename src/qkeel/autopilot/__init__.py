"""AUTOPILOT: a training run monitors itself and limits the logits of the heads that need it."""

import sys
from types import ModuleType

from qkeel.autopilot.actuator import replay
from qkeel.autopilot.autopilot import Autopilot, attach, autopilot
from qkeel.autopilot.policy import (
    POLICIES,
    Action,
    Decision,
    DecisionEffect,
    Ladder,
    Policy,
    Records,
    Refused,
    SiteFacts,
    policy,
)

__all__ = [
    "POLICIES",
    "Action",
    "Autopilot",
    "Decision",
    "DecisionEffect",
    "Ladder",
    "Policy",
    "Records",
    "Refused",
    "SiteFacts",
    "attach",
    "policy",
    "replay",
]


class _Room(ModuleType):
    # The public name qkeel.autopilot is both this package and the function that starts an autopilot.
    __call__ = staticmethod(autopilot)


sys.modules[__name__].__class__ = _Room
