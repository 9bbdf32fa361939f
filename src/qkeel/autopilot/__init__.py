"""AUTOPILOT: a run that watches itself and holds the logits of the heads that need it."""

import sys
from types import ModuleType

from qkeel.autopilot.autopilot import Autopilot
from qkeel.autopilot.begin import attach, autopilot
from qkeel.autopilot.deliberation import replay
from qkeel.autopilot.known_policies import POLICIES, policy
from qkeel.autopilot.ladder import Ladder
from qkeel.autopilot.policy import Action, Decision, Effect, Policy, Records, Refused, SiteFacts

__all__ = [
    "POLICIES",
    "Action",
    "Autopilot",
    "Decision",
    "Effect",
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
    # The public name qkeel.autopilot is both this room and the function that begins one.
    __call__ = staticmethod(autopilot)


sys.modules[__name__].__class__ = _Room
