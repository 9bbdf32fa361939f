"""Models that compute from the hidden states that transformers records by hooks, as LLaVA does."""

import pytest
import torch
from tests.training import adamw
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

import qkeel


def tower():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
    return CLIPVisionModel(CLIPVisionConfig(**sizes, **layers))


class Reader(nn.Module):
    """Reads the state before the last layer of a tower."""

    def __init__(self):
        super().__init__()
        self.tower, self.write = tower(), nn.Linear(16, 4)

    def forward(self, x):
        states = self.tower(x, output_hidden_states=True).hidden_states
        return self.write(states[-2]).mean() + len(states)


def test_a_search_after_the_hooks_were_put_finds_the_layers_and_a_watched_pass_records_as_before():
    torch.manual_seed(0)
    model, x = Reader(), torch.randn(2, 3, 8, 8)
    before = model(x)
    assert len(qkeel.find_sites(model, x)) == 2
    qkeel.apply(model, "qk_clip", adamw(model, 0.0), batch=x)
    with qkeel.watch(model, adamw(model, 0.0)):
        watched = model(x)
        watched.backward()
    assert torch.equal(before, watched)
    assert torch.equal(before, model(x))


@pytest.mark.parametrize("begins_recorded", [False, True])
def test_a_part_that_is_searched_in_a_pass_adds_nothing_to_what_the_model_records(
    begins_recorded,
):
    torch.manual_seed(0)
    model, x = tower(), torch.randn(2, 3, 8, 8)
    if begins_recorded:
        model(x, output_hidden_states=True)
    part = model.get_submodule("encoder")
    handle = qkeel.apply(part, "softcap:cap=50", adamw(part, 0.0))
    recorded = model(x, output_hidden_states=True).hidden_states
    handle.remove()
    states = model(x, output_hidden_states=True).hidden_states
    assert [y.shape for y in recorded] == [y.shape for y in states]
