"""Which kernel "auto" takes: one table of preferences, first come first served, and its explanation."""

import pytest
import torch

from qkeel.kernels import choose as choosing
from qkeel.kernels.choose import KERNELS, PREFERENCES, choose, explain_choice, preferred
from qkeel.spec import AttentionSpec, Softcap
from qkeel.spec.call import make_call


def call(
    tokens=5,
    dtype=torch.float32,
    gradient=False,
    **options,
):
    q = torch.randn(1, 2, tokens, 8, dtype=dtype, requires_grad=gradient)
    k = torch.randn(1, 2, 5, 8, dtype=dtype)
    spec = options.pop("spec", AttentionSpec())
    return make_call(spec, q, k, k, **options)  # type: ignore[arg-type]


def chosen(asked):
    return next(
        name for name, kernel in KERNELS.items() if kernel is choose(asked, "auto")
    )


ONE, HALF, FIXED = "one query", "half precision with a gradient", "a call with dropout"
WHOLE, OTHER = "a call with as many queries as keys", "any other call"


@pytest.mark.parametrize(
    ("options", "capability", "calls"),
    [
        ({}, "AVX2", WHOLE),
        ({"tokens": 1}, "AVX2", ONE),
        ({"tokens": 1, "dropout": 0.1}, "AVX2", FIXED),
        ({"tokens": 2}, "AVX2", OTHER),
        ({"dtype": torch.bfloat16}, "AVX2", WHOLE),
        ({"dtype": torch.bfloat16, "gradient": True}, "AVX2", HALF),
        ({"dtype": torch.float16, "gradient": True}, "AVX2", HALF),
        ({"dtype": torch.float16, "gradient": True}, "AVX512", WHOLE),
        ({"gradient": True}, "AVX2", WHOLE),
        ({"dtype": torch.float16, "gradient": True, "dropout": 0.1}, "AVX2", FIXED),
    ],
)
def test_each_kind_of_call_has_its_own_order(
    options,
    capability,
    calls,
    monkeypatch,
):
    monkeypatch.setattr(choosing, "_cpu_capability", lambda: capability)
    assert preferred(call(**options)).calls.startswith(calls)


def test_a_preference_names_every_kernel_and_its_reason():
    for preference in PREFERENCES:
        # Not timed on a GPU yet.
        assert set(preference.order) == set(KERNELS) - {"flex"}
        assert preference.reason
    assert PREFERENCES[-1].order == tuple(name for name in KERNELS if name != "flex")


def test_the_last_kernel_of_the_table_computes_what_the_others_refuse():
    assert (
        chosen(call(spec=AttentionSpec(cap=Softcap(5.0)), gradient=True, dropout=0.1))
        == "chunked"
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"tokens": 1}, {"dropout": 0.1}, {"spec": AttentionSpec(cap=Softcap(5.0))}],
)
def test_an_explanation_names_the_kernel_that_is_taken_and_every_refusal_before_it(
    options,
):
    asked = call(**options)
    found = explain_choice(asked)
    assert found.kernel == chosen(asked)
    assert [*found.refusals, found.kernel] == [*found.preference.order][
        : len(found.refusals) + 1
    ]
    text = str(found)
    assert text.startswith(f"kernel {found.kernel}\n")
    assert found.preference.reason in text
    assert all(refusal.reason in text for refusal in found.refusals.values())
