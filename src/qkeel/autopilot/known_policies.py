"""The table of policies."""

from __future__ import annotations

from qkeel.autopilot.ladder import Ladder
from qkeel.autopilot.policy import Policy
from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.registry import Term, build, lookup, parse

POLICIES: dict[str, type[Policy]] = {"ladder": Ladder}


def policy(named: str | Policy) -> Policy:
    """The policy that a spec string names, or the policy itself.

    Raises: UnknownNameError for a name or an option that there is not, InvalidTypeError for anything else.

    >>> policy("ladder:threshold=50").threshold
    50
    """
    if isinstance(named, Policy):
        return named
    if not isinstance(named, str):
        raise InvalidTypeError(f"expected the name of a policy or a Policy, got {type(named).__name__}")
    terms = parse(named)
    if len(terms) != 1:
        raise InvalidValueError(f"expected one policy, got {len(terms)} in {named!r}")
    (term,) = terms
    return build(f"policy {term.name!r}", lookup("policy", POLICIES, term.name), term.options)


def spelled(term: Term) -> str:
    """The one spelling of a policy with its options, checked.

    >>> spelled(parse("ladder:tau=0.10")[0])
    'ladder:tau=0.1'
    """
    policy(str(term))
    return str(term)
