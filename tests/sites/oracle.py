"""What an observed pass shows, and what it should show: statistics of whole matrices of logits in float64."""

import torch
from torch import nn
from torch.testing import assert_close

from qkeel.capture.calls import statistics
from qkeel.capture.intercept import CaptureMode
from qkeel.sites import Tap


def observed(run, model=None, **options):
    """The names, functions and statistics of the attention calls in a run, and what it returns."""
    calls = []

    def note(captured):
        calls.append((captured.name, captured.how, statistics(captured.call)))

    with CaptureMode(nn.Identity() if model is None else model, note, **options):
        output = run()
    return calls, output


def the_call(run, model=None, **options):
    """The statistics of the only call of a run."""
    ((_, _, stats),), _ = observed(run, model, **options)
    return stats


def tapped(model, x, sites=()):
    """The statistics of the only site of a pass, read by a Tap that knows these sites."""
    with Tap(model) as tap:
        tap.sites.extend(sites)
        model(x)
        (stats,) = tap.read().values()
    return stats


def check(stats, z, sink=-torch.inf):
    """Statistics against logits [b h t s], -inf where a key is hidden, of which each row may share its softmax with a
    sink."""
    z = z.detach().double()
    is_seen = z > -torch.inf
    n_rows = is_seen.any(-1).sum((0, 2))
    columns = torch.cat([z, torch.full_like(z[..., :1], sink)], -1)
    entropy = torch.special.entr(columns.softmax(-1).nan_to_num()).sum((0, 2, 3))
    top = z.amax((0, 2, 3))
    assert_close(stats.max_logit.double(), top, rtol=1e-5, atol=1e-5)
    assert_close(stats.entropy.double(), entropy / n_rows, rtol=1e-5, atol=1e-5)
    assert stats.n_pairs.tolist() == is_seen.sum((0, 2, 3)).tolist()
    assert stats.n_queries.tolist() == n_rows.tolist()
