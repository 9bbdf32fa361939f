"""Properties of the statistics of rows, on random blocks with hidden pairs."""

from __future__ import annotations

import pytest
import torch

from qkeel.functional import statistics
from qkeel.functional.statistics import KernelRows, reduce_kernel_rows
from qkeel.kernels.statistics import logit_stats
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_row_of_one_key_has_no_entropy_and_a_cosine_of_at_most_one(sign):
    q, alone = torch.randn(1, 1, 400, 3), torch.eye(400, dtype=torch.bool)
    stats = logit_stats(
        make_call(AttentionSpec(), q, 3 * sign * q, q, causal=False, mask=alone)
    )
    for entropy in (stats.entropy, stats.n_free, stats.normalized_entropy):
        assert entropy.item() == 0
    for cosine in (stats.cos_max, stats.cos_mean):
        assert 0.999 <= sign * cosine.item() <= 1


def test_rows_of_a_kernel_by_hand_some_see_no_key_and_some_do_not_count():
    # [b h t] = [2 1 3]: the last row of the first sequence sees no key, the first row of the second does not count.
    rows = KernelRows(
        largest=torch.tensor([[[1.0, 5.0, -torch.inf]], [[9.0, 2.0, 3.0]]]),
        lse=torch.tensor([[[1.0, 6.0, -torch.inf]], [[9.5, 2.5, 3.5]]]),
        entropy=torch.tensor([[[0.5, 1.5, 0.0]], [[7.0, 0.25, 0.75]]]),
    )
    counted = torch.tensor([[True, True, True], [False, True, True]])
    one = torch.tensor([[True, False, False], [False, False, False]])
    for mask, numbers in (
        (counted, (4, 5.0, 0.75, 0.25)),
        (one, (1, 1.0, 0.5, 0.5)),
        (torch.zeros_like(one), (0, -torch.inf, 0.0, torch.inf)),
    ):
        stats = reduce_kernel_rows(rows, mask, 1)
        values = stats.n_queries, stats.max_logit, stats.entropy, stats.entropy_min
        assert tuple(x.item() for x in values) == numbers
    lost = torch.tensor([[[torch.nan, 1.0]]])
    stats = reduce_kernel_rows(KernelRows(lost, lost, lost), None, 1)
    assert stats.max_logit.isnan().all()


def test_norms_of_keys_are_of_those_that_a_counted_row_sees():
    norm = torch.tensor([[[3.0, torch.nan, 1.0]], [[4.0, 8.0, 9.0]]])
    visible = torch.tensor([[[True, False, True]], [[True, False, False]]])
    for arguments, numbers in (
        ((norm, visible), (8 / 3, 4.0, 3)),
        ((norm[1:], None), (7.0, 9.0, 3)),
        ((None, visible), (0.0, 0.0, 0)),
        ((norm[..., :0], None), (0.0, 0.0, 0)),
    ):
        values = statistics._keys(*arguments, norm).values()  # type: ignore[arg-type]
        assert [x.item() for x in values] == pytest.approx(numbers)
