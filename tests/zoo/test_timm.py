"""timm's VisionTransformer, hand-written and fused: optional, in a process of its own because of torchvision.

timm imports torchvision, which wants its compiled operators; where they do not load with this build of torch, the two
that an import asks for are defined by name.
"""

import importlib.util
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import warnings

import torch

warnings.simplefilter("ignore")
try:
    import torchvision
except RuntimeError:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [n for n in sys.modules if n.startswith("torchvision")]:
        del sys.modules[name]

import timm

from qkeel import find_sites
from qkeel.sites import Tap

torch.manual_seed(0)
worst = {}
for fused in (True, False):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4, qk_norm=True
    ).eval()
    for p in model.parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.3)
    taken = []
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.attn.attn_drop.register_forward_hook(lambda m, i, o: taken.append(o))
    image = torch.randn(2, 3, 32, 32)
    sites = find_sites(model, image)
    assert [s.name for s in sites] == ["blocks.0.attn", "blocks.1.attn"], sites
    assert all(s.terms and s.n_heads == 4 for s in sites), [s.why for s in sites]
    taken.clear()
    with torch.no_grad(), Tap(model) as tap:
        model(image)
        stats = list(tap.read().values())
    for block in model.blocks:
        block.attn.fused_attn = False
    taken.clear()
    with torch.no_grad():
        model(image)
    assert len(taken) == len(stats) == 2
    for weights, seen in zip(taken, stats):
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))
        worst[fused] = max(worst.get(fused, 0.0), float((entropy - seen.entropy).abs().max()))
assert max(worst.values()) < 1e-4, worst
print(worst)
"""


@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("timm", "torchvision", "PIL")
    ),
    reason="timm is not installed: pip install --no-deps timm torchvision pillow",
)
def test_a_vision_transformer_of_timm_is_seen_whole():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
