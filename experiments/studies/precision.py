"""Errors of attention in low precision, measured and predicted by `qkeel.metrics`.

    python -m experiments.studies.precision --out runs/precision

Nothing is trained. Random q and k with logits of growing size pass through the same attention in float64 and in each
format. There are two kinds of logits:

    spread: independent logits with a growing standard deviation. Rows saturate, so two keys compete only in few rows.
    shifted: logits with standard deviation 1 around a growing mean. Softmax is invariant to the mean, but rounding
        is not. A large norm along a shared direction has this effect on attention that spreads over many keys.

There are two kernels: "fused" reads q, k and v in the format and computes in float32, as flash kernels do; "eager"
also stores the product and the scaled logits in the format.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qkeel.errors import UnknownNameError
from qkeel.metrics import fused_logit_error, stored_logit_error
from qkeel.spec import AttentionSpec, Fixed, L2Norm, RMSNorm, Softcap

TOLERANCE = 0.25  # nats; a larger error changes the weight of a key by more than 28 %
REMEDIES: dict[str, AttentionSpec] = {
    "none": AttentionSpec(),
    "qk_norm": AttentionSpec(norm=RMSNorm()),
    "cosine": AttentionSpec(norm=L2Norm(), scale=Fixed(10.0)),
    "softcap:cap=50": AttentionSpec(cap=Softcap(50.0)),
}
FORMATS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
PRECISION_SIZES = tuple(2 ** (i / 2) for i in range(6, 31))
DATA = ("spread", "shifted")
COLUMNS = (
    *("data", "remedy", "format", "kernel", "size", "max_logit"),
    *("logit_error", "predicted_error", "output_error", "flipped", "overflow"),
)


PrecisionRow = Mapping[str, float | str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The number of heads and tokens, and the head dimension d."""

    heads: int = 2
    tokens: int = 64
    head_dim: int = 64


def rows(
    shape: HeadShape = HeadShape(),
    sizes: Sequence[float] = PRECISION_SIZES,
    remedies: Sequence[str] = tuple(REMEDIES),
    seed: int = 0,
) -> Iterator[dict[str, float | str]]:
    """Yields one row with COLUMNS per kind and size of logits (nats, before a remedy), remedy, format and kernel."""
    for data in DATA:
        for size in sizes:
            q, k, v = tensors(data, size, shape, seed)
            for remedy in remedies:
                if remedy not in REMEDIES:
                    raise UnknownNameError(
                        f"expected one of {', '.join(REMEDIES)}, got {remedy!r}"
                    )
                exact = _Exact(REMEDIES[remedy], q, k, v)
                for name in FORMATS:
                    for kernel in ("fused",) if name == "fp8" else ("fused", "eager"):
                        about = {
                            "data": data,
                            "remedy": remedy,
                            "format": name,
                            "kernel": kernel,
                            "size": size,
                        }
                        yield {**about, **exact.against(name, kernel)}


def tensors(
    data: str, size: float, shape: HeadShape, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v [1 h n d] in float64; `size` is the deviation (spread) or mean (shifted) of their logits."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(
            1,
            shape.heads,
            shape.tokens,
            shape.head_dim,
            generator=rng,
            dtype=torch.float64,
        )
        for _ in range(3)
    )
    if data == "spread":
        return q * math.sqrt(size), k * math.sqrt(size), v
    along = torch.nn.functional.normalize(
        torch.randn(shape.head_dim, generator=rng, dtype=torch.float64), dim=0
    )
    q, k = (x - (x @ along)[..., None] * along for x in (q, k))
    both = math.sqrt(size * math.sqrt(shape.head_dim)) * along
    return q + both, k + both, v


class _Exact:
    """The float64 reference; `product` is scale·|q||k| for the key `top` with the largest logit of each row."""

    def __init__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.spec, self.given = spec, (q, k, v)
        q2, k2 = _encoded(spec, q, k)
        factor = _factor(spec, q)
        self.z = factor * q2 @ k2.mT
        self.top = self.z.argmax(-1, keepdim=True)
        self.out = spec.cap.apply(self.z).softmax(-1) @ v
        lengths = (
            k2.norm(dim=-1)[:, :, None].expand_as(self.z).gather(-1, self.top)[..., 0]
        )
        self.product = factor * q2.norm(dim=-1) * lengths

    def against(self, name: str, kernel: str) -> dict[str, float]:
        """Returns the errors of a format and kernel relative to the reference."""
        z, out = forward(self.spec, *self.given, FORMATS[name], eager=kernel == "eager")
        finite = z.isfinite().all() and out.isfinite().all()
        best = self.z.gather(-1, self.top)
        return {
            "max_logit": float(self.z.max()),
            "logit_error": _rms(z.gather(-1, self.top) - best) if finite else math.nan,
            "predicted_error": self.predicted(name, kernel),
            "output_error": float((out - self.out).norm() / self.out.norm())
            if finite
            else math.nan,
            "flipped": float((z.argmax(-1, keepdim=True) != self.top).double().mean())
            if finite
            else math.nan,
            "overflow": float(not finite),
        }

    def predicted(self, name: str, kernel: str) -> float:
        """Returns the predicted root mean square error of the rows' largest logits."""
        d = self.given[0].shape[-1]
        error = fused_logit_error(1.0, 1.0, d, name, 1.0) * _rms(self.product)
        if kernel == "fused":
            return error
        stored = [
            stored_logit_error(float(x), name)
            for x in self.z.gather(-1, self.top).flatten()
        ]
        return math.hypot(error, math.sqrt(sum(x * x for x in stored) / len(stored)))


def forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    *,
    eager: bool,
) -> tuple[Tensor, Tensor]:
    """Computes attention in a format; returns the logits before the cap and the output, both converted to float64."""
    q, k, v = (rounded(x, dtype) for x in (q, k, v))
    q, k = (rounded(x, dtype) for x in _encoded(spec, q, k))
    factor = _factor(spec, q)
    if not eager:
        z = factor * (q.float() @ k.float().mT)
        out = spec.cap.apply(z).softmax(-1) @ v.float()
        return z.double(), (
            out if dtype == torch.float8_e4m3fn else out.to(dtype)
        ).double()
    z = (q @ k.mT) * factor
    weights = spec.cap.apply(z).softmax(-1, dtype=torch.float32).to(dtype)
    return z.double(), (weights @ v).double()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds x to a format. fp8 uses one scale per tensor, which maps the largest entry to 448, and returns float32."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    unit = x.abs().max().float() / torch.finfo(dtype).max
    return (x.float() / unit).to(dtype).float() * unit


def _encoded(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(q.shape[2])[None]
    return spec.encode(q, k, place, place, {})


def _factor(spec: AttentionSpec, q: Tensor) -> float:
    return float(spec.scale.factor(torch.zeros(1, 1), q.shape[-1], {}))


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def thresholds(
    table: Sequence[PrecisionRow], tolerance: float = TOLERANCE
) -> list[dict[str, float | str]]:
    """Returns, per kind of logits, remedy, format and kernel, the largest logit at which errors exceed the tolerance.

    Separate values are given for `predicted_error`, for `logit_error` and for the relative `output_error`, together
    with the smallest logit at which something overflows. A value is NaN if that never happens.
    """
    found: dict[tuple[str, ...], list[PrecisionRow]] = {}
    for row in table:
        found.setdefault(tuple(str(row[name]) for name in COLUMNS[:4]), []).append(row)
    lines = []
    for key, course in found.items():
        line: dict[str, float | str] = dict(zip(COLUMNS[:4], key))
        for name in ("predicted_error", "logit_error", "output_error"):
            line[name.removesuffix("_error")] = _crossing(course, name, tolerance)
        line["overflow"] = min(
            (float(r["max_logit"]) for r in course if r["overflow"]), default=math.nan
        )
        lines.append(line)
    return lines


def _crossing(course: Sequence[PrecisionRow], name: str, tolerance: float) -> float:
    """Returns the largest logit, interpolated on logarithmic axes, at which an error first exceeds the tolerance."""
    x = np.log([float(row["max_logit"]) for row in course])
    y = np.log(np.maximum([float(row[name]) for row in course], 1e-300))
    over = np.flatnonzero(y > math.log(tolerance))
    if not len(over):
        return math.nan
    i = int(over[0])
    if i == 0 or not y[i] > y[i - 1]:
        return float(np.exp(x[i]))
    share = (math.log(tolerance) - y[i - 1]) / (y[i] - y[i - 1])
    return float(np.exp(x[i - 1] + share * (x[i] - x[i - 1])))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.precision", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    parser.add_argument("--remedies", nargs="+", default=tuple(REMEDIES))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = list(
        rows(
            HeadShape(head_dim=options.head_dim),
            remedies=options.remedies,
            seed=options.seed,
        )
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for name, lines in (("table.csv", table), ("thresholds.csv", thresholds(table))):
        with open(options.out / name, "w", newline="") as file:
            writer = csv.DictWriter(file, lines[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    print((options.out / "thresholds.csv").read_text())


if __name__ == "__main__":
    main()
