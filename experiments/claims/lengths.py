"""Claims about texts longer than those of training; see claims.claim for what a row says.

Models learn 64 bytes and are tested on 512; columns are those of records.EXTRAPOLATION_COLUMNS.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.claims.claim import SU, Cell, Claim, at_length
from experiments.claims.studies import METHODS

# Su 2023, kexue.fm 9859: form -> next-token accuracy in %: at 512 (training), and for each post-hoc method at 4096
# repeated and not repeated.
# The model has about 100M parameters and 24 GAU layers of one head, trained on 512 tokens. ReRoPE has window 128.
# cosa_logn as trained has 48.95 in the source's first table and 48.39 in the second.
_POSTHOC = ("none", "ntk", "yarn", "rerope")
_PUBLISHED: dict[str, tuple[float, Sequence[tuple[float, float]]]] = {
    "baseline": (
        49.41,
        ((24.17, 23.16), (60.57, 42.20), (80.10, 47.45), (76.11, 47.82)),
    ),
    "baseline_logn": (
        49.40,
        ((24.60, 24.02), (75.86, 47.06), (82.57, 46.52), (85.47, 48.87)),
    ),
    "qna": (49.55, ((22.45, 22.18), (52.28, 39.88), (82.53, 47.50), (78.22, 47.72))),
    "qna_logn": (
        49.42,
        ((19.55, 18.74), (57.44, 41.56), (80.08, 45.16), (84.71, 48.31)),
    ),
    "kna": (49.60, ((61.08, 47.69), (64.44, 43.02), (84.19, 47.44), (77.76, 47.73))),
    "kna_logn": (
        49.58,
        ((63.17, 46.40), (79.05, 47.43), (83.95, 47.16), (85.48, 48.78)),
    ),
    "cosa": (49.73, ((58.90, 46.98), (62.50, 42.77), (83.40, 47.80), (77.82, 47.80))),
    "cosa_logn": (
        49.67,
        ((64.74, 48.95), (78.97, 47.46), (82.28, 45.72), (85.67, 48.39)),
    ),
}
#: by form and post-hoc method: at the training length, at 4096 repeated, at 4096 not repeated
ACCURACY: dict[tuple[str, str], tuple[float, float, float]] = {
    (form, method): (trained, repeated, whole)
    for form, (trained, each) in _PUBLISHED.items()
    for method, (repeated, whole) in zip(_POSTHOC, each)
}

KEPT, LONG = "kept_nonrepeat", "accuracy_nonrepeat"
YARN, NTK, REROPE = METHODS["yarn"], METHODS["ntk"], METHODS["rerope"]


def kept(form: str, posthoc: str = "none") -> Cell:
    return at_length(form, posthoc, KEPT)


def unseen(form: str, posthoc: str = "none") -> Cell:
    """The share of visible pairs whose angle lies outside the range that the head met in training."""
    return at_length(form, posthoc, "cos_outside")


def unchanged(method: str) -> Claim:
    """A post-hoc method changes what the model does at the training length: accuracy there is lost."""
    names = {NTK: "NTK", YARN: "YaRN", REROPE: "ReRoPE"}
    return Claim(
        f"{names[method]} lowers the accuracy of a plain model at the training length",
        SU,
        "lengths",
        at_length("baseline", method, "accuracy_train"),
        at_length("baseline", method, "accuracy_train_posthoc"),
    )


LENGTHS: tuple[Claim, ...] = (
    Claim(
        "KeyNorm keeps more of its accuracy at 8 times the training length",
        SU,
        "lengths",
        kept("kna"),
        kept("baseline"),
    ),
    Claim(
        "… and CosA, norms on both sides",
        SU,
        "lengths",
        kept("cosa"),
        kept("baseline"),
    ),
    Claim(
        "A norm on queries alone does not help (keeps no more than the plain model)",
        SU,
        "lengths",
        kept("baseline"),
        kept("qna"),
    ),
    Claim(
        "KeyNorm is slightly better at the training length",
        SU,
        "lengths",
        at_length("kna", "none", "accuracy_train"),
        at_length("baseline", "none", "accuracy_train"),
    ),
    Claim(
        "… and so is a norm on queries",
        SU,
        "lengths",
        at_length("qna", "none", "accuracy_train"),
        at_length("baseline", "none", "accuracy_train"),
    ),
    Claim(
        "KeyNorm without positions (NoPE) does not extrapolate (keeps less than with RoPE)",
        SU,
        "lengths",
        kept("kna"),
        kept("kna+nope"),
    ),
    Claim(
        "Plain models fail because long texts bring more unseen angles than under KeyNorm (share of pairs)",
        SU,
        "lengths",
        unseen("baseline"),
        unseen("kna"),
    ),
    Claim(
        "NTK brings angles back into the range of training (share of pairs)",
        SU,
        "lengths",
        unseen("baseline"),
        unseen("baseline", NTK),
    ),
    Claim(
        "YaRN brings angles back into the range of training (share of pairs)",
        SU,
        "lengths",
        unseen("baseline"),
        unseen("baseline", YARN),
    ),
    Claim(
        "ReRoPE brings angles back into the range of training (share of pairs)",
        SU,
        "lengths",
        unseen("baseline"),
        unseen("baseline", REROPE),
    ),
    Claim(
        "ReRoPE extends a plain model to 8 times the training length without training (95 % kept)",
        SU,
        "lengths",
        kept("baseline", REROPE),
        0.95,
    ),
    unchanged(NTK),
    unchanged(YARN),
    unchanged(REROPE),
    Claim(
        "Trained further at 8 times the length, KeyNorm has at least 98 % of the accuracy of a plain model under PI",
        SU,
        "lengths",
        at_length("kna", "none@512", LONG),
        at_length("baseline", "pi@512", LONG, 0.98),
    ),
    Claim(
        "… and of one under ABF",
        SU,
        "lengths",
        at_length("kna", "none@512", LONG),
        at_length("baseline", "abf@512", LONG, 0.98),
    ),
    Claim(
        "Trained further at 8 times the length, a plain model needs PI",
        SU,
        "lengths",
        at_length("baseline", "pi@512", LONG),
        at_length("baseline", "none@512", LONG),
    ),
    Claim(
        "… or ABF",
        SU,
        "lengths",
        at_length("baseline", "abf@512", LONG),
        at_length("baseline", "none@512", LONG),
    ),
    Claim(
        "A learned gain lowers the accuracy that CosA keeps",
        SU,
        "lengths",
        kept("cosa"),
        kept("cosa:gain=true"),
    ),
    Claim(
        "Text that repeats is predicted better than text that does not, at 8 times the training length (KeyNorm)",
        SU,
        "lengths",
        at_length("kna", "none", "accuracy_repeat"),
        at_length("kna", "none", LONG),
    ),
)


def published(form: str, method: str, column: str) -> Claim | None:
    """The claim of a cell of the published table: what a form changes as trained against the plain one, or what a
    method changes of a form, in the direction published; that nothing changes, where less than a point is published.
    None for the plain form itself.
    """
    under = METHODS.get(method, "none")
    other = ("baseline", "none") if method == "none" else (form, "none")
    if other == (form, method):
        return None
    of = {"accuracy_repeat": 1, LONG: 2}[column]
    gain = ACCURACY[form, method][of] - ACCURACY[other][of]
    sides = at_length(form, under, column), at_length(*other, column)
    left, right = sides if gain > 0 else sides[::-1]
    text = f"{form}{'' if method == 'none' else ' under ' + method}: {gain:+.1f} points".replace(
        "-", "−"
    )
    return Claim(text, SU, "lengths", left, right, equal=abs(gain) < 1.0)


# Cells of the table of 32 rows that say how one row differs from another, by column.
PUBLISHED: dict[str, tuple[Claim, ...]] = {
    column: tuple(claim for row in ACCURACY if (claim := published(*row, column)))
    for column in (LONG, "accuracy_repeat")
}
