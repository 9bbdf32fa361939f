"""A model on several processes is measured as on one process with the global batch, in every setup of the table."""

from __future__ import annotations

import functools
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tests.contract.processes.seen import Seen
from tests.contract.processes.setups import SETUPS
from tests.contract.processes.watching import alone, told
from tests.forked import spawn

# By setup: how far from one process its numbers may be, relative to those above 1, where it is more than rounding.
COMPUTED_IN_FLOAT32 = {"fsdp2_mixed": 1e-5}
UNKNOWN = dict.fromkeys(("tp_fsdp2", "tp_fsdp2_compile"), ("qk_spectral_norm",))

QUICK = [name for name, setup in SETUPS.items() if setup.quick]
SLOW = [name for name, setup in SETUPS.items() if not setup.quick]


@functools.cache
def found(world: int, names: tuple[str, ...]) -> dict[str, list[Seen]]:
    """What each process has recorded, of setups that are run one after the other by the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        acts = [functools.partial(told, Path(folder), name) for name in names]
        spawn(world, *acts, seconds=400)
        return {
            name: [
                pickle.loads((Path(folder) / f"{name}-{rank}.pickle").read_bytes())
                for rank in range(world)
            ]
            for name in names
        }


def seen_of(name: str) -> list[Seen]:
    kind = SETUPS[name].processes, name.partition("_")[0]
    alike = tuple(n for n in SLOW if (SETUPS[n].processes, n.partition("_")[0]) == kind)
    alike = tuple(QUICK) if name in QUICK else alike
    all_seen = found(SETUPS[name].processes, alike)[name]
    for seen in all_seen:
        assert isinstance(seen, Seen), seen
    return all_seen


def check(name: str) -> None:
    setup, all_seen, one = SETUPS[name], seen_of(name), alone(name)
    for seen in all_seen:
        assert seen.steps == one.steps
        assert len(seen.layers) == len(one.layers)
        same_numbers(name, seen, one)
        for ours, theirs in zip(seen.reads.values(), one.reads.values(), strict=True):
            assert list(ours) == list(theirs)
            for field in ours:
                close(name, field, ours[field], theirs[field])
        # Where one process alone would gather keys again, gradients say whose the rows are, and that is told.
        told = [w for w in seen.warned if "known from gradients alone" in w]
        assert len(told) == name.startswith("context")
        warned = [w for w in seen.warned if w not in told]
        assert (warned == []) == (setup.statistics == "equal")
        assert all("qk_spectral_norm is not measured" in w for w in warned)
        assert seen.collectives == all_seen[0].collectives
        assert max(seen.collectives[1:]) <= setup.collectives
        assert (seen.collectives[0] > setup.collectives) == setup.collectives_of_search
        assert seen.table == all_seen[0].table
        assert all(layer in seen.table for layer in seen.layers)


def same_numbers(name: str, seen: Seen, one: Seen) -> None:
    assert list(seen.heads) == list(one.heads)
    for field, ours in seen.heads.items():
        if field in UNKNOWN.get(name, ()):
            assert np.isnan(ours).all()
        else:
            close(name, field, ours, one.heads[field])
    layers = dict(zip(one.layers, seen.layers))
    values = {
        f"{n}/{layers[at]}" if (at := key.partition("/")[2]) else key: x
        for key, x in one.values.items()
        for n in [key.partition("/")[0]]
    }
    assert {*seen.values} == {*values}
    for key, ours in seen.values.items():
        close(name, key, ours, values[key])


def close(name: str, field: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    most = COMPUTED_IN_FLOAT32.get(name, 1e-12)
    np.testing.assert_allclose(
        ours, theirs, rtol=most, atol=most, err_msg=f"{name}: {field}"
    )


@pytest.mark.parametrize("name", QUICK)
def test_numbers_are_those_of_one_process(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(500)  # the first of a kind starts the processes for all of it
@pytest.mark.parametrize("name", SLOW)
def test_numbers_are_those_of_one_process_in_every_setup(name: str) -> None:
    check(name)


def test_heads_and_layers_are_numbered_over_the_whole_model() -> None:
    split, stages = seen_of("tp")[1], seen_of("pipeline")[1]
    assert split.heads["max_logit"].shape == (3, 2, 4)
    assert stages.layers == (
        "stages.0.layers.0.self_attn",
        "stages.1.layers.0.self_attn",
    )
    lead = np.unravel_index(int(np.argmax(split.heads["max_logit"][-1])), (2, 4))
    assert f"({split.layers[lead[0]]} head {lead[1]})" in split.table
