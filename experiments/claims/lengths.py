"""Claims about texts longer than those of training; see claims.claim for what a row says.

Models learn 64 bytes and are tested on 512; columns are those of records.EXTRAPOLATION_COLUMNS.
"""

from __future__ import annotations

from experiments.claims.claim import SU, Cell, Claim, at_length
from experiments.claims.studies import METHODS
from qkeel.report.study.other_findings import ACCURACY

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
    text = f"{form}{'' if method == 'none' else ' under ' + method}: {gain:+.1f} points".replace("-", "−")
    return Claim(text, SU, "lengths", left, right, equal=abs(gain) < 1.0)


# Cells of the table of 32 rows that say how one row differs from another, by column.
PUBLISHED: dict[str, tuple[Claim, ...]] = {
    column: tuple(claim for row in ACCURACY if (claim := published(*row, column)))
    for column in (LONG, "accuracy_repeat")
}
