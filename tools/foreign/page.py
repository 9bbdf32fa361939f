"""docs/internals/foreign.md: what is asked of each target, and the table of answers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from tools.foreign.target import Target

_INTRODUCTION = """# Foreign packages

Attention of packages that know nothing of qkeel, built tiny with random weights by `python -m tools.foreign.census`,
which writes this
page. The reference imports nothing of qkeel: it takes the input of every softmax operator of a forward pass, with SDPA
sent through torch's unfused path, and computes with T×T logits in float64. Of each model is asked:

- *sites*: is every attention call of the reference one of a site, or said to be missed?
- *heads*, *statistics*: are `n_heads`, the largest logit and the entropy of each head those of the reference (1e-5)?
- *maps*: are the weights of `attention_maps` the softmax of what the reference saw, to 1e-6?
- *rows*: do the rows known for a head move its logits and no other's; and with all known rows at zero, is nothing left
  that depends on the input (rows known for nobody)?
- *watch*: are ten steps under `watch` bit for bit those without?
- *lalr*, *qk_clip*, *qk_norm*, *softcap*: by their effect. Known rows move by τ times the plain step and all others by
  the plain step; the variable part of the logits is min(1, τ / S_h) times what it was; logits no longer grow with the
  weights of queries or keys (tables of relative positions apart, which stay as biases do), and removal restores the
  model; outputs are those of a model whose visible scores are bent.

*right*: all answers are. *reported*: some were not given, and a reason was: a refusal, `site.why`, `site.unverified`,
or an entry of `.missed`. *wrong*: anything else, an exception that is not one of qkeel's included.

A refusal is right only where the reference shows by an experiment of its own that the remedy would have nothing to do:
of `lalr`, `qk_clip` and `qk_norm` where logits stay where they are when the verified weights of queries, or those of
keys, are three times as large (a norm stands between); of `softcap` where scores grow with the weights of queries at
first and stay where they are between 10⁵ and 10⁶ times those (a cap bends them). Every other refusal is *reported*.

Verdicts are counted twice. By target: all of a model is right, each remedy on the model as a whole. By attention: all
answers about this one are right; where a remedy is refused by the model as a whole it is tried on the attentions of
each module alone, since some may take it and others need not.

`python -m tools.foreign.generator` asks the same of attention at random: layouts × groups of keys × norms × products ×
biases × mixtures of heads × caps × masks × softmaxes, 2,000 cases from seeds, of which most have one or two parts that
are not plain; `python -m tools.foreign.census` runs it too. `python -m tools.foreign.idioms` draws attention in the
idioms of the
literature: ways of scoring × of normalising × of combining × orders of dimensions, attentions of a shape of their own,
and what looks alike (routers, gates, classifiers, losses, linear attention), which must not be called attention.
"""


def page(
    targets: list[Target],
    results: list[dict[str, Any]],
    generated: list[str] | None = None,
    in_idioms: Sequence[str] = (),
) -> str:
    """The page."""
    verdicts = [r.get("verdict", "broken") for r in results]
    each = attentions(targets, results)
    lines = [
        _INTRODUCTION,
        f"{len(targets)} targets of {len({t.package for t in targets})} packages: {shares(verdicts)}.",
    ]
    lines += [f"Their {len(each)} attentions: {shares(each)}.", ""]
    if generated is not None:
        lines += [f"{len(generated)} random attentions: {shares(generated)}.", ""]
    if in_idioms:
        lines += [
            f"{len(in_idioms)} attentions in other idioms, and what looks alike: {shares(in_idioms)}.",
            "",
        ]
    lines += [
        "| package | target | verdict | attentions right | what was said |",
        "|---|---|---|---|---|",
    ]
    for target, result in zip(targets, results):
        right = f"{result.get('attentions', []).count('right')} of {target.attentions}"
        cells = [
            _package(target),
            target.name,
            result.get("verdict", "broken"),
            right,
            _said(result),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def attentions(targets: list[Target], results: list[dict[str, Any]]) -> list[str]:
    """The verdict on every attention of every target."""
    return [
        v
        for t, r in zip(targets, results)
        for v in r.get("attentions", ["broken"] * t.attentions)
    ]


def shares(verdicts: Sequence[str]) -> str:
    """How many there are of each verdict, and how much of all: "9 right (90.0 %), 1 reported"."""
    count = [
        f"{verdicts.count(v)} {v}"
        for v in ("right", "reported", "wrong", "broken")
        if v in verdicts
    ]
    share = (
        f" ({100 * verdicts.count('right') / len(verdicts):.1f} %)"
        if "right" in verdicts
        else ""
    )
    return ", ".join([*(c + share if c.endswith("right") else c for c in count)])


def _package(target: Target) -> str:
    return f"{target.package} {importlib.metadata.version(target.package)}"


def _said(result: dict[str, Any]) -> str:
    """The first thing that was said or wrong to each question, questions with the same answer together."""
    if "broken" in result:
        return result["broken"][:160]
    found: dict[str, list[str]] = {}
    answered: set[str] = set()
    for f in result["found"]:
        if (
            f["verdict"] == result["verdict"] != "right"
            and f["question"] not in answered
        ):
            answered.add(f["question"])
            found.setdefault(_short(f["said"]), []).append(f["question"])
    return "; ".join(
        f"*{', '.join(questions)}*: {said}" for said, questions in found.items()
    )


def _short(said: str) -> str:
    said = " ".join(said.replace("`", "").split())
    _, colon, rest = said.partition(": ")
    said = rest if colon else said  # the place, which the row names
    return said if len(said) <= 110 else f"{said[:107].rstrip()}…"
