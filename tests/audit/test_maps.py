"""`attention_maps`: the weights that eager attention has, of fused kernels too, head by head and row by row."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, later, scores
from torch import nn
from torch.testing import assert_close

from qkeel import AttentionSpec, attention_maps, preset
from qkeel.audit import maps
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    NoAttentionError,
    UnknownNameError,
)
from qkeel.nn import Attention
from qkeel.reference import attend
from qkeel.sites import softmax_weights
from qkeel.spec import ALiBi, Rope, Sigmoid, Sink, SlidingWindow

ARCHITECTURES = [
    "BloomForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MPNetForMaskedLM",
    "OPTForCausalLM",
    "StableLmForCausalLM",
    "BertForMaskedLM",
]


# More, on request: the figure in docs/guides/audit.md.
MORE = [
    "BartForConditionalGeneration",
    "BioGptForCausalLM",
    "CodeGenForCausalLM",
    "DeiTForImageClassification",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "MistralForCausalLM",
    "MptForCausalLM",
    "Olmo2ForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "RobertaForMaskedLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "XGLMForCausalLM",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        *ARCHITECTURES,
        *(pytest.param(name, marks=pytest.mark.zoo) for name in MORE),
    ],
)
def test_maps_of_a_fused_kernel_are_the_weights_of_eager_attention(name):
    pytest.importorskip("transformers")
    from tools.zoo.build import build
    from tools.zoo.tables import TABLES, entries

    entry = {
        entry.class_name: entry
        for table in reversed(TABLES)
        for entry in entries(table)
    }[name]
    try:
        model = build(entry, "sdpa")
    except ValueError:  # transformers has no fused attention for this class
        model = build(entry, "eager")
    reference = build(entry, "eager")
    reference.load_state_dict(model.state_dict())
    batch = entry.maker(model)
    with torch.no_grad():
        output = reference(**batch, output_attentions=True)
    expected = output.get("attentions") or [
        *output.encoder_attentions,
        *chain(*zip(output.decoder_attentions, output.cross_attentions)),
    ]
    weights = attention_maps(model, batch)
    assert len(weights) == len(expected)
    for layer, reference_weights in zip(weights, expected, strict=True):
        assert_close(weights[layer], reference_weights.float(), rtol=1e-4, atol=1e-6)


X24 = torch.randn(2, 4, 16)
SPECS = {
    "baseline": preset("baseline"),
    "qna": preset("qna"),
    "gemma2": preset("gemma2"),
    "sink": AttentionSpec(normalizer=Sink()),
    "sigmoid": AttentionSpec(normalizer=Sigmoid(bias=-1.5)),
    "alibi": AttentionSpec(position=ALiBi()),
    "window": AttentionSpec(position=SlidingWindow(inner=Rope(), window=3)),
}


@pytest.mark.parametrize("name", SPECS)
def test_maps_of_a_spec_are_those_of_the_definition(name):
    module, x = Attention(16, 4, n_kv_heads=2, spec=SPECS[name]), torch.randn(2, 6, 16)
    (weights,) = attention_maps(module, x).values()
    calls = []
    module.observers.append(calls.append)
    with torch.no_grad():
        module(x)
    call = calls[0]
    expected = attend(
        call.spec, call.q, call.k, call.v, params=call.params, causal=call.causal
    ).weights
    assert_close(weights, expected.detach(), rtol=1e-5, atol=1e-6)


class ByHand(Joint):
    """Attention written by hand, all heads at once with a learned sink (gpt-oss), or one by one."""

    def __init__(self, *, one_by_one):
        super().__init__(None, bias=False)
        self.sink = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.one_by_one = one_by_one

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.one_by_one:
            heads = zip(q.unbind(1), k.unbind(1), v.unbind(1))
            weights, outputs = zip(*(self.head(*parts) for parts in heads))
            self.weights = torch.stack(weights, 1)
            return torch.stack(outputs, 1)
        z = scores(q, k).masked_fill(later(q, k), -torch.inf)
        sinks = self.sink.view(1, 2, 1, 1).expand(len(q), 2, q.shape[2], 1)
        self.weights = F.softmax(torch.cat([z, sinks], -1), -1)[..., :-1]
        return self.weights @ v

    def head(self, q, k, v):
        z = (q @ k.mT / 2).masked_fill(later(q, k), -torch.inf)
        weights = z.softmax(-1)
        return weights, weights @ v


@pytest.mark.parametrize("one_by_one", [False, True])
def test_maps_of_attention_written_by_hand_are_its_weights(one_by_one):
    model, x = ByHand(one_by_one=one_by_one), torch.randn(2, 5, 8)
    (weights,) = attention_maps(model, x).values()
    model(x)
    assert_close(weights, model.weights.detach())


def test_chosen_heads_and_rows_are_those_of_the_whole():
    model, x = Attention(16, 4), torch.randn(2, 9, 16)
    whole = attention_maps(model, x)[""]
    some = attention_maps(model, x, heads=[3, 0], rows=[7, 2, 3, -1])
    assert (some.heads[""], some.rows[""]) == ((3, 0), (7, 2, 3, 8))
    assert torch.equal(some[""], whole[:, [3, 0]][:, :, [7, 2, 3, 8]])
    assert torch.equal(attention_maps(model, x, rows=slice(2, 6))[""], whole[:, :, 2:6])
    assert some.to_numpy()[""].shape == (2, 2, 4, 9)


def test_weights_are_computed_in_blocks_of_rows(
    monkeypatch,
):
    model, x = Attention(16, 4), torch.randn(1, 9, 16)
    whole = attention_maps(model, x)[""]
    monkeypatch.setattr(softmax_weights, "BLOCK", 2 * 4 * 9)  # two rows
    assert_close(attention_maps(model, x)[""], whole)


class Noisy(Joint):
    """Attention whose inputs have noise, as those of models that start from random slots."""

    def forward(self, x):
        q, k, v = self.heads(x + torch.randn_like(x))
        self.weights = scores(q, k).softmax(-1)
        return self.weights @ v


def test_maps_are_those_of_the_next_pass_where_it_draws_random_numbers():
    model, x = Noisy(None, bias=False), torch.randn(2, 5, 8)
    maps = attention_maps(model, x)[""]
    model(x)
    assert_close(maps, model.weights.detach())
    assert not torch.allclose(attention_maps(model, x)[""], maps)


REFUSED = [
    ({"layers": ["attn"]}, UnknownNameError),
    ({"heads": [2]}, InvalidValueError),
    ({"rows": [4]}, InvalidValueError),
    ({"rows": [-5]}, InvalidValueError),
]


def test_what_cannot_be_had_is_refused_with_the_way(
    monkeypatch,
):
    model, x = Attention(16, 2), torch.randn(1, 4, 16)
    for wanted, error in REFUSED:
        with pytest.raises(error):
            attention_maps(model, x, **wanted)
    with pytest.raises(InvalidTypeError):
        attention_maps(x, x)
    with pytest.raises(NoAttentionError):
        attention_maps(nn.Linear(16, 16), x)
    with pytest.raises(UnknownNameError):
        attention_maps(model, x)["attn"]
    monkeypatch.setattr(maps, "LIMIT", 31)  # one number less than there are
    with pytest.raises(InvalidValueError, match="rows="):
        attention_maps(model, x)
    assert attention_maps(model, x, heads=[0])[""].shape == (1, 1, 4, 4)
    assert attention_maps(model, x, rows=[])[""].shape == (1, 2, 0, 4)


def test_a_plot_has_a_picture_for_each_head_and_says_which_queries_it_shows():
    pytest.importorskip("matplotlib")
    maps = attention_maps(Attention(16, 3, head_dim=8), X24, heads=[2, 0], rows=[3, -1])
    figure = maps.plot(sample=1, width=4.0)
    pictures = figure.axes[:2]
    assert [axes.get_title() for axes in pictures] == ["head 2", "head 0"]
    for i, axes in enumerate(pictures):
        drawn = torch.from_numpy(axes.images[0].get_array().data)
        assert torch.equal(drawn, maps[""][1, i])
        number = axes.yaxis.get_major_formatter()
        assert [number(y) for y in (-1.0, 0.0, 0.5, 1.0, 2.0)] == ["", "3", "", "3", ""]
    assert figure.get_figwidth() == 4.0
    for wanted in ({"rows": []}, {"heads": []}):
        with pytest.raises(InvalidValueError, match="weights to draw"):
            attention_maps(Attention(16, 2), X24, **wanted).plot()
    with pytest.raises(InvalidValueError, match="sample from 0 to 1"):
        maps.plot(sample=2)
