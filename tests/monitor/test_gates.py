"""The logsumexps of rows and the gates of learned sinks, as a watched model's record has them."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tests.attention import later, scores
from tests.training import sgd

import qkeel
from qkeel.errors import UnknownNameError
from qkeel.spec import AttentionSpec, Sink, Softcap

NAMES = ("lse_mean", "lse_min", "sink_logit", "gate_mean")


def by_hand(call, cap, sink):
    """In float64, from q and k alone: a causal call under 1/√d."""
    q, k = (x.detach().double() for x in (call.q, call.k))
    z = cap * torch.tanh(scores(q, k) / cap)
    rows = z.masked_fill(later(q, k), -torch.inf).logsumexp(-1).numpy()
    numbers = {"lse_mean": rows.mean((0, 2)), "lse_min": rows.min((0, 2))}
    if sink is None:
        return numbers
    gates = 1 / (1 + np.exp(sink[:, None] - rows))
    return numbers | {
        "sink_logit": sink,
        "gate_mean": gates.mean((0, 2)),
    }


@pytest.mark.parametrize("learned", [True, False])
def test_a_watched_models_gates_are_those_of_float64(learned):
    torch.manual_seed(0)
    spec = AttentionSpec(cap=Softcap(cap=3.0), normalizer=Sink(learned=learned))
    model = qkeel.nn.Attention(32, 4, n_kv_heads=2, spec=spec)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "sink" in name:
                p.copy_(torch.tensor([0.0, 2.0, -3.0, 20.0]).view_as(p))
            elif p.ndim == 2:
                p.mul_(4)
    calls = []
    model.observers.append(calls.append)
    with qkeel.watch(model, stats="all+gates") as monitor:
        model(torch.randn(3, 40, 32))
        heads = monitor.sample.heads
    expected = by_hand(
        calls[-1], 3.0, np.array([0.0, 2.0, -3.0, 20.0]) if learned else None
    )
    assert set(NAMES) & set(heads) == set(expected)
    for name, x in expected.items():
        assert_allclose(heads[name][0], x, rtol=2e-5, atol=1e-7, err_msg=name)


def test_several_calls_of_a_step_count_by_their_rows():
    torch.manual_seed(1)
    model = qkeel.nn.Attention(16, 2)
    optimizer = sgd(model, 0.0)
    batches = [torch.randn(1, 5, 16), torch.randn(2, 30, 16)]
    means = []
    for batch in batches:
        with qkeel.watch(model, stats="max+gates") as monitor:
            model(batch)
            means.append(monitor.sample.heads["lse_mean"][0])
    with qkeel.watch(model, optimizer, stats="max+gates") as monitor:
        for batch in batches:
            model(batch).sum().backward()
        optimizer.step()
        joint = monitor.sample.heads["lse_mean"][0]
    assert_allclose(joint, (5 * means[0] + 60 * means[1]) / 65, rtol=1e-6)


def test_rows_that_are_masked_out_do_not_count():
    torch.manual_seed(2)
    model = qkeel.nn.Attention(16, 2)
    x = torch.randn(1, 12, 16)
    with qkeel.watch(model, stats="all+gates") as monitor:
        model(x[:, :7])
        short = monitor.sample.heads["lse_mean"]
    mask = (torch.arange(12) < 7)[None]
    with qkeel.watch(model, stats="all+gates", query_mask=mask) as monitor:
        model(x)
        assert_allclose(monitor.sample.heads["lse_mean"], short, rtol=1e-6)


def test_nothing_of_it_is_measured_unless_it_is_named():
    model = qkeel.nn.Attention(16, 2)
    with qkeel.watch(model) as monitor:
        model(torch.randn(1, 4, 16))
        assert not set(NAMES) & set(monitor.sample.heads)
    with pytest.raises(UnknownNameError, match="gates"):
        qkeel.watch(model, stats="all+gate")
    with pytest.raises(UnknownNameError, match="max"):
        qkeel.watch(model, stats="entrpy+gates")
