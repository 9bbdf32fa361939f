"""Targets that read text, sound, proteins, tables, graphs, and those that denoise."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from tools.foreign.reference import Example, Shape
from tools.foreign.target import TOKENS, VOCAB, Made, Target, built, given, text

FOUR = Shape(heads=4)


def _x(
    heads_options: dict[str, Any] | None = None, encoder: bool = False, **options: Any
) -> Callable[[], Made]:
    def make() -> Made:
        home = importlib.import_module("x_transformers")
        layers = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, **options}
        model = home.TransformerWrapper(
            num_tokens=VOCAB,
            max_seq_len=16,
            attn_layers=(home.Encoder if encoder else home.Decoder)(**layers),
            **(heads_options or {}),
        )
        return model, text()

    return make


def _litgpt(**options: Any) -> Callable[[], Made]:
    def make() -> Made:
        home, config = (
            importlib.import_module(f"litgpt.{name}") for name in ("model", "config")
        )
        tiny = {
            "block_size": 16,
            "n_layer": 2,
            "n_embd": 32,
            "n_head": 4,
            "padded_vocab_size": VOCAB,
            "rotary_percentage": 1.0,
        }
        return home.GPT(config.Config(**{**tiny, **options})), text()

    return make


def _whisper() -> Made:
    # Word timing is compiled by numba, which no attention needs.
    if importlib.util.find_spec("numba") is None:
        numba = types.ModuleType("numba")
        vars(numba)["jit"] = lambda *args, **kwargs: lambda function: function
        sys.modules["numba"] = numba
    home = importlib.import_module("whisper.model")
    sizes = {"n_mels": 8, "n_audio_ctx": 10, "n_vocab": VOCAB, "n_text_ctx": 12}
    both = {
        f"n_{part}_{name}": n
        for part in ("audio", "text")
        for name, n in (("state", 32), ("head", 4), ("layer", 1))
    }
    return home.Whisper(home.ModelDimensions(**sizes, **both)), given(
        torch.randn(2, 8, 20), torch.randint(5, VOCAB, (2, TOKENS))
    )


_esm2 = built(
    "esm:ESM2",
    lambda: given(torch.randint(5, 20, (2, TOKENS))),
    num_layers=2,
    embed_dim=32,
    attention_heads=4,
    token_dropout=False,
)


def _esm_msa() -> Made:
    home = importlib.import_module("esm")
    names = {
        "layers": 1,
        "embed_dim": 32,
        "ffn_embed_dim": 24,
        "attention_heads": 4,
        "dropout": 0.0,
        "max_positions": 32,
    }
    more = {
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "max_tokens": 2**14,
        "max_tokens_per_msa": 2**14,
        "embed_positions_msa": True,
    }
    alphabet = home.data.Alphabet.from_architecture("msa_transformer")
    return home.MSATransformer(Namespace(**names, **more), alphabet), given(
        torch.randint(5, 20, (1, 3, TOKENS))
    )


def _old_hub() -> None:
    """Names of the client by which this package would fetch weights."""
    for name in ("boto3", "botocore", "botocore.exceptions"):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        vars(module).setdefault("ClientError", OSError)


def _old_bert() -> Made:
    _old_hub()
    home = importlib.import_module("pytorch_pretrained_bert.modeling")
    config = home.BertConfig(
        VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 5:] = 0
    return home.BertModel(config), given(
        torch.randint(5, VOCAB, (2, TOKENS)), None, mask
    )


_perceiver = built(
    "perceiver_pytorch:Perceiver",
    lambda: given(torch.randn(2, 4, 4, 3)),
    num_freq_bands=2,
    depth=1,
    max_freq=4.0,
    input_channels=3,
    input_axis=2,
    num_latents=6,
    latent_dim=32,
    cross_heads=1,
    latent_heads=4,
    cross_dim_head=8,
    latent_dim_head=8,
    num_classes=5,
)


_perceiver_io = built(
    "perceiver_pytorch:PerceiverIO",
    lambda: given(data=torch.randn(2, TOKENS, 16), queries=torch.randn(2, 5, 16)),
    dim=16,
    queries_dim=16,
    depth=1,
    num_latents=6,
    latent_dim=32,
    cross_heads=1,
    latent_heads=4,
    cross_dim_head=8,
    latent_dim_head=8,
)


def _features(length: int = TOKENS, size: int = 32) -> Callable[[], Example]:
    return lambda: given(torch.randn(2, length, size))


def _table() -> Example:
    return given(torch.randint(0, 3, (4, 2)), torch.randn(4, 3))


def _rtdl() -> Made:
    home = importlib.import_module("rtdl_revisiting_models")
    options = {
        "n_blocks": 2,
        "d_block": 32,
        "attention_n_heads": 4,
        "attention_dropout": 0.0,
        "ffn_d_hidden": 24,
        "ffn_d_hidden_multiplier": None,
    }
    model = home.FTTransformer(
        n_cont_features=3,
        cat_cardinalities=[4, 4],
        d_out=1,
        **options,
        ffn_dropout=0.0,
        residual_dropout=0.0,
    )
    return model, given(torch.randn(4, 3), torch.randint(0, 3, (4, 2)))


def _gps(kind: str) -> Callable[[], Made]:
    def make() -> Made:
        home = importlib.import_module("torch_geometric.nn.conv.gps_conv")
        model = home.GPSConv(32, None, heads=4, attn_type=kind, norm=None)
        edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        return model, given(
            torch.randn(8, 32), edges, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        )

    return make


_graph_transformer = built(
    "torch_geometric.nn.conv.transformer_conv:TransformerConv",
    lambda: given(torch.randn(5, 32), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])),
    32,
    8,
    heads=4,
)


_dit = built(
    "diffusers:DiTTransformer2DModel",
    lambda: given(
        hidden_states=torch.randn(2, 4, 8, 8),
        timestep=torch.tensor([1, 1]),
        class_labels=torch.tensor([1, 1]),
    ),
    num_attention_heads=4,
    attention_head_dim=8,
    in_channels=4,
    num_layers=2,
    sample_size=8,
    norm_num_groups=4,
    num_embeds_ada_norm=10,
)


def _sd3(qk_norm: str | None) -> Callable[[], Made]:
    def make() -> Made:
        home = importlib.import_module("diffusers")
        model = home.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=8,
            qk_norm=qk_norm,
        )
        return model, given(
            hidden_states=torch.randn(2, 4, 8, 8),
            encoder_hidden_states=torch.randn(2, 5, 16),
            pooled_projections=torch.randn(2, 16),
            timestep=torch.tensor([1, 1]),
        )

    return make


_flux = built(
    "diffusers:FluxTransformer2DModel",
    lambda: given(
        hidden_states=torch.randn(2, 6, 4),
        encoder_hidden_states=torch.randn(2, 5, 16),
        pooled_projections=torch.randn(2, 16),
        timestep=torch.tensor([1, 1]),
        img_ids=torch.zeros(6, 3),
        txt_ids=torch.zeros(5, 3),
    ),
    in_channels=4,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=16,
    pooled_projection_dim=16,
    axes_dims_rope=(4, 4, 8),
)


_unet = built(
    "diffusers:UNet2DConditionModel",
    lambda: given(torch.randn(2, 4, 8, 8), torch.tensor([1, 1]), torch.randn(2, 5, 16)),
    sample_size=8,
    block_out_channels=(16, 32),
    layers_per_block=1,
    norm_num_groups=4,
    cross_attention_dim=16,
    attention_head_dim=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)


def _torchscale() -> Made:
    home = importlib.import_module("torchscale.component.multihead_attention")
    args = Namespace(
        multiway=False,
        layernorm_eps=1e-5,
        xpos_rel_pos=False,
        xpos_scale_base=512,
        flash_attention=False,
    )
    x = torch.randn(2, TOKENS, 32)
    return home.MultiheadAttention(args, 32, 4, self_attention=True), given(x, x, x)


def _onmt(**options: Any) -> Callable[[], Made]:
    def make() -> Made:
        # Its __init__ wants tokenizers and translators; the modules do without.
        package = types.ModuleType("onmt")
        found = importlib.machinery.PathFinder.find_spec("onmt")
        package.__path__ = (
            list(found.submodule_search_locations or ()) if found is not None else []
        )
        sys.modules.setdefault("onmt", package)
        home = importlib.import_module("onmt.modules.multi_headed_attn")
        model = home.MultiHeadedAttention(
            4,
            32,
            dropout=0.0,
            is_decoder=False,
            attn_type="self",
            self_attn_type="scaled-dot",
            **options,
        )
        x = torch.randn(2, TOKENS, 32)
        return model, given(x, x, x)

    return make


def _xt_rows() -> list[Target]:
    cap = {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 50.0}
    rows: list[tuple[str, Callable[[], Made], int, Shape]] = [
        ("decoder, written out", _x(), 2, FOUR),
        ("decoder, fused", _x(attn_flash=True), 2, FOUR),
        ("rotary positions", _x(rotary_pos_emb=True), 2, FOUR),
        ("ALiBi", _x(alibi_pos_bias=True), 2, FOUR),
        ("relative bias of T5", _x(rel_pos_bias=True), 2, FOUR),
        ("qk norm", _x(attn_qk_norm=True), 2, FOUR),
        ("tiled groups of keys", _x(attn_kv_heads=2), 2, FOUR),
        ("tiled groups of keys, fused", _x(attn_kv_heads=2, attn_flash=True), 2, FOUR),
        ("one key head", _x(attn_one_kv_head=True), 2, FOUR),
        ("scripted cap", _x(**cap), 2, Shape(heads=4, cap=50.0)),
        ("talking heads", _x(attn_pre_talking_heads=True), 2, FOUR),
        ("talking heads after the softmax", _x(attn_post_talking_heads=True), 2, FOUR),
        ("memory keys", _x(attn_num_mem_kv=2), 2, FOUR),
        ("residual attention", _x(residual_attn=True), 2, FOUR),
        ("values gated", _x(attn_gate_values=True), 2, FOUR),
        ("dynamic position bias", _x(dynamic_pos_bias=True), 2, FOUR),
        ("encoder", _x(encoder=True), 2, FOUR),
    ]
    return [
        Target(
            package="x-transformers",
            name=n,
            make=m,
            attentions=a,
            shape=s,
            double=n != "dynamic position bias",
        )
        for n, m, a, s in rows
    ]


def _litgpt_rows() -> list[Target]:
    rows: list[tuple[str, Callable[[], Made], int, Shape]] = [
        ("Pythia style", _litgpt(), 2, FOUR),
        (
            "groups of keys",
            _litgpt(
                n_query_groups=2,
                norm_class_name="RMSNorm",
                mlp_class_name="LLaMAMLP",
                intermediate_size=24,
                parallel_residual=False,
                bias=False,
            ),
            2,
            FOUR,
        ),
        ("one key head", _litgpt(n_query_groups=1), 2, FOUR),
        (
            "Gemma 2 style, capped",
            _litgpt(attention_logit_softcapping=8.0, n_query_groups=2),
            2,
            Shape(heads=4, cap=8.0),
        ),
        ("qk norm", _litgpt(norm_qk=True, norm_class_name="RMSNorm"), 2, FOUR),
    ]
    return [
        Target(package="litgpt", name=n, make=m, attentions=a, shape=s)
        for n, m, a, s in rows
    ]


SEQUENCES: list[Target] = [
    *_xt_rows(),
    *_litgpt_rows(),
    Target(
        package="openai-whisper",
        name="Whisper",
        make=_whisper,
        attentions=3,
        shape=FOUR,
        double=False,
    ),
    Target(package="fair-esm", name="ESM-2", make=_esm2, attentions=2, shape=FOUR),
    Target(
        package="fair-esm",
        name="MSA Transformer",
        make=_esm_msa,
        attentions=2,
        shape=Shape(heads=4, order=("hbts", "hbbts")),
    ),
    Target(
        package="pytorch-pretrained-bert",
        name="BERT, padded",
        make=_old_bert,
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="perceiver-pytorch",
        name="Perceiver",
        make=_perceiver,
        attentions=2,
        shape=Shape(heads=(1, 4)),
    ),
    Target(
        package="perceiver-pytorch",
        name="Perceiver IO",
        make=_perceiver_io,
        attentions=3,
        shape=Shape(heads=(1, 4, 1)),
    ),
    Target(
        package="conformer",
        name="Conformer block",
        make=built(
            "conformer:ConformerBlock",
            _features(),
            dim=32,
            dim_head=8,
            heads=4,
            conv_kernel_size=3,
        ),
        attentions=1,
        shape=FOUR,
    ),
    Target(
        package="local-attention",
        name="local transformer",
        make=built(
            "local_attention:LocalTransformer",
            lambda: text(8),
            num_tokens=VOCAB,
            max_seq_len=8,
            dim=32,
            depth=2,
            heads=4,
            dim_head=8,
            local_attn_window_size=4,
            num_residual_streams=1,
        ),
        attentions=2,
        shape=Shape(heads=4, order="Mbts"),
    ),
    Target(
        package="tab-transformer-pytorch",
        name="FT-Transformer",
        make=built(
            "tab_transformer_pytorch:FTTransformer",
            _table,
            categories=(4, 4),
            num_continuous=3,
            dim=32,
            depth=2,
            heads=4,
            dim_head=8,
            num_residual_streams=1,
        ),
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="rtdl-revisiting-models",
        name="FT-Transformer",
        make=_rtdl,
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="PaLM-pytorch",
        name="PaLM",
        make=built(
            "palm_pytorch:PaLM",
            text,
            num_tokens=VOCAB,
            dim=32,
            depth=2,
            heads=4,
            dim_head=8,
        ),
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="CoCa-pytorch",
        name="CoCa, its attention pooling",
        make=built(
            "coca_pytorch.coca_pytorch:CrossAttention",
            lambda: given(torch.randn(2, 5, 32), torch.randn(2, TOKENS, 32)),
            dim=32,
            heads=4,
            dim_head=8,
        ),
        attentions=1,
        shape=FOUR,
    ),
    Target(
        package="flamingo-pytorch",
        name="Perceiver resampler",
        make=built(
            "flamingo_pytorch:PerceiverResampler",
            lambda: given(torch.randn(2, 2, TOKENS, 32)),
            dim=32,
            depth=1,
            dim_head=8,
            heads=4,
            num_latents=5,
            num_media_embeds=2,
        ),
        attentions=1,
        shape=Shape(heads=4, order="bhbts"),
    ),
    Target(
        package="x-clip",
        name="text tower",
        make=built(
            "x_clip.x_clip:TextTransformer",
            text,
            dim=32,
            num_tokens=VOCAB,
            max_seq_len=16,
            dim_head=8,
            depth=2,
            heads=4,
        ),
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="isab-pytorch",
        name="induced set attention",
        make=built("isab_pytorch:ISAB", _features(), dim=32, heads=4, num_latents=5),
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="torchscale",
        name="multi-head attention",
        make=_torchscale,
        attentions=1,
        shape=FOUR,
    ),
    Target(
        package="OpenNMT-py",
        name="multi-head attention",
        make=_onmt(),
        attentions=1,
        shape=FOUR,
    ),
    Target(
        package="OpenNMT-py",
        name="relative positions of Shaw",
        make=_onmt(max_relative_positions=4),
        attentions=1,
        shape=FOUR,
    ),
    Target(
        package="torch-geometric",
        name="GPS, multi-head",
        make=_gps("multihead"),
        attentions=1,
        shape=FOUR,
    ),
    Target(
        package="torch-geometric",
        name="GPS, Performer",
        make=_gps("performer"),
        attentions=0,
        shape=FOUR,
    ),
    Target(
        package="torch-geometric",
        name="attention over edges",
        make=_graph_transformer,
        attentions=0,
        shape=FOUR,
    ),
    Target(package="diffusers", name="DiT", make=_dit, attentions=2, shape=FOUR),
    Target(package="diffusers", name="SD3", make=_sd3(None), attentions=2, shape=FOUR),
    Target(
        package="diffusers",
        name="SD3.5, qk norm",
        make=_sd3("rms_norm"),
        attentions=2,
        shape=FOUR,
    ),
    Target(
        package="diffusers", name="Flux", make=_flux, attentions=2, shape=Shape(heads=2)
    ),
    Target(
        package="diffusers", name="UNet with text", make=_unet, attentions=8, shape=FOUR
    ),
]
