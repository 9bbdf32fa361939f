"""The change of the logits of a fixed batch by one optimizer step, per head."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkeel.functional.statistics.logit_stats import PerHead
from qkeel.functional.statistics.rows import Seen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitChange:
    """Per query head, the change of signed logits before the cap, in nats, over `n_pairs` visible pairs. 0 where
    there is none. Detached; float32 or wider.
    """

    rms: PerHead  #: root mean square of the change
    mean_abs: PerHead  #: mean magnitude
    max_abs: PerHead  #: largest magnitude
    n_pairs: Int[Tensor, " h"]


def change_factors(q: Tensor, k: Tensor, q_new: Tensor, k_new: Tensor) -> tuple[Tensor, Tensor]:
    """The factors a [b h t 2d] and c [b g s 2d] with a cᵀ = q' k'ᵀ - q kᵀ: a = [q' - q, q], c = [k', k' - k].

    In the steps, not as [q' q][k' -k]ᵀ: that one subtracts numbers of the size of the logits, and a step of 1e-3 is
    lost in float32. `bounds.logit_frobenius` of both is ‖q' k'ᵀ - q kᵀ‖_F.
    """
    return torch.cat([q_new - q, q], dim=-1), torch.cat([k_new, k_new - k], dim=-1)


def change_rows(change: Tensor, seen: Seen) -> dict[str, Tensor]:
    """Per query row of blanked changes [b h r n]: their root sum of squares, sum of magnitudes, largest, and count."""
    b, h, r, _ = change.shape
    norm = torch.linalg.vector_norm(change, dim=-1)
    size = change.abs_()
    count = seen.counts(r, change.device).expand(b, h, r)
    return {"norm": norm, "total": size.sum(-1), "most": size.amax(-1), "n": count}


def no_change_rows(like: Tensor) -> dict[str, Tensor]:
    """Rows that see no key, as many as there are in `like` [b h r]."""
    zeros, none = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.int64)
    return {"norm": zeros, "total": zeros, "most": zeros, "n": none}


def reduce_changes(parts: list[dict[str, Tensor]], counted: Bool[Tensor, "b t"] | None) -> LogitChange:
    """The change over the rows of all parts that see a key and count."""
    rows = {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
    out = rows["n"] == 0 if counted is None else (rows["n"] == 0) | ~counted[:, None]
    norm, total, most = (rows[name].masked_fill(out, 0.0) for name in ("norm", "total", "most"))
    n_pairs = rows["n"].masked_fill(out, 0).sum((0, 2))
    divisor = n_pairs.clamp_min(1).to(norm.dtype)
    return LogitChange(
        rms=torch.linalg.vector_norm(norm, dim=(0, 2)) / divisor.sqrt(),
        mean_abs=total.sum((0, 2)) / divisor,
        max_abs=most.amax((0, 2)),
        n_pairs=n_pairs,
    )
