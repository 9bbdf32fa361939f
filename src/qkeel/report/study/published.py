"""The published table of length extrapolation, shown next to what is measured; nothing is ever fitted to it."""

from __future__ import annotations

# (form, post-hoc method) -> next-token accuracy in %: at 512 (training), at 4096 repeated, at 4096 not repeated.
# About 100M parameters, 24 GAU layers of one head, trained on 512 tokens. ReRoPE: window 128.
# cosa_logn as it is: 48.95 in the source's first table, 48.39 in its second.
SOURCE = "Su 2023, kexue.fm 9859"
TRAIN_LENGTH, TEST_LENGTH = 512, 4096
ACCURACY: dict[tuple[str, str], tuple[float, float, float]] = {
    ("baseline", "none"): (49.41, 24.17, 23.16),
    ("baseline", "ntk"): (49.41, 60.57, 42.20),
    ("baseline", "yarn"): (49.41, 80.10, 47.45),
    ("baseline", "rerope"): (49.41, 76.11, 47.82),
    ("baseline_logn", "none"): (49.40, 24.60, 24.02),
    ("baseline_logn", "ntk"): (49.40, 75.86, 47.06),
    ("baseline_logn", "yarn"): (49.40, 82.57, 46.52),
    ("baseline_logn", "rerope"): (49.40, 85.47, 48.87),
    ("qna", "none"): (49.55, 22.45, 22.18),
    ("qna", "ntk"): (49.55, 52.28, 39.88),
    ("qna", "yarn"): (49.55, 82.53, 47.50),
    ("qna", "rerope"): (49.55, 78.22, 47.72),
    ("qna_logn", "none"): (49.42, 19.55, 18.74),
    ("qna_logn", "ntk"): (49.42, 57.44, 41.56),
    ("qna_logn", "yarn"): (49.42, 80.08, 45.16),
    ("qna_logn", "rerope"): (49.42, 84.71, 48.31),
    ("kna", "none"): (49.60, 61.08, 47.69),
    ("kna", "ntk"): (49.60, 64.44, 43.02),
    ("kna", "yarn"): (49.60, 84.19, 47.44),
    ("kna", "rerope"): (49.60, 77.76, 47.73),
    ("kna_logn", "none"): (49.58, 63.17, 46.40),
    ("kna_logn", "ntk"): (49.58, 79.05, 47.43),
    ("kna_logn", "yarn"): (49.58, 83.95, 47.16),
    ("kna_logn", "rerope"): (49.58, 85.48, 48.78),
    ("cosa", "none"): (49.73, 58.90, 46.98),
    ("cosa", "ntk"): (49.73, 62.50, 42.77),
    ("cosa", "yarn"): (49.73, 83.40, 47.80),
    ("cosa", "rerope"): (49.73, 77.82, 47.80),
    ("cosa_logn", "none"): (49.67, 64.74, 48.95),
    ("cosa_logn", "ntk"): (49.67, 78.97, 47.46),
    ("cosa_logn", "yarn"): (49.67, 82.28, 45.72),
    ("cosa_logn", "rerope"): (49.67, 85.67, 48.39),
}


def kept(form: str, method: str) -> float | None:
    """Returns the published share of accuracy that is kept at 8 × the training length; None where none was published.

    >>> round(kept("kna", "none"), 2), round(kept("baseline", "none"), 2), kept("qwen3", "none")
    (0.96, 0.47, None)
    """
    row = ACCURACY.get((form, method))
    return None if row is None else row[2] / row[0]
