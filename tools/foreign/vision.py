"""Targets that see images: timm, torchvision, vit-pytorch and others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tools.foreign.reference import Shape
from tools.foreign.target import Made, Target, built, given, image

VIT = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 24,
}


def _timm(
    architecture: str, side: int = 32, fused: bool | None = None, **options: Any
) -> Callable[[], Made]:
    def make() -> Made:
        timm = importlib.import_module("timm")
        model = timm.create_model(architecture, num_classes=5, **options)
        for module in model.modules() if fused is not None else ():
            if "fused_attn" in vars(module):
                module.fused_attn = fused
        return model, image(side)

    return make


def _mvit() -> Made:
    home = importlib.import_module("timm.models.mvitv2")
    config = home.MultiScaleVitCfg(depths=(1, 1), embed_dim=16, num_heads=2)
    return home.MultiScaleVit(config, img_size=(64, 64), num_classes=5), image(64)


def _gcvit() -> Made:
    home = importlib.import_module("timm.models.gcvit")
    options = {
        "img_size": 64,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_ratio": (4, 4),
    }
    return home.GlobalContextVit(**options, window_size=4, num_classes=5), image(64)


def _torchvision(name: str, side: int = 32, **options: Any) -> Callable[[], Made]:
    return built(f"torchvision.models:{name}", lambda: image(side), **options)


def _vit_pytorch(
    module: str, name: str, side: int = 32, **options: Any
) -> Callable[[], Made]:
    return built(f"vit_pytorch.{module}:{name}", lambda: image(side), **options)


TINY: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
}
SWIN: dict[str, Any] = {
    "img_size": 64,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
TV_SWIN: dict[str, Any] = {
    "patch_size": [4, 4],
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": [4, 4],
    "num_classes": 5,
}
SWIN_SHAPE = Shape(heads=(2, 2, 4, 4), low=-50.0)


def _timm_rows() -> list[Target]:
    rows: list[tuple[str, Callable[[], Made], int, Shape]] = [
        (
            "ViT, fused",
            _timm("vit_tiny_patch16_224", fused=True, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "ViT, written out",
            _timm("vit_tiny_patch16_224", fused=False, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "ViT with qk norm",
            _timm("vit_tiny_patch16_224", fused=True, qk_norm=True, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "ViT with relative bias",
            _timm("vit_relpos_small_patch16_224", fused=True, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "SigLIP",
            _timm("vit_base_patch16_siglip_224", fused=True, **TINY),
            3,
            Shape(heads=4),
        ),
        (
            "NaFlexViT",
            _timm(
                "naflexvit_base_patch16_gap",
                fused=True,
                **{k: v for k, v in TINY.items() if k != "img_size"},
            ),
            2,
            Shape(heads=4),
        ),
        (
            "EVA02",
            _timm("eva02_tiny_patch14_224", fused=True, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "BEiT, fused",
            _timm("beit_base_patch16_224", fused=True, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "BEiT, written out",
            _timm("beit_base_patch16_224", fused=False, **TINY),
            2,
            Shape(heads=4),
        ),
        (
            "Swin, fused",
            _timm("swin_tiny_patch4_window7_224", 64, fused=True, **SWIN),
            4,
            SWIN_SHAPE,
        ),
        (
            "Swin, written out",
            _timm("swin_tiny_patch4_window7_224", 64, fused=False, **SWIN),
            4,
            SWIN_SHAPE,
        ),
        ("Swin V2", _timm("swinv2_tiny_window8_256", 64, **SWIN), 4, SWIN_SHAPE),
        ("CaiT", _timm("cait_xxs24_224", **TINY), 4, Shape(heads=4)),
        ("XCiT", _timm("xcit_tiny_12_p16_224", **TINY), 4, Shape(heads=4)),
        ("MViT V2", _mvit, 2, Shape(heads=(2, 4))),
        (
            "PVT V2",
            _timm(
                "pvt_v2_b0",
                64,
                depths=(1, 1, 1, 1),
                embed_dims=(8, 16, 32, 32),
                num_heads=(1, 2, 4, 4),
            ),
            4,
            Shape(heads=(1, 2, 4, 4)),
        ),
        (
            "Twins",
            _timm(
                "twins_svt_small",
                64,
                img_size=64,
                depths=(2, 2),
                embed_dims=(16, 32),
                num_heads=(2, 4),
                wss=(4, 4),
                sr_ratios=(4, 2),
                mlp_ratios=(2, 2),
            ),
            4,
            Shape(heads=(2, 2, 4, 4), order=("bbhts", "bhts", "bbhts", "bhts")),
        ),
        (
            "LeViT",
            _timm(
                "levit_128s",
                64,
                img_size=64,
                embed_dim=(16, 32, 48),
                depth=(1, 1, 1),
                num_heads=(2, 4, 4),
                key_dim=8,
            ),
            5,
            Shape(heads=(2, 2, 4, 4, 4), low=-1e30),
        ),
        (
            "Hiera",
            _timm(
                "hiera_tiny_224",
                64,
                img_size=(64, 64),
                embed_dim=16,
                num_heads=1,
                stages=(1, 1, 1, 1),
            ),
            4,
            Shape(heads=(1, 2, 4, 8), order=("bhbts", "bhbts", "bhbts", "bhts")),
        ),
        ("GCViT", _gcvit, 4, Shape(heads=(2, 2, 4, 4))),
        (
            "SAM",
            _timm(
                "samvit_base_patch16",
                use_rope=False,
                window_size=2,
                global_attn_indexes=(1,),
                **TINY,
            ),
            2,
            Shape(heads=4),
        ),
        (
            "DaViT",
            _timm(
                "davit_tiny",
                64,
                depths=(1, 1),
                embed_dims=(16, 32),
                num_heads=(2, 4),
                window_size=4,
            ),
            4,
            Shape(heads=(2, 2, 4, 4)),
        ),
    ]
    return [
        Target(package="timm", name=n, make=m, attentions=a, shape=s)
        for n, m, a, s in rows
    ]


def _torchvision_rows() -> list[Target]:
    vit = {
        "image_size": 32,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 24,
        "num_classes": 5,
    }
    maxvit = {
        "input_size": (64, 64),
        "stem_channels": 16,
        "partition_size": 4,
        "block_channels": [16, 32],
        "block_layers": [1, 1],
        "head_dim": 8,
        "stochastic_depth_prob": 0.0,
        "num_classes": 5,
    }
    rows: list[tuple[str, Callable[[], Made], int, Shape]] = [
        ("ViT", _torchvision("VisionTransformer", **vit), 2, Shape(heads=4)),
        ("Swin", _torchvision("SwinTransformer", 64, **TV_SWIN), 4, SWIN_SHAPE),
        (
            "MaxViT",
            _torchvision("MaxVit", 64, **maxvit),
            4,
            Shape(heads=(2, 2, 4, 4), order="bbhts"),
        ),
    ]
    return [
        Target(package="torchvision", name=n, make=m, attentions=a, shape=s)
        for n, m, a, s in rows
    ]


def _vit_pytorch_rows() -> list[Target]:
    heads = Shape(heads=4)
    small = {**VIT, "dim_head": 8}
    rows: list[tuple[str, Callable[[], Made], int, Shape]] = [
        ("ViT", _vit_pytorch("vit", "ViT", **small), 2, heads),
        ("SimpleViT", _vit_pytorch("simple_vit", "SimpleViT", **small), 2, heads),
        (
            "SimpleViT with qk norm",
            _vit_pytorch("simple_vit_with_qk_norm", "SimpleViT", **small),
            2,
            heads,
        ),
        ("DeepViT", _vit_pytorch("deepvit", "DeepViT", **small), 2, heads),
        ("CaiT", _vit_pytorch("cait", "CaiT", **small, cls_depth=1), 3, heads),
        ("parallel ViT", _vit_pytorch("parallel_vit", "ViT", **small), 4, heads),
        (
            "ViT for small data sets",
            _vit_pytorch("vit_for_small_dataset", "ViT", **small),
            2,
            heads,
        ),
        ("RvT", _vit_pytorch("rvt", "RvT", **small), 2, heads),
        (
            "NesT",
            _vit_pytorch(
                "nest",
                "NesT",
                image_size=32,
                patch_size=4,
                num_classes=5,
                dim=16,
                heads=2,
                num_hierarchies=2,
                block_repeats=(1, 1),
                dim_head=8,
            ),
            2,
            Shape(heads=(2, 4)),
        ),
        (
            "CrossViT",
            _vit_pytorch(
                "cross_vit",
                "CrossViT",
                image_size=32,
                num_classes=5,
                sm_dim=16,
                lg_dim=32,
                sm_patch_size=8,
                sm_enc_heads=4,
                sm_enc_mlp_dim=24,
                sm_enc_dim_head=8,
                lg_patch_size=16,
                lg_enc_depth=1,
                lg_enc_heads=4,
                lg_enc_mlp_dim=24,
                lg_enc_dim_head=8,
                cross_attn_depth=1,
                cross_attn_heads=4,
                cross_attn_dim_head=8,
                depth=1,
            ),
            4,
            heads,
        ),
        (
            "CvT",
            _vit_pytorch(
                "cvt",
                "CvT",
                s1_emb_dim=16,
                s1_heads=1,
                s1_depth=1,
                s2_emb_dim=32,
                s2_heads=2,
                s2_depth=1,
                s3_emb_dim=32,
                s3_heads=4,
                s3_depth=1,
                num_classes=5,
            ),
            3,
            Shape(heads=(1, 2, 4)),
        ),
        (
            "Twins-SVT",
            _vit_pytorch(
                "twins_svt",
                "TwinsSVT",
                64,
                num_classes=5,
                s1_emb_dim=16,
                s1_patch_size=4,
                s1_local_patch_size=4,
                s1_global_k=4,
                s2_emb_dim=16,
                s2_patch_size=2,
                s2_local_patch_size=2,
                s2_global_k=2,
                s3_emb_dim=16,
                s3_patch_size=2,
                s3_local_patch_size=2,
                s3_global_k=2,
                s3_depth=1,
                s4_emb_dim=16,
                s4_patch_size=2,
                s4_local_patch_size=1,
                s4_global_k=1,
                s4_depth=1,
            ),
            14,
            Shape(heads=8),
        ),
        (
            "RegionViT",
            _vit_pytorch(
                "regionvit",
                "RegionViT",
                64,
                dim=(16, 16, 16, 16),
                depth=(1, 1, 1, 1),
                window_size=2,
                num_classes=5,
            ),
            8,
            heads,
        ),
        (
            "MaxViT",
            _vit_pytorch(
                "max_vit",
                "MaxViT",
                64,
                num_classes=5,
                dim=16,
                depth=(1, 1),
                dim_head=8,
                window_size=4,
                dropout=0.0,
            ),
            4,
            Shape(heads=(2, 2, 4, 4)),
        ),
        (
            "LeViT",
            _vit_pytorch(
                "levit",
                "LeViT",
                64,
                image_size=64,
                num_classes=5,
                dim=(16, 32),
                depth=1,
                heads=(2, 4),
                mlp_mult=2,
                stages=2,
                dim_key=8,
                dim_value=8,
            ),
            3,
            Shape(heads=(2, 4, 4)),
        ),
        (
            "T2T-ViT",
            _vit_pytorch(
                "t2t",
                "T2TViT",
                image_size=32,
                num_classes=5,
                dim=16,
                depth=1,
                heads=2,
                mlp_dim=24,
                dim_head=8,
                t2t_layers=((7, 4), (3, 2)),
            ),
            2,
            Shape(heads=(1, 2)),
        ),
    ]
    return [
        Target(package="vit-pytorch", name=n, make=m, attentions=a, shape=s)
        for n, m, a, s in rows
    ]


def _swin_pytorch() -> Made:
    home = importlib.import_module("swin_transformer_pytorch")
    options = {
        "hidden_dim": 16,
        "layers": (2, 2, 2, 2),
        "heads": (2, 2, 4, 4),
        "head_dim": 8,
        "window_size": 2,
        "num_classes": 5,
    }
    return home.SwinTransformer(**options, downscaling_factors=(4, 2, 2, 2)), image(64)


_sam = built(
    "segment_anything.modeling.image_encoder:ImageEncoderViT",
    lambda: image(64),
    img_size=64,
    patch_size=8,
    embed_dim=32,
    depth=2,
    num_heads=4,
    out_chans=16,
    use_rel_pos=True,
    window_size=4,
    global_attn_indexes=(1,),
)


_sam_decoder = built(
    "segment_anything.modeling.transformer:TwoWayTransformer",
    lambda: given(
        torch.randn(2, 32, 4, 4), torch.randn(2, 32, 4, 4), torch.randn(2, 5, 32)
    ),
    depth=1,
    embedding_dim=32,
    num_heads=4,
    mlp_dim=24,
    attention_downsample_rate=1,
)


def _monai_vit() -> Made:
    home = importlib.import_module("monai.networks.nets.vit")
    options = {
        "hidden_size": 32,
        "mlp_dim": 24,
        "num_layers": 2,
        "num_heads": 4,
        "spatial_dims": 2,
    }
    return home.ViT(in_channels=3, img_size=32, patch_size=8, **options), image()


_monai_swin = built(
    "monai.networks.nets.swin_unetr:SwinTransformer",
    lambda: given(torch.randn(1, 1, 32, 32, 32)),
    in_chans=1,
    embed_dim=16,
    window_size=(2, 2, 2),
    patch_size=(2, 2, 2),
    depths=(2, 2, 2, 2),
    num_heads=(2, 2, 4, 4),
)


_monai_block = built(
    "monai.networks.blocks.selfattention:SABlock",
    lambda: given(torch.randn(2, 7, 32)),
    32,
    4,
    use_flash_attention=True,
)


_monai_cross = built(
    "monai.networks.blocks.crossattention:CrossAttentionBlock",
    lambda: given(torch.randn(2, 7, 32), torch.randn(2, 5, 32)),
    32,
    4,
)


_lightglue = built(
    "kornia.feature.lightglue:TransformerLayer",
    lambda: given(
        torch.randn(2, 7, 32),
        torch.randn(2, 7, 32),
        torch.randn(2, 2, 1, 7, 8),
        torch.randn(2, 2, 1, 7, 8),
    ),
    32,
    4,
)


_botnet = built(
    "bottleneck_transformer_pytorch:BottleStack",
    lambda: image(8, 16),
    dim=16,
    fmap_size=8,
    dim_out=16,
    proj_factor=2,
    num_layers=2,
    heads=4,
    dim_head=8,
    downsample=False,
)


_axial = built(
    "axial_attention:AxialAttention", lambda: image(6, 32), dim=32, dim_index=1, heads=4
)


_slots = built(
    "slot_attention:MultiHeadSlotAttention",
    lambda: given(torch.randn(2, 7, 32)),
    num_slots=3,
    dim=32,
    heads=4,
    dim_head=8,
    iters=1,
)


def _open_clip(**options: Any) -> Callable[[], Made]:
    def make() -> Made:
        home = importlib.import_module("open_clip.transformer")
        if options.get("text"):
            model = home.TextTransformer(
                context_length=7,
                vocab_size=40,
                width=32,
                heads=4,
                layers=2,
                output_dim=16,
            )
            return model, given(torch.randint(5, 40, (2, 7)))
        model = home.VisionTransformer(
            image_size=32,
            patch_size=8,
            width=32,
            layers=2,
            heads=4,
            mlp_ratio=2,
            output_dim=16,
            **options,
        )
        return model, image()

    return make


VISION: list[Target] = [
    *_timm_rows(),
    *_torchvision_rows(),
    *_vit_pytorch_rows(),
    Target(
        package="swin-transformer-pytorch",
        name="Swin",
        make=_swin_pytorch,
        attentions=8,
        shape=Shape(heads=(2, 2, 2, 2, 4, 4, 4, 4), order="bhbts"),
    ),
    Target(
        package="segment-anything",
        name="SAM, image encoder",
        make=_sam,
        attentions=2,
        shape=Shape(heads=4),
    ),
    Target(
        package="segment-anything",
        name="SAM, two-way decoder",
        make=_sam_decoder,
        attentions=4,
        shape=Shape(heads=4),
    ),
    Target(
        package="monai", name="ViT", make=_monai_vit, attentions=2, shape=Shape(heads=4)
    ),
    Target(
        package="monai",
        name="Swin UNETR, its Swin",
        make=_monai_swin,
        attentions=8,
        shape=Shape(heads=(2, 2, 2, 2, 4, 4, 4, 4), low=-50.0),
    ),
    Target(
        package="monai",
        name="self attention, fused",
        make=_monai_block,
        attentions=1,
        shape=Shape(heads=4),
    ),
    Target(
        package="monai",
        name="cross attention",
        make=_monai_cross,
        attentions=1,
        shape=Shape(heads=4),
    ),
    Target(
        package="kornia",
        name="LightGlue, one layer",
        make=_lightglue,
        attentions=4,
        shape=Shape(heads=4),
    ),
    Target(
        package="bottleneck-transformer-pytorch",
        name="BoTNet, absolute positions",
        make=_botnet,
        attentions=2,
        shape=Shape(heads=4),
    ),
    Target(
        package="axial-attention",
        name="AxialAttention",
        make=_axial,
        attentions=2,
        shape=Shape(heads=4),
    ),
    Target(
        package="slot-attention",
        name="multi-head slots",
        make=_slots,
        attentions=1,
        shape=Shape(heads=4),
    ),
    Target(
        package="open_clip_torch",
        name="vision",
        make=_open_clip(),
        attentions=2,
        shape=Shape(heads=4),
    ),
    Target(
        package="open_clip_torch",
        name="vision with attention pooling",
        make=_open_clip(
            attentional_pool=True, attn_pooler_queries=5, attn_pooler_heads=4
        ),
        attentions=3,
        shape=Shape(heads=4),
    ),
    Target(
        package="open_clip_torch",
        name="text",
        make=_open_clip(text=True),
        attentions=2,
        shape=Shape(heads=4),
    ),
]
