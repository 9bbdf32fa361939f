"""The literal tables of claims, by the heading that they have on the page."""

from __future__ import annotations

from experiments.claims.claim import Claim
from experiments.claims.lengths import LENGTHS, PUBLISHED
from experiments.claims.modalities import MODALITIES
from experiments.claims.training import TRAINING

SECTIONS: dict[str, tuple[Claim, ...]] = {
    "Stability and remedies": TRAINING,
    "Images, number formats, translation": MODALITIES,
    "Longer texts": LENGTHS,
}
CLAIMS = tuple(claim for section in SECTIONS.values() for claim in section)
EVERY = (
    *CLAIMS,
    *PUBLISHED["accuracy_nonrepeat"],
    *PUBLISHED["accuracy_repeat"],
)  # what stands on the page
