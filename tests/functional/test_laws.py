"""Laws of every formula: derivatives of any kind, axes in front, and what it takes where nothing is said."""

import math

import pytest
import torch
from tests.each_row import each_row
from torch.testing import assert_close

from qkeel.functional import bounds
from qkeel.functional import logits as F
from qkeel.functional.norms import (
    inverse_l2,
    inverse_rms,
    l2_norm,
    layer_norm,
    rms_norm,
)
from qkeel.functional.rope import rotate

from .properties import randn, some_visible

NORMS = {"l2": l2_norm, "rms": rms_norm, "layer": layer_norm}
PAIRINGS = ("half", "interleaved", "half_reversed")
ANGLES = randn(5, 2)  # of vectors of five or six numbers, the last of which do not turn
SEEN = some_visible(3, 4, 5)
WEIGHTS = {
    "softmax": F.softmax,
    "sink": lambda z, visible: F.sink_softmax(z, z.new_tensor(0.5), visible),
    "sigmoid": lambda z, visible: F.sigmoid(z, -1.0, visible),
    "squared_relu": F.squared_relu,
    "softpick": F.softpick,
}
MAPS = {
    # No eps, a small one, and one that is larger than the vector.
    **{
        f"{name}, eps {eps}": lambda x, norm=norm, eps=eps: norm(x, eps=eps)
        for name, norm in NORMS.items()
        for eps in (0.0, 1e-6, 10.0)
    },
    "inverse_l2": inverse_l2,
    "inverse_rms": inverse_rms,
    **{
        pairing: lambda x, p=pairing: rotate(x, ANGLES.cos(), ANGLES.sin(), p)
        for pairing in PAIRINGS
    },
    **{name: lambda z, weigh=weigh: weigh(z, SEEN) for name, weigh in WEIGHTS.items()},
    "softcap": lambda z: F.softcap(z, 1.5),
    "no cap": lambda z: F.softcap(z, math.inf),
}


# Of torch's decompositions for dual numbers.
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@each_row("of", MAPS.values(), ids=MAPS)
def test_derivatives_forward_and_backward_are_right(of):
    x = randn(0, 4, 5).requires_grad_()
    torch.autograd.gradcheck(of, x, check_forward_ad=True)


@each_row("of", [*NORMS.values(), *(MAPS[p] for p in PAIRINGS)])
def test_each_of_many_vectors_is_mapped_alike_under_vmap(of):
    x = randn(0, 4, 3, 5)
    assert_close(torch.func.vmap(of, in_dims=1, out_dims=1)(x), of(x))


def test_what_a_formula_takes_where_nothing_is_said():
    # RMS 1e-3, L2 norm 2e-3.
    small = torch.tensor([1e-3, -1e-3, 1e-3, -1e-3], dtype=torch.float64)
    tiny = 1e-10 * small
    crowded = torch.diag(torch.linspace(1.0, 0.999, 64))
    squared = bounds.squared_eigenvalue(crowded)
    defaults = {
        "l2": (l2_norm(small)[0], 0.5),
        "l2 of tiny": (l2_norm(tiny)[0], 1e-13 / 1e-12),
        "rms": (rms_norm(small)[0], 1e-3 / math.sqrt(1e-6 + 1e-6)),
        "layer": (layer_norm(small)[0], 1e-3 / math.sqrt(1e-6 + 1e-5)),
        "inverse l2": (inverse_l2(small), 1 / 2e-3),
        "inverse l2 of tiny": (inverse_l2(tiny), 1e12),
        "inverse rms": (inverse_rms(small), 1 / math.sqrt(2e-6)),
        "weight": (bounds.expected_squared_norm(torch.ones(3, 4)), 12.0),
        "logits": (bounds.logit_std(2.0, 3.0, 64), 6.0),
        "rms bound": (bounds.rms_logit_bound(64), 8.0),
        "rms bound of a gain": (bounds.rms_logit_bound(64, 3.0), 24.0),
        "z loss": (F.z_loss(torch.zeros(3, 4)), 1e-4 * math.log(4) ** 2),
        "squarings": (squared, bounds.squared_eigenvalue(crowded, squarings=11)),
    }
    for name, (number, expected) in defaults.items():
        assert float(number) == pytest.approx(float(expected), rel=1e-6), name
    assert squared < bounds.squared_eigenvalue(crowded, squarings=12)
