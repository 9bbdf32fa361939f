"""Where weights are flat pieces between passes (FSDP1), logits are those of one process, and what needs weights refuses."""

import functools
import pickle

import pytest
from numpy.testing import assert_allclose
from tests.contract.processes.watching import made, passes, trained
from tests.contract.processes.wrapped import batch
from tests.forked import spawn
from tests.processes import flat_weights
from tests.processes.flat_weights import SETUPS

NEED_WEIGHTS = {
    *("query_weight_norm", "key_weight_norm", "qk_spectral_norm"),
    *("query_grad_rms", "key_grad_rms"),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_logits_are_those_of_one_process_and_weights_are_left_out(tmp_path):
    acts = [functools.partial(flat_weights.watched, tmp_path, name) for name in SETUPS]
    spawn(2, *acts, seconds=300)
    for name in SETUPS:
        setup = "ddp_no_sync" if name == "no_sync" else "ddp"
        one = trained(made(setup), passes(setup, batch), True)
        for rank in range(2):
            seen = pickle.loads((tmp_path / f"{name}-{rank}.pickle").read_bytes())
            assert not isinstance(seen, str), seen
            most = 1e-5 if name == "float32" else 1e-12
            assert seen.steps == one.steps
            assert len(seen.layers) == len(one.layers)
            assert {*one.heads} - {*seen.heads} == NEED_WEIGHTS
            for field, numbers in seen.heads.items():
                assert_allclose(
                    numbers, one.heads[field], rtol=most, atol=most, err_msg=field
                )
            # Said once, by the first process.
            assert len(seen.warned) == (rank == 0), seen.warned
            assert all("flat pieces" in said for said in seen.warned)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_needs_weights_refuses_and_names_the_way():
    spawn(2, flat_weights.refusals, flat_weights.found_before, seconds=200)
