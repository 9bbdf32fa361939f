"""The two passes over logits of a GPU, all statistics and the extremes alone, against torch's operators in float64."""

import dataclasses

import pytest
import torch
from tests.contract.conformance.cases import widened
from tests.kernels.drawn import drawn, mask_of_keys
from tests.kernels.test_non_finite import BROKEN, broken_call
from tests.quick import one_in

from qkeel.functional.statistics import TENSORS
from qkeel.kernels import statistics
from qkeel.kernels import triton_access as available
from qkeel.kernels.logits import gpu, triton_row_fields
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import ALiBi, AttentionSpec, Fixed, Sink, Softcap
from qkeel.spec.call import band_call, make_call

# Of numpy, which multiplies for the interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("_on_gpu", "_poisoned"),
]


TAKEN = {}


@pytest.fixture
def _on_gpu(monkeypatch):
    """CPU tensors take the way of CUDA tensors. TAKEN says whether each pass computed the last call it was asked for."""
    monkeypatch.setattr(available, "usable", lambda device: available.loaded())
    for compute in (gpu.row_fields, gpu.extremes):
        monkeypatch.setattr(statistics, compute.__name__, noted(compute))


def noted(compute):
    def ask(*arguments):
        numbers = compute(*arguments)
        TAKEN[compute.__name__] = numbers is not None
        return numbers

    return ask


def call_of(spec, t, s, **options):
    b = 2 if "mask" in options else 1
    q, k = torch.randn(b, 2, t, 24), torch.randn(b, 1, s, 24)
    return make_call(spec, q, k, k, params=spec.init_params(2, 1, 24), **options)


def near(ours, truth, case, fields=TENSORS):
    # Sums of logits are rounded as the largest of them; a weight's relative error is its logit's absolute one.
    # So is the mean of a row, of as many roundings as its product with the summed keys has: five times as much.
    rounding = 2e-7 * truth.max_abs_logit.max()
    for field in fields:
        room = 5 * rounding if field == "logit_spread" else rounding
        a, b = getattr(ours, field).double(), getattr(truth, field).double()
        assert ((a == b) | ((a - b).abs() <= 2e-5 * (1 + b.abs()) + room)).all(), (
            f"{case}: {field}: {a} {b}"
        )


def check(call, case):
    truth = logit_stats(widened(call), 0.5)
    near(logit_stats(call, 0.5), truth, case)
    assert TAKEN["row_fields"] is (call.window is None), case
    near(max_stats(call), truth, case, ("max_logit", "min_logit", "logit_spread"))
    assert TAKEN["extremes"] is (call.spec.cap.kind == "none"), case


def test_more_rows_than_32_bits_find_are_left_to_torch(
    monkeypatch,
):
    call = call_of(AttentionSpec(), 20, 20)
    monkeypatch.setattr(triton_row_fields, "MOST_ROWS", 2 * 20)
    assert gpu.row_fields(call, 0.5) is not None
    monkeypatch.setattr(triton_row_fields, "MOST_ROWS", 2 * 20 - 1)
    assert gpu.row_fields(call, 0.5) is None


@pytest.mark.parametrize(
    "seeds", [range(7), pytest.param(range(7, 120), marks=pytest.mark.slow)], ids=str
)
def test_drawn_calls_have_the_numbers_of_float64(seeds):
    options = {
        "sizes": (-3.0, 0.1, 1.0, 40.0, 3000.0),
        # The interpreter multiplies no bfloat16.
        "dtypes": (torch.float32, torch.float16),
        "windows_with_masks": False,
    }
    for seed in seeds:
        check(drawn(seed, mask_of_keys, **options), f"seed {seed}")


@pytest.mark.parametrize("kind", one_in(BROKEN, 2))
def test_what_is_not_finite_shows_in_its_head_alone(kind):
    broken = [head in BROKEN[kind] for head in range(4)]
    for spec in (AttentionSpec(), AttentionSpec(cap=Softcap(5.0))):
        call = broken_call(kind, spec)
        assert logit_stats(call).non_finite.bool().tolist() == broken
        extremes = max_stats(call)
        finite = extremes.max_logit.isfinite() & extremes.min_logit.isfinite()
        assert (~finite).tolist() == broken


def test_a_negative_scale_rounds_no_query_of_half_precision():
    call = call_of(AttentionSpec(scale=Fixed(-0.2)), 20, 20)
    q, k = (40 * call.q).half(), call.k.half()
    check(dataclasses.replace(call, q=q, k=k, v=k), "negative")


def test_what_hidden_keys_hold_does_not_matter():
    shown = torch.arange(40) >= torch.tensor([[0], [9]])
    call = call_of(AttentionSpec(), 40, 40, mask=shown)
    before = logit_stats(call), max_stats(call)
    call.k[1, :, :9] = torch.nan
    for earlier, later in zip(before, (logit_stats(call), max_stats(call))):
        for field in TENSORS:
            assert torch.equal(getattr(earlier, field), getattr(later, field)), field


def test_a_call_that_the_passes_do_not_read_is_left_to_torch():
    pos, q = torch.arange(5), torch.randn(2, 4, 5, 24)
    added, positions = {"mask": torch.randn(5, 5)}, {"pos_q": pos, "pos_k": pos}
    by_query = {"mask": torch.rand(2, 1, 5, 5) < 0.6}
    for spec, options in (
        (AttentionSpec(), by_query),
        (AttentionSpec(normalizer=Sink()), {}),
        (AttentionSpec(), added),
        (AttentionSpec(), positions),
        (AttentionSpec(position=ALiBi()), {}),
    ):
        call = call_of(spec, 5, 5, **options)
        assert gpu.row_fields(call, 0.5) is None
        sinks = spec.normalizer.kind == "sink"  # before them stand the same extremes
        assert sinks or gpu.extremes(call) is None
        near(logit_stats(call), logit_stats(widened(call)), f"{options}")
    wide = make_call(AttentionSpec(), q.double(), q.double(), q.double())
    spans = band_call(make_call(AttentionSpec(), q, q, q, causal=False), window=(5, 30))
    for call in (wide, spans):
        assert gpu.row_fields(call, 0.5) is None
        assert gpu.extremes(call) is None
