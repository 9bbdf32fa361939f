"""The literal tables of claims, by the heading that they have on the page."""

from __future__ import annotations

from claims.claim import Claim
from claims.lengths import LENGTHS, PUBLISHED
from claims.modalities import MODALITIES
from claims.training import TRAINING

SECTIONS: dict[str, tuple[Claim, ...]] = {
    "Stability and remedies": TRAINING,
    "Images, number formats, translation": MODALITIES,
    "Longer texts": LENGTHS,
}
CLAIMS = tuple(claim for section in SECTIONS.values() for claim in section)
EVERY = (*CLAIMS, *PUBLISHED["accuracy_nonrepeat"], *PUBLISHED["accuracy_repeat"])  # what stands on the page
