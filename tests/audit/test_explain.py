"""explain says what attention really does: of published architectures, and of layers that are right or broken."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.attention import Attention, from_heads
from tests.drawing import randint, randn
from torch import nn

import qkeel
from qkeel.audit import Explanation
from qkeel.audit.recipes import compress
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOW = {"head_dim": 16, "sliding_window": 4}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
NONE = ("none", "", None, "none", False, "")
ROPE = (8, "half", 1e4)
# Per architecture its sizes, and of each attention: the norm of q (kind, over, eps, gain, bias, order), the rotation
# (dims, pairing, base), scale, cap and heads of keys. From the modeling files of transformers 5.23.
ARCHITECTURES = {
    "Llama": (GROUPED, [(NONE, ROPE, 8**-0.5, None, 2)]),
    "Qwen3": (
        {**GROUPED, "head_dim": 16},
        [
            (
                ("RMS", "head", 1e-6, "per dim", False, "before RoPE"),
                (16, "half", 1e4),
                0.25,
                None,
                2,
            )
        ],
    ),
    "Olmo2": (
        GROUPED,
        [
            (
                ("RMS", "layer", 1e-5, "per head and dim", False, "before RoPE"),
                ROPE,
                8**-0.5,
                None,
                2,
            )
        ],
    ),
    "Gemma2": (
        {**GROUPED, **WINDOW, "query_pre_attn_scalar": 64},
        [(NONE, (16, "half", 1e4), 0.125, 50.0, 2)],
    ),
    "Gemma3Text": (
        {
            **GROUPED,
            **WINDOW,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [
            (
                ("RMS", "head", 1e-6, "per dim, 1 + w", False, "before RoPE"),
                (16, "half", base),
                1 / 16,
                None,
                2,
            )
            for base in (1e4, 1e6)
        ],
    ),
    "GPTNeoX": (SIZES, [(NONE, (2, "one pair", None), 8**-0.5, None, 4)]),
    "Cohere": (
        {**GROUPED, "use_qk_norm": True},
        [
            (
                ("layer", "head", 1e-5, "per head and dim", False, "before RoPE"),
                (8, "interleaved", 5e5),
                8**-0.5,
                None,
                2,
            )
        ],
    ),
    "DeepseekV3": (
        {**SIZES, **LATENT, "num_key_value_heads": 4},
        [(NONE, (4, "half", 1e4), 12**-0.5, None, 4)],
    ),
    "GptOss": (
        {**GROUPED, **WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
        [(NONE, (16, "half", None), 0.25, None, 2)],
    ),
    "OPT": (
        {
            **SIZES,
            "ffn_dim": 16,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 16,
        },
        [(NONE, None, 1.0, None, 4)],
    ),
    "T5": (
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 16,
            "num_layers": 1,
            "num_heads": 4,
            "vocab_size": 32,
        },
        [(NONE, None, 1.0, None, 4)] * 3,
    ),
    "Swinv2": (
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [1],
            "num_heads": [4],
            "window_size": 4,
        },
        [(("L2", "head", None, "none", False, ""), None, 10.0, None, 4)],
    ),
}
IDS = randint(4, 32, (2, 12), seed=0)
BATCHES = {
    "T5": {"input_ids": IDS, "decoder_input_ids": IDS},
    "Swinv2": randn(1, 3, 32, 32, seed=0),
}


def built(name):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name][0])
    is_decoder = name not in ("T5", "Swinv2")
    auto = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    return auto.from_config(config)


def sites_of(name):
    return qkeel.explain(built(name), BATCHES.get(name, IDS)).sites


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_recipe_of_a_published_architecture_is_found(name):
    found = qkeel.explain(built(name), BATCHES.get(name, IDS))
    expected = ARCHITECTURES[name][1]
    for site, (norm, rotation, scale, cap, groups) in zip(
        found.sites, expected, strict=True
    ):
        for side in (site.query, site.key):
            fields = ("kind", "over", "eps", "gain", "bias", "order")
            assert tuple(getattr(side, field) for field in fields) == norm
        turned = site.rotation
        assert rotation == (turned and (turned.dims, turned.pairing, turned.base))
        assert site.scale == pytest.approx([scale] * site.n_heads, rel=1e-3)
        assert (site.n_heads, site.n_kv_heads, site.softcap) == (4, groups, cap)
        assert site.idle == site.unknown == ()
    assert found.differences == ()


def test_what_only_some_architectures_have_is_found():
    assert [site.window for site in sites_of("Gemma3Text")] == [4, None]
    (oss,) = sites_of("GptOss")
    assert oss.sinks == "1 sink logit per head in the softmax"
    yarn = 1.34657  # 0.1 ln 32 + 1
    assert oss.query.factor == pytest.approx(yarn, rel=1e-4)
    (opt,) = sites_of("OPT")  # the scale is folded into q
    assert opt.query.factor == pytest.approx(8**-0.5, rel=1e-4)
    assert opt.total_scale == pytest.approx(8**-0.5, rel=1e-4)
    assert not any("times the usual" in line for line in opt.lines())
    (deepseek,) = sites_of("DeepseekV3")
    assert deepseek.layer_type == "latent"
    t5 = sites_of("T5")
    assert [site.bias for site in t5] == [True, True, False]
    assert [site.visible[:5] for site in t5] == ["every", "keys ", "every"]


def rope(x):
    """[b t h d] turned in halves, base 10,000."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * c + b * s, b * c - a * s], -1)


class ByHand(Attention):
    """Attention whose q and k [b t h 8] go through `step(x, norm)` before the scores."""

    def __init__(self, step, heads=4, mask=None):
        super().__init__(None, 8 * heads, heads, bias=False)
        self.step, self.mask = step, mask
        self.q_norm, self.k_norm = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)

    def forward(self, x):
        q, k, v = self.heads(x)
        q = self.step(q.transpose(1, 2), self.q_norm).transpose(1, 2)
        k = self.step(k.transpose(1, 2), self.k_norm).transpose(1, 2)
        is_causal = self.mask is None
        y = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=is_causal)
        return from_heads(y)


def hand_written(step, heads=4, mask=None):
    torch.manual_seed(0)
    return nn.Sequential(ByHand(step, heads, mask))


def by_hand(step, tokens=12):
    return qkeel.explain(hand_written(step), torch.randn(2, tokens, 32)).sites[0]


EITHER = "before or after RoPE (equivalent without a gain per dim)"


def norm_then_rope(x, norm):
    return rope(norm(x))


@pytest.mark.parametrize(
    ("step", "norm"),
    [
        (
            lambda x, norm: 1.2 * F.rms_norm(rope(x), (8,), eps=1e-5),  # nanochat
            ("RMS", "head", None, "scalar 1.2", EITHER),
        ),
        (norm_then_rope, ("RMS", "head", 1e-6, "per dim", "before RoPE")),
        (
            lambda x, norm: norm(rope(x)),
            ("RMS", "head", 1e-6, "per dim", "after RoPE"),
        ),
        (lambda x, norm: F.normalize(x, dim=-1), ("L2", "head", None, "none", "")),
        (lambda x, norm: 3 * x, ("none", "", None, "none", "")),
        # Of a part of a head, over heads, clamped, and convolved: what fits no recipe is unknown, not guessed.
        *(
            (step, ("unknown", "", None, "none", ""))
            for step in (
                lambda x, norm: torch.cat(
                    [F.rms_norm(x[..., :4], (4,)), x[..., 4:]], -1
                ),
                lambda x, norm: F.rms_norm(x.mT, (4,)).mT,
                lambda x, norm: x.clamp(-1, 1),
                lambda x, norm: x + F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1],
            )
        ),
    ],
)
def test_a_hand_written_recipe_is_found_or_unknown(step, norm):
    site = by_hand(step)
    for side in (site.query, site.key):
        assert (side.kind, side.over, side.eps, side.gain, side.order) == norm
    assert (site.rotation is not None) == ("RoPE" in norm[-1])
    expected = 3.0 if norm[0] == "none" else 1.0
    assert site.query.factor == pytest.approx(expected)


@pytest.mark.parametrize("side", ["q_norm", "k_norm"])
def test_a_rotation_of_one_side_alone_is_unknown(side):
    model = hand_written(lambda x, norm: x)
    model[0].step = lambda x, norm: rope(x) if norm is getattr(model[0], side) else x
    (site,) = qkeel.explain(model, torch.randn(2, 12, 32)).sites
    assert site.unknown == ("only one of q and k changes with position",)


def test_a_norm_without_a_stated_eps_is_found_beside_tokens_that_are_zero():
    x = torch.randn(2, 12, 32)
    x[:, 5] = 0
    (site,) = qkeel.explain(
        hand_written(lambda x, norm: F.rms_norm(rope(x), (8,))), x
    ).sites
    assert (site.query.kind, site.query.eps) == ("RMS", None)


@pytest.mark.parametrize("shape", ["per dim", "per head"])
def test_a_gain_is_told_where_heads_are_as_many_as_their_dimensions(shape):
    """All gains were taken for those of heads: of any other nothing was known, and it was said not to rotate."""

    def step(x, norm):
        if shape == "per dim":
            return rope(norm(x))
        return rope(F.rms_norm(x, (8,), eps=1e-6) * norm.weight[:, None])

    model = hand_written(step, heads=8)
    for norm in (model[0].q_norm, model[0].k_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    (site,) = qkeel.explain(model, torch.randn(2, 12, 64)).sites
    assert (site.query.gain, site.key.gain) == (shape, shape)
    assert site.rotation is not None


def test_a_rotation_behind_an_unknown_norm_is_unknown():
    report = by_hand(lambda x, norm: rope(x.clamp(-1, 1)))
    assert report.lines()[2].split() == ["position", "unknown"]


def thrown_away(x, norm):
    norm(x)
    return x


def test_a_norm_that_does_nothing_is_told():
    never = tuple(f"{x}_norm (RMSNorm) is never called" for x in "qk")
    assert by_hand(lambda x, norm: rope(x)).idle == never
    unused = "{0}_norm (RMSNorm) is called on {0}, and its result is not used".format
    assert by_hand(thrown_away).idle == (unused("q"), unused("k"))
    assert by_hand(norm_then_rope).idle == ()
    assert "fewer than three tokens" in "\n".join(by_hand(norm_then_rope, 1).lines())


def test_weights_that_are_computed_from_stored_ones_are_followed():
    model, x = hand_written(norm_then_rope), torch.randn(2, 12, 32)
    plain = str(qkeel.explain(model, x))
    qkeel.apply(model, "sigma_reparam", batch=x)
    assert str(qkeel.explain(model, x)) == plain


@dataclasses.dataclass
class Config:
    use_qk_norm: bool


@pytest.mark.parametrize(
    "config", [{"use_qk_norm": True}, Config(True), SimpleNamespace(use_qk_norm=True)]
)
def test_a_norm_of_the_config_that_is_not_applied_is_a_difference(config):
    model = hand_written(lambda x, norm: rope(x))
    model.config = config
    (said,) = qkeel.explain(model, torch.randn(1, 6, 32)).differences
    assert said.startswith("config.use_qk_norm is true, but no norm is applied to q or")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_logit_softcapping": 30.0}, ["softcapping is 30.0", "cap is 50"]),
        ({"query_pre_attn_scalar": 16}, ["means logits 0.25", "scale is 0.125"]),
        ({"num_attention_heads": 8}, ["num_attention_heads is 8", "observed: 4"]),
        ({"head_dim": 8}, ["head_dim is 8", "observed: 16"]),
        ({"rope_parameters": {"rope_theta": 5e5}}, ["rope_theta is 500,000", "10,000"]),
        ({"qk_norm": False}, []),
    ],
)
def test_where_the_config_says_something_else_it_is_a_sentence(changes, words):
    gemma = built("Gemma2")
    for name, value in changes.items():  # after it was built
        setattr(gemma.config, name, value)
    explanation = qkeel.explain(gemma, IDS)
    found = explanation.differences
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)
    # What agrees is compared too, and the table says so.
    compared = {
        setting: (says, does) for setting, says, does, _ in explanation.compared
    }
    assert len(compared) >= 5
    for setting in ("num_attention_heads", "head_dim", "attn_logit_softcapping"):
        says, does = compared[setting]
        is_same = float(says) == float(does.rpartition(" ")[2])
        assert is_same == (setting not in changes)
    assert all(setting in explanation.table() for setting in compared)


@pytest.mark.parametrize(
    ("config", "window", "differs"),
    [
        ({"sliding_window": 4}, 12, True),
        ({"sliding_window": 11}, 12, False),  # the batch does not show it
        ({"sliding_window": 4, "use_sliding_window": False}, 12, False),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, 12, False),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, 12, True),
        ({"sliding_window": 9}, 4, True),
        ({"sliding_window": None}, 4, True),
        ({"sliding_window": 5}, 4, False),  # with or without its own token
        ({}, 4, False),
    ],
)
def test_a_window_of_the_config_is_compared(config, window, differs):
    row = torch.arange(12)
    mask = (row[:, None] >= row) & (row[:, None] - row < window)
    model = hand_written(norm_then_rope, mask=mask)
    model.config = config
    found = qkeel.explain(model, torch.randn(1, 12, 32))
    assert found.sites[0].window == (window if window < 12 else None)
    assert len(found.differences) == differs


def test_without_a_config_nothing_is_said_to_agree():
    found = qkeel.explain(hand_written(norm_then_rope), torch.randn(1, 12, 32))
    assert found.compared == ()
    assert "no setting of a config was compared" in found.table()


def test_arguments_and_failures():
    model = built("Llama").eval()
    mask = torch.ones(2, 12, dtype=torch.int64)
    by_name = qkeel.explain(model, {"input_ids": IDS, "attention_mask": mask})
    assert by_name.sites == qkeel.explain(model, (IDS,)).sites
    for batch, error in (
        ("lamp", InvalidTypeError),
        (torch.zeros(2, 3), InvalidValueError),
    ):
        with pytest.raises(error):
            qkeel.explain(model, batch)
    with pytest.raises(RefusedError, match="no attention"):
        qkeel.explain(nn.Linear(4, 4), torch.ones(2, 4))
    own = qkeel.nn.Attention(32, 4, spec=qkeel.preset("qwen3"))
    with pytest.raises(RefusedError, match="spec"):
        qkeel.explain(own, torch.randn(1, 4, 32))


def test_the_report_groups_layers_that_work_alike():
    (first, second) = sites_of("Gemma3Text")
    text = str(Explanation(model="Gemma", sites=(first, second)))
    head = "Gemma: 2 attention layers\nmodel.layers.0.self_attn\n  heads     4 heads of 16, 2 of keys"
    assert text.startswith(head)
    assert "base 1e+06" in text
    second = dataclasses.replace(first, name="model.layers.1.self_attn")
    text = str(Explanation(model="Gemma", sites=(first, second)))
    assert "model.layers.{0-1}.self_attn" in text


def test_names_that_differ_in_a_number_are_written_once():
    assert compress(["a.0.b", "a.1.b", "a.3.b"]) == "a.{0-1,3}.b"
    assert compress(["a.7.b"]) == "a.7.b"
    assert compress(["x", ""]) == "x, (the model)"
