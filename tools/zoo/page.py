"""docs/internals/zoo.md: what counts as a pass, and the two tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import __version__

from tools.zoo.overrides import (
    CUT,
    NEEDS,
    NOTES,
    REASONS,
    UNRETURNED,
    WITHOUT_ATTENTION,
)
from tools.zoo.tables import NOT_TAKEN

IMPLEMENTATIONS = ("eager", "sdpa")
Part = dict[
    str, tuple[str, dict[str, dict[str, Any]]]
]  # model type -> class, result per implementation


def passed(result: dict[str, Any]) -> bool:
    """Whether all layers were found, with the entropies of the weights given away.

    A layer may make two calls (differential attention) and a module may run several times (shared, recurrent).
    """
    if "layers" not in result or not result["error"] < 1e-4:
        return False
    return 0 < result["layers"] in (result["sites"], result["modules"], result["calls"])


def verdict(model_type: str, result: dict[str, Any]) -> str:
    """ok, FAIL, or why it does not count."""
    reason = result.get("reason", "")
    if model_type in WITHOUT_ATTENTION:
        return (
            "no attention"
            if "saw no attention" in reason or _no_sdpa(result)
            else "FAIL"
        )
    if model_type in NEEDS and "Error" in reason:
        return f"needs {NEEDS[model_type]}"
    if _no_sdpa(result):
        return "no sdpa"
    return "ok" if passed(result) else "FAIL"


def _no_sdpa(result: dict[str, Any]) -> bool:
    return "does not support an attention implementation through" in result.get(
        "reason", ""
    )


def summary(part: Part) -> list[str]:
    """One line per implementation: how many pass."""
    lines = []
    for i in IMPLEMENTATIONS:
        count = Counter(verdict(n, r[i]) for n, (_, r) in part.items())
        good, all_ = count["ok"], count["ok"] + count["FAIL"]
        others = ", ".join(
            f"{n} {what}"
            for what, n in sorted(count.items())
            if what not in ("ok", "FAIL")
        )
        lines.append(
            f"- {i}: {good} of {all_} pass ({100 * good / max(1, all_):.1f} %); not counted: {others or 'none'}"
        )
    return lines


def page(parts: dict[str, Part]) -> str:
    """The page."""
    lines = ["# The zoo", "", *_INTRODUCTION.splitlines(), ""]
    for table, part in parts.items():
        lines += [
            f"## {_TITLES[table][0]}",
            "",
            *_TITLES[table][1].splitlines(),
            "",
            *summary(part),
            "",
        ]
        if table == "others":
            lines += [
                "Not taken on:",
                "",
                *(f"- {why}: {', '.join(names)}" for why, names in NOT_TAKEN.items()),
                "",
            ]
        head = (
            "model type",
            "class",
            "layers",
            "sites",
            "weights known",
            "error, eager",
            "error, sdpa",
            "remark",
        )
        lines += [_line(head), "|" + "---|" * len(head)]
        lines += [_row(name, *found) for name, found in part.items()] + [""]
    return "\n".join(lines[:-1]) + "\n"


_INTRODUCTION = f"""Architectures of transformers {__version__}, built tiny from their configuration classes with random
weights and run on one example batch by `python -m tools.zoo.census`, which writes this page.

- *layers*: attentions that exist. Their weights are what the model returns with `output_attentions=True`, what its
  attention modules hand to the layer around them, and what `F.multi_head_attention_forward` returns per head. Where
  nobody gives them away, they are counted from the configuration (the remark says so), and the results of torch's
  softmax kernels replace them.
- *sites*: what `find_sites` found. *weights known*: sites whose heads' rows in the weights are known, and that they
  and no others make the logits of these heads was found out by the experiment of `find_sites`.
- *error*: largest distance, over layers and heads, of the mean entropy seen to that of the weights; heads are
  averaged where the weights do not say which dimension they are. The reference is always the eager model. A row of
  weights that are all exactly alike may see no key, or keys that are the same; the mean with or without such rows
  counts, whichever is nearer.
- A pass needs all layers, none more, and an error under 1e-4. A module that runs several times counts once, or by
  its calls. *no sdpa*: transformers has no sdpa for the class. *no attention*: there is no softmax of queries times
  keys, and nothing may be found."""

_TITLES = {
    "causal": ("Causal language models", "Every class of the causal-LM mapping."),
    "others": (
        "Encoders, encoder–decoders, vision, sound, several modalities",
        """The classes of the mappings masked LM, sequence to sequence, speech to text, CTC, audio, image and video
classification, object detection (zero-shot too), segmentation, mask generation, depth, zero-shot image
classification, visual and textual question answering, image and text to text: of each model type its first class
that is not in the table above. What is not taken on is listed with the reason.""",
    ),
}


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(name: str, class_name: str, result: dict[str, dict[str, Any]]) -> str:
    got = next((r for r in result.values() if "layers" in r), {})
    cells = [
        name,
        class_name,
        *(str(got.get(key, "")) for key in ("layers", "sites", "told")),
    ]
    remarks: list[str] = []
    for i in IMPLEMENTATIONS:
        found = verdict(name, result[i])
        error = result[i].get("error")
        cells.append(f"{error:.1e}" if error is not None and found == "ok" else found)
        if found == "FAIL":
            remarks.append(f"{i}: {result[i].get('reason', f'error {error}')}"[:160])
    if remarks:
        remarks = [REASONS[name]] if name in REASONS else remarks
    elif got:
        remarks = _notes(class_name, got)
    return _line((*cells, "; ".join(remarks).replace("|", "/")))


def shortened(text: str, limit: int = 160) -> str:
    """The text up to the last whole word within the limit."""
    return text if len(text) <= limit else f"{text[:limit].rsplit(' ', 1)[0]} …"


def _notes(class_name: str, got: dict[str, Any]) -> list[str]:
    notes = [table[class_name] for table in (CUT, NOTES) if class_name in table]
    if got["unreturned"]:
        notes.append(f"{got['unreturned']} not given away: {UNRETURNED[class_name][1]}")
    if got["why"]:
        notes.append(
            f"{got['sites'] - got['told']} without weights: {shortened(got['why'])}"
        )
    if got["empty"]:
        notes.append(f"{got['empty']} with entropies of zero here")
    return notes
