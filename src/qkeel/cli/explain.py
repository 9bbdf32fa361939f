"""The formula and the source of a preset or a remedy, as `qkeel explain` prints them."""

from __future__ import annotations

import torch

from qkeel.errors import unknown
from qkeel.lab.config import ModelConfig
from qkeel.lab.model.build_model import build_decoder
from qkeel.lab.model.run_remedies import rules
from qkeel.registry import parse
from qkeel.remedies import ALIASES, REMEDIES, apply, canonical, note
from qkeel.remedies import parse as remedies_of
from qkeel.remedies.apply import remedies
from qkeel.sites import find_sites
from qkeel.spec import PRESETS, presets
from qkeel.spec.presets import attention_spec

_LENGTH = 512  # tokens; for the remedies whose starting scale depends on the training length


def made() -> dict[str, dict[str, str]]:
    """Returns what cli/answers.json holds."""
    names = {**presets(), **remedies()}
    return {"presets": presets(), "remedies": remedies(), "explained": {name: explain(name) for name in names}}


def explain(text: str) -> str:
    """Returns the line, the source and the formula of a preset, or of remedies on the baseline.

    A remedy of steps, the loss or a block has a rule; attention's formula is printed where one of them changes it.
    """
    terms = parse(text)
    names = [term.name for term in terms]
    if len(names) == 1 and names[0] in PRESETS:
        row = PRESETS[names[0]]
        given = text.partition(":")[2]
        line = f"{names[0]} with {given}; as published: {row.line}" if given else row.line
        return f"{text}: {line}\nsource: {row.source}\n\n{attention_spec(text).explain()}"
    for name in names:
        if name not in REMEDIES and name not in ALIASES:
            raise unknown("preset or remedy", name, {*PRESETS, *REMEDIES, *ALIASES})
    about, found = note(text), rules(text)
    if len(found) < len(remedies_of(text)):
        found.append(_formula(text))
    elif found:
        found.append("what attention computes stays the model's own")
    return "\n".join([f"{canonical(text)}: {about.line}", f"source: {about.source}", "", *found])


def _formula(text: str) -> str:
    decoder = build_decoder(ModelConfig(d_model=8, n_layers=1, n_heads=2), vocab_size=2)
    apply(text, decoder, torch.optim.AdamW(decoder.parameters()), train_length=_LENGTH)
    return find_sites(decoder)[0].spec.explain()
