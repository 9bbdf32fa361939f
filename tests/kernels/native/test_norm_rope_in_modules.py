"""The compiled norm and rotation where they are used: every preset, sites and heads, export, several gradients."""

from __future__ import annotations

import pytest
import torch

import qkeel
from qkeel import reference
from qkeel.kernels import encode
from qkeel.ops import run
from qkeel.spec import PRESETS
from qkeel.spec.call import make_call

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("name", sorted(PRESETS))
@torch.no_grad()
def test_every_preset_gives_the_oracles_output(name: str) -> None:
    spec = qkeel.preset(name)
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    params = {n: p + 0.1 * torch.randn(p.shape) for n, p in spec.init_params(4, 4, 16).items()}
    call = make_call(spec, q, k, v, params=params)
    wide = make_call(spec, q.double(), k.double(), v.double(), params={n: p.double() for n, p in params.items()})
    truth = reference.attend_call(wide).out
    assert (run(call) - truth).abs().max() <= 2e-6 * (1 + truth.abs().max())


def test_it_is_what_presets_with_a_norm_over_heads_and_half_pairs_use() -> None:
    pos = torch.arange(3)[None]
    used = set()
    for name in PRESETS:
        spec, x = qkeel.preset(name), torch.randn(1, 2, 3, 16)
        if encode.fused(spec, x, x, pos, pos, spec.init_params(2, 2, 16)) is not None:
            used.add(name)
    assert {"baseline", "qna", "kna", "cosa", "qwen3", "gemma3", "qwen3_next", "nanochat", "vit22b"} <= used
    assert not used & {"olmo2", "chameleon", "llama4"}


def test_the_rows_of_each_head_are_found_behind_it() -> None:
    model = torch.nn.Sequential(qkeel.nn.Attention(32, 4, 2, 8, spec=qkeel.preset("qwen3")))
    (site,) = qkeel.find_sites(model, torch.randn(1, 6, 32))
    assert [s.parameter for s in site.query] == ["0.q_proj.weight"]
    assert [rows.tolist() for rows in site.query[0].index] == [list(range(8 * h, 8 * h + 8)) for h in range(4)]


def test_an_exported_program_holds_torchs_operators_alone() -> None:
    module, x = qkeel.nn.Attention(16, 2, spec=qkeel.preset("qwen3")), torch.randn(1, 5, 16)
    program = torch.export.export(module, (x,))
    assert "qkeel_native" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), module(x))


def test_gradients_of_several_outputs_at_once_and_inference_mode() -> None:
    module, x = qkeel.nn.Attention(16, 2, spec=qkeel.preset("qwen3")), torch.randn(1, 5, 16)
    with torch.inference_mode():
        quiet = module(x)
    out = module(x)
    assert torch.equal(out, quiet)
    above = torch.eye(80).view(80, 1, 5, 16)[::9]
    (together,) = torch.autograd.grad(out, module.q_proj.weight, above, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, module.q_proj.weight, a, retain_graph=True)[0] for a in above]
    torch.testing.assert_close(together, torch.stack(each), rtol=0, atol=1e-6)
