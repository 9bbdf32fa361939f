"""The table of policies."""

from __future__ import annotations

from qkeel.autopilot.ladder import Ladder
from qkeel.autopilot.policy import Policy
from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.options import build
from qkeel.registry import Term, lookup, parse

POLICIES: dict[str, type[Policy]] = {"ladder": Ladder}


def policy(named: str | Policy, *, parameters: bool = True) -> Policy:
    """The policy that a spec string names, or the policy itself; without `parameters` one that never adds any.

    Raises: UnknownNameError for a name or an option that there is not, InvalidTypeError for anything else,
        InvalidValueError for a ladder that may add parameters where it must not.

    >>> policy("ladder:threshold=50").threshold
    50.0
    """
    found = _built(named) if isinstance(named, str) else named
    if not isinstance(found, Policy):
        raise InvalidTypeError(f"expected the name of a policy or a Policy, got {type(named).__name__}")
    if not parameters and isinstance(found, Ladder) and found.allow_new_parameters:
        raise InvalidValueError(
            "expected a policy without allow_new_parameters here, whose checkpoints do not hold parameters that come "
            "while it trains; it is for a training loop of your own, with qkeel.autopilot(model, optimizer, "
            "example=batch)"
        )
    return found


def _built(named: str) -> Policy:
    terms = parse(named)
    if len(terms) != 1:
        raise InvalidValueError(f"expected one policy, got {len(terms)} in {named!r}")
    (term,) = terms
    return build(f"policy {term.name!r}", lookup("policy", POLICIES, term.name), term.options)


def spelled(term: Term) -> str:
    """The one spelling of a policy with its options, checked; not of one that may add parameters.

    >>> spelled(parse("ladder:tau=0.10")[0])
    'ladder:tau=0.1'
    """
    policy(str(term), parameters=False)
    return str(term)
