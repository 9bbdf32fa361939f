"""An experiment that repeats a gather of keys waits for no other process: its own part is made anew, others stay."""

from __future__ import annotations

import pytest
import torch
from tests.remedies.test_sharded_weights import process
from torch import Tensor, distributed

from qkeel.errors import RefusedError
from qkeel.heads.walk import Record, Repetition, memory, place
from qkeel.patching.modes import OperatorMode


def by_parts(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    distributed.all_gather(parts, x)
    return torch.cat(parts)


def as_one(x: Tensor) -> Tensor:
    whole = x.new_empty(2 * len(x), *x.shape[1:])
    distributed.all_gather_into_tensor(whole, x)
    return whole


def summed(x: Tensor) -> Tensor:
    y = x.clone()
    distributed.all_reduce(y)
    return y


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated")
def test_a_gather_is_repeated_by_one_process_and_a_sum_is_refused() -> None:
    for rank in range(2):
        with process(rank):
            for gather in (by_parts, as_one):
                x = torch.randn(3, 4)
                with OperatorMode(keep=True) as seen:
                    out = gather(x) + 1
                came = out.clone()
                repeated = Repetition(Record(seen.operations).operations, {memory(x)})
                with OperatorMode(keep=True) as again:
                    now = repeated({place(x): -x})(out)
                expected = came.clone()
                expected[3 * rank : 3 * rank + 3] = 1 - x
                assert torch.equal(now, expected), (gather.__name__, rank)
                assert torch.equal(out, came)
                assert not [o for o in again.operations if str(o[0]).startswith("c10d")]
            with OperatorMode(keep=True) as seen:
                summed(x)
            with pytest.raises(RefusedError, match=r"c10d\.allreduce_.* combines values from several processes"):
                Repetition(Record(seen.operations).operations, {memory(x)})({place(x): -x})
