"""How often the model is run for a remedy: twice to find its attention, and at most twice more."""

import gc

import pytest
from tests.drawing import randint
from tests.training import adamw

from qkeel import apply
from qkeel.sites.site_search import ModelTrace


def llama():
    from tests.contract.watch import families

    return families.llama(num_hidden_layers=3)


def tokens():
    return randint(0, 32, (2, 80), seed=0)


@pytest.mark.parametrize(
    "name", ["qk_norm", "softcap", "output_gate", "qk_clip", "sigma_reparam"]
)
def test_a_remedy_that_was_applied_keeps_no_tensor_of_the_pass_that_showed_the_attention(
    name,
):
    model = llama()
    with apply(
        model,
        name,
        adamw(model),
        batch=tokens(),
        train_length=64,
    ):
        gc.collect()
        assert not [x for x in gc.get_objects() if isinstance(x, ModelTrace)]
