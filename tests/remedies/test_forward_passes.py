"""How often the model is run for a remedy: once to find its attention, and once more to check what was changed."""

import gc

import pytest
from tests.drawing import randint
from tests.training import adamw
from torch.nn import Embedding

from qkeel import apply
from qkeel.sites.trace import ModuleTrace


def llama():
    from tests.contract.watch import families

    return families.llama(num_hidden_layers=3)


def tokens():
    return randint(0, 32, (2, 80), seed=0)


@pytest.mark.parametrize(
    "name", ["qk_norm", "softcap", "output_gate", "qk_clip", "sigma_reparam"]
)
def test_a_remedy_that_was_applied_keeps_no_tensor_of_the_pass_that_showed_the_attention(
    name, monkeypatch
):
    model, passes, embed = llama(), [], Embedding.forward
    monkeypatch.setattr(Embedding, "forward", lambda *x: passes.append(1) or embed(*x))
    with apply(
        model,
        name,
        adamw(model),
        batch=tokens(),
        train_length=64,
    ):
        assert len(passes) == {"qk_clip": 1, "output_gate": 3}.get(name, 2)
        gc.collect()
        assert not [x for x in gc.get_objects() if isinstance(x, ModuleTrace)]
