"""Where nobody else holds the projections of q and k, norm and rotation overwrite them; no bit of the rest changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.kernels import native
from qkeel.kernels.native.norm_rope import functions
from qkeel.spec import AttentionCall

pytestmark = pytest.mark.usefixtures("library")
SPEC, POS = qkeel.preset("qwen3"), torch.arange(5)[None]


def pair(name: str = "qwen3") -> tuple[qkeel.nn.Attention, qkeel.nn.Attention]:
    """Two equal modules, the second with hooks that keep what its projections returned, so that it stays."""
    torch.manual_seed(3)
    modules = [qkeel.nn.Attention(48, 3, 1, 16, spec=qkeel.preset(name)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for projection in (modules[1].q_proj, modules[1].k_proj):
        projection.register_forward_hook(lambda *_: None)
    return modules[0], modules[1]


def gradients(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.linspace(-2, 2, 2 * 5 * 48).sin().view(2, 5, 48).requires_grad_()
    out = forward(x)
    module.zero_grad()
    out.float().square().sum().backward()  # not autograd.grad, which a reentrant checkpoint refuses
    found = [out, x.grad, *(p.grad for p in module.parameters())]
    assert all(g is not None for g in found)
    return found  # type: ignore[return-value]


def under_autocast(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    return run


@pytest.mark.parametrize("name", ["qwen3", "baseline", "cosa", "nanochat", "vit22b"])
def test_output_and_gradients_are_those_beside_it(name: str) -> None:
    over, beside = pair(name)
    assert all(map(torch.equal, gradients(over, over), gradients(beside, beside)))
    with torch.inference_mode():
        x = torch.randn(2, 5, 48)
        assert torch.equal(over(x), beside(x))
        caches = over.new_cache(), beside.new_cache()
        for t in range(3):
            assert torch.equal(*(m(x[:, t : t + 1], cache=c) for m, c in zip((over, beside), caches)))


def test_checkpoints_autocast_and_two_calls_change_no_bit() -> None:
    over, beside = pair()
    for how in (
        lambda m: lambda x: checkpoint(m, x, use_reentrant=False),
        lambda m: lambda x: checkpoint(m, x, use_reentrant=True),
        lambda m: lambda x: m(x) + m(2 * x),
        under_autocast,
    ):
        assert all(map(torch.equal, gradients(over, how(over)), gradients(beside, how(beside))))  # type: ignore[no-untyped-call]


def test_q_and_k_take_the_place_of_what_they_were_made_of_and_whoever_kept_that_is_told() -> None:
    base = torch.randn(1, 5, 2, 16, requires_grad=True)
    q, k = (base * s for s in (2, 3))
    kept = (q * q).sum()
    params = {n: p.requires_grad_() for n, p in SPEC.init_params(2, 2, 16).items()}
    x, y = q.transpose(1, 2), k.transpose(1, 2)
    beside = native.encoded(SPEC, x.detach(), y.detach(), POS, POS, params)
    found = native.encoded(SPEC, x, y, POS, POS, params, in_place=True)
    assert beside is not None
    assert found is not None
    assert [z.data_ptr() for z in found] == [q.data_ptr(), k.data_ptr()]
    assert all(map(torch.equal, found, beside))
    assert all(z.requires_grad for z in found)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def stays(q: Tensor, k: Tensor, params: dict[str, Tensor] | None = None) -> None:
    before = q.clone(), k.clone()
    params = SPEC.init_params(q.shape[1], k.shape[1], 16) if params is None else params
    assert native.encoded(SPEC, q, k, POS, POS, params, in_place=True) is not None
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_parts_of_a_fused_projection_shared_and_spread_tensors_stay() -> None:
    fused = torch.randn(1, 5, 6, 16).transpose(1, 2)
    x = torch.randn(1, 2, 5, 16)
    with torch.no_grad():
        stays(fused[:, :2], fused[:, 2:4])
        stays(x, x)
        stays(x, x[:, :1].expand(-1, 2, -1, -1))
        stays(x.mT.contiguous().mT, torch.randn(1, 2, 5, 16))


def test_where_the_way_back_needs_x_it_stays() -> None:
    params = {n: p.requires_grad_() for n, p in SPEC.init_params(2, 2, 16).items()}
    with torch.no_grad():
        params["k_norm"][3] = 1e-3
    stays(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), params)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of make_dual
def test_under_modes_transforms_and_tangents_x_stays_and_the_operators_answer() -> None:
    x, y = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    native_functions = functions()
    if native_functions is None:
        pytest.skip("compiled where Python's headers are missing")
    args = (None, None, None, None, 1, 1, 1e-6, True)
    assert native_functions.encode(torch.nn.Buffer(x), y.to("meta"), *args) is None
    assert native_functions.place(torch.tensor([1.0])) is None
    assert native_functions.place(torch.tensor([[7]])) == 7
    with BaseTorchFunctionMode():
        stays(x, y)
    before = x.clone()

    def mapped(z: Tensor) -> Tensor:
        assert native_functions is not None
        assert native_functions.encode(z, z, *args) is None
        return z

    torch.func.vmap(mapped)(x[None])
    with torch.autograd.forward_ad.dual_level():
        assert native_functions.encode(torch.autograd.forward_ad.make_dual(x, y), y, *args) is None
    assert torch.equal(x, before)


def test_hooks_and_observers_see_raw_projections() -> None:
    module, x = pair()[0], torch.randn(2, 5, 48)
    seen: list[Tensor] = []
    with torch.no_grad():
        handle = module.q_proj.register_forward_hook(lambda _module, _given, out: seen.append(out))
        module(x)
        handle.remove()
        assert torch.equal(seen[0], module.q_proj(x))

        def observe(call: AttentionCall) -> None:
            seen.append(call.k)

        module.observers.append(observe)
        module(x)
        assert torch.equal(seen[1].transpose(1, 2).flatten(2), module.k_proj(x))


def test_a_projection_that_returns_its_input_leaves_it_alone() -> None:
    module, x = qkeel.nn.Attention(32, 2, spec=SPEC), torch.randn(1, 5, 32)
    module.q_proj = module.k_proj = nn.Identity()  # type: ignore[assignment]
    before = x.clone()
    with torch.no_grad():
        module(x)
    assert torch.equal(x, before)


def test_a_module_in_float64_is_left_to_torch() -> None:
    module = qkeel.nn.Attention(32, 4, spec=SPEC).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    out = module(x)
    out.sum().backward()
    with torch.no_grad():
        assert torch.equal(module(x.detach()), out)
