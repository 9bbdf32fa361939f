"""The oracle against attention written out in plain Python loops, number by number."""

import math

import pytest
import torch

from qkeel import reference
from qkeel.spec import AttentionSpec, Fixed, L2Norm, LogN, Rope, Sink, Softcap

Rows = list[list[float]]


def softmax(z, extra=None):
    top = max([*z, *([] if extra is None else [extra])])
    mass = sum(math.exp(x - top) for x in z) + (
        0 if extra is None else math.exp(extra - top)
    )
    return [math.exp(x - top) / mass for x in z]


def attend(
    q,
    k,
    v,
    scale,
    cap=None,
    sink=None,
):
    """Causal attention of one head; row i has its own scale."""
    out = []
    for i, row in enumerate(q):
        z = [scale[i] * sum(a * b for a, b in zip(row, k[j])) for j in range(i + 1)]
        z = z if cap is None else [cap * math.tanh(x / cap) for x in z]
        p = softmax(z, sink)
        out.append(
            [sum(p[j] * v[j][c] for j in range(i + 1)) for c in range(len(v[0]))]
        )
    return out


def unit(x):
    return [a / math.sqrt(sum(b * b for b in x)) for a in x]


def turned(x, pos, base=10_000.0):
    half, out = len(x) // 2, list(x)
    for i in range(half):
        angle = pos * base ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


T, D = 5, 4
Q, K, V = (
    torch.randn(
        1, 1, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
    )
    for i in range(3)
)
q, k, v = Q[0, 0].tolist(), K[0, 0].tolist(), V[0, 0].tolist()

BY_HAND = {
    "scaled dot product": (AttentionSpec(), attend(q, k, v, [0.5] * T)),
    "rope": (
        AttentionSpec(position=Rope()),
        attend(
            [turned(x, i) for i, x in enumerate(q)],
            [turned(x, i) for i, x in enumerate(k)],
            v,
            [0.5] * T,
        ),
    ),
    "unit keys": (
        AttentionSpec(norm=L2Norm(on="k"), scale=Fixed(1.0)),
        attend(q, [unit(x) for x in k], v, [1.0] * T),
    ),
    "softcap": (AttentionSpec(cap=Softcap(0.3)), attend(q, k, v, [0.5] * T, cap=0.3)),
    "off by one": (
        AttentionSpec(normalizer=Sink(learned=False)),
        attend(q, k, v, [0.5] * T, sink=0.0),
    ),
    "log n": (
        AttentionSpec(scale=LogN(train_length=4)),
        attend(q, k, v, [0.5 * math.log(n) / math.log(4) for n in range(1, T + 1)]),
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_output_is_that_of_loops_over_numbers(case):
    spec, expected = BY_HAND[case]
    out = reference.attend(spec, Q, K, V).out
    assert torch.allclose(
        out[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14
    )
