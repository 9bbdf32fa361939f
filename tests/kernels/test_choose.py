"""Which kernel "auto" takes: one table of preferences, first come first served, and its explanation."""

import pytest
import torch

from qkeel.kernels import choose as choosing
from qkeel.kernels.choose import KERNELS, choose, explain_choice, preferred
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
    return make_call(spec, q, k, k, **options)


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "spec": AttentionSpec(cap=Softcap(5.0)),
            "gradient": True,
            "dropout": 0.1,
        },
    ],
)
def test_an_explanation_names_the_kernel_that_is_taken_and_every_refusal_before_it(
    options,
):
    asked = call(**options)
    choice = explain_choice(asked)
    assert KERNELS[choice.kernel] is choose(asked, "auto")
    # Flex has not been timed on a GPU yet.
    assert {*choice.preference.order} == {*KERNELS} - {"flex"}
    tried = [*choice.refusals, choice.kernel]
    assert tried == [*choice.preference.order][: len(tried)]
    text = str(choice)
    assert text.startswith(f"kernel {choice.kernel}\n")
    assert choice.preference.reason in text
    assert all(refusal.reason in text for refusal in choice.refusals.values())
    # What the others refuse, the last one computes.
    assert ("dropout" in options and "spec" in options) <= (choice.kernel == "chunked")
