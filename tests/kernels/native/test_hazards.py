"""What users do around attention: numbers are those of float64, or an error says why not, with kernels and without."""

import copy
import functools

import pytest
import torch
from numpy.testing import assert_allclose
from tests.attention import from_heads
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel import reference
from qkeel.spec.call import make_call

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::qkeel.errors.QkeelWarning"),
]
SPEC = qkeel.preset("qwen3")
OVERWRITTEN = "modified by an inplace operation"


def gradients(loss, *leaves):
    """Gradients, zero where the loss does not depend on a leaf."""
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def trained(m, x):
    x = x.detach().requires_grad_()
    y = m(x)
    return [y, *gradients(y.sin().sum(), x, *m.parameters())]


def overwriting_hook(m, x):
    m.v_proj.register_forward_hook(lambda _, __, out: out.mul_(0.5))
    return trained(m, x)


def backward_hooks(m, x):
    m.q_proj.register_full_backward_hook(lambda _, into, __: (into[0] * 3,))
    m.k_proj.register_full_backward_pre_hook(lambda _, above: (above[0] * 2,))
    return trained(m, x)


def inference_first(m, x):
    # Tables of angles that an inference pass leaves behind must serve a pass with a gradient.
    with torch.inference_mode():
        quiet = [m(x).clone(), m(x[:, :1]).clone()]
    return [*quiet, *trained(m, x), *trained(m, x[:, :1])]


def fake_first(m, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        m(mode.from_tensor(x))
    return trained(m, x)


def another_default_device(m, x):
    with torch.device("meta"):
        return trained(m, x)


def saved_tensors_packed(m, x):
    # As offloading to the host does.
    with torch.autograd.graph.saved_tensors_hooks(
        lambda y: y.numpy(force=True).copy(), torch.from_numpy
    ):
        return trained(m, x)


def checkpointed(m, x, *, use_reentrant):
    again = functools.partial(checkpoint, m, use_reentrant=use_reentrant)
    x = x.clone().requires_grad_()
    y = again(x) + checkpoint(again, x * 2, use_reentrant=use_reentrant)
    y.sin().sum().backward()
    return [y, x.grad, *(p.grad for p in m.parameters())]


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
    return [y, *gradients(y.double().sin().sum(), *m.parameters())]


def transforms(m, x):
    weights = {name: p.detach() for name, p in m.named_parameters()}
    of_weights = grad(lambda p: functional_call(m, p, (x,)).sin().sum())(weights)
    mapped = vmap(m)(torch.stack([x, -x, 2 * x]))
    return [*of_weights.values(), mapped, *jvp(m, (x,), (x.cos(),))]


def copied(m, x):
    m(x)
    return trained(copy.deepcopy(m), x)


def with_cache(m, x):
    cache, outputs = m.new_cache(), []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        outputs.append(m(x[:, start:end], cache=cache))
    return outputs


def twice(m, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(m(x).sin().sum(), x, create_graph=True)
    return gradients(first.square().sum(), x)


def gain_overwritten(m, x):
    loss = m(x).sin().sum()
    with torch.no_grad():
        m.q_norm.mul_(1.5)
    return gradients(loss, m.q_norm)


MODULES = {
    do.__name__: do
    for do in (
        overwriting_hook,
        backward_hooks,
        inference_first,
        fake_first,
        another_default_device,
        saved_tensors_packed,
        autocast,
        transforms,
        copied,
        with_cache,
        twice,
        gain_overwritten,
    )
}
MODULES["checkpoints"] = functools.partial(checkpointed, use_reentrant=False)
MODULES["reentrant checkpoints"] = functools.partial(checkpointed, use_reentrant=True)


def attended(attend, *leaves, **options):
    y = attend(*leaves, **options)
    return [y, *gradients(y.sin().sum(), *leaves)]


def fresh(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def in_layout(change):
    """q, k and v as views of leaves."""

    def do(attend, *qkv):
        leaves = fresh(*qkv)
        y = attend(*map(change, leaves))
        return [y, *gradients(y.sin().sum(), *leaves)]

    return do


def only_value(attend, q, k, v):
    (v,) = fresh(v)
    return gradients(attend(q, k, v).sin().sum(), v)


def only_mask(attend, q, k, v):
    mask = torch.linspace(-1, 1, 144, dtype=q.dtype).view(12, 12).requires_grad_()
    return gradients(attend(q, k, v, mask=mask).sin().sum(), mask)


def without_keys(attend, q, k, v):
    return attended(attend, *fresh(q, k[:, :, :0], v[:, :, :0]), causal=False)


def gradient_in_another_layout(attend, *qkv):
    leaves = fresh(*qkv)
    y = attend(*leaves)
    above = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape[::-1])
    return list(torch.autograd.grad(y, leaves, above.permute(3, 2, 1, 0)))


def overwritten(name):
    """One of a call's tensors is overwritten between forward and backward."""

    def do(attend, *qkv):
        leaves = fresh(*qkv)
        q, k, v = (x * 1 for x in leaves)
        mask = torch.ones(12, 12, dtype=torch.bool).tril()
        y = attend(q, k, v, mask=mask)
        with torch.no_grad():
            if name == "mask":
                mask.fill_(True)
            else:
                {"k": k, "v": v, "out": y}[name].mul_(1.5)
        return gradients((y * 1).sum(), *leaves)

    return do


CALLS = {
    "only value": only_value,
    "only mask": only_mask,
    "without keys": without_keys,
    "gradient in another layout": gradient_in_another_layout,
    "expanded heads": in_layout(lambda x: x[:, :1].expand(-1, 4, -1, -1)),
    "overlapping windows": in_layout(
        lambda x: x.flatten()[:200].unfold(0, 16, 4)[:24].view(1, 2, 12, 16)
    ),
    "memory that is not aligned": in_layout(
        lambda x: torch.cat([x[0, 0, 0, :1], x.flatten()])[1:].view(x.shape)
    ),
    "negated views": in_layout(lambda x: torch.complex(x.cos(), x).conj().imag),
    "an empty batch": in_layout(lambda x: x[:0]),
    "no queries and no keys": in_layout(lambda x: x[:, :, :0]),
    **{f"{name} overwritten": overwritten(name) for name in ("k", "v", "mask", "out")},
}
# What is refused: the words of the error with the kernels, and without.
ERRORS = {
    "twice": (
        "can be differentiated once",
        "derivative for .*_backward is not implemented",
    ),
    "gain_overwritten": (OVERWRITTEN, OVERWRITTEN),
    "v overwritten": (OVERWRITTEN, OVERWRITTEN),
    "mask overwritten": (OVERWRITTEN, ""),
    "out overwritten": (OVERWRITTEN, ""),
}


def check(name, native, do, truth):
    words = ERRORS.get(name, ("", ""))[native == "0"]
    if words:
        with pytest.raises(Exception, match=words):
            do()
        return
    tolerance = 0.03 if name == "autocast" else 2e-5
    for i, (ours, theirs) in enumerate(zip(do(), truth(), strict=True)):
        size = theirs.detach().abs().max().item() if theirs.numel() else 0.0
        assert_allclose(
            ours.detach().double().numpy(),
            theirs.detach().numpy(),
            rtol=tolerance,
            atol=tolerance * max(1.0, size),
            err_msg=f"number {i}",
        )


def written_out(q, k, v, *, spec, params, **visible):
    """In place of SpecModule.attend."""
    call = make_call(spec, q, k, v, params=params, **visible)
    out = reference.attend_call(call).out
    return from_heads(out)


both_ways = pytest.mark.parametrize("native", ["1", "0"])


@pytest.mark.usefixtures("library")
@both_ways
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_right_or_says_why_not(name, native, monkeypatch):
    monkeypatch.setenv("QKEEL_NATIVE", native)
    do, module = MODULES[name], qkeel.nn.Attention(32, 4, 2, 16, spec=SPEC)
    with torch.no_grad():
        for gain in (module.q_norm, module.k_norm):
            gain.add_(0.2 * torch.randn(16))
    oracle, x = copy.deepcopy(module).double(), torch.randn(2, 12, 32)
    oracle.attend = written_out
    check(name, native, lambda: do(module, x), lambda: do(oracle, x.double()))


@pytest.mark.usefixtures("library")
@both_ways
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_right_or_says_why_not(name, native, monkeypatch):
    monkeypatch.setenv("QKEEL_NATIVE", native)
    do, qkv = CALLS[name], [torch.randn(2, heads, 12, 16) for heads in (4, 2, 2)]

    def params_of(q, k, _):
        params = SPEC.init_params(q.shape[1], k.shape[1], 16)
        return {name: p.to(q.dtype) for name, p in params.items()}

    def attend(*qkv, **options):
        return qkeel.attention(*qkv, spec=SPEC, params=params_of(*qkv), **options)

    def oracle(*qkv, **options):
        return reference.attend(SPEC, *qkv, params=params_of(*qkv), **options).out

    wide = [x.double() for x in qkv]
    check(name, native, lambda: do(attend, *qkv), lambda: do(oracle, *wide))


# Bad input through the public doors: torch's numbers or one clear error.


def attend(d=8, **options):
    q = torch.linspace(-1, 1, 2 * 5 * d).view(1, 2, 5, d)
    params = SPEC.init_params(2, 2, d)
    return qkeel.attention(q, q, q, spec=SPEC, params=params, **options)


@pytest.mark.usefixtures("library")
def test_positions_that_are_no_numbers_see_nothing_by_either_path(
    monkeypatch,
):
    pos = torch.arange(5.0)
    pos[2] = torch.nan
    for options in (
        {"pos_q": pos, "pos_k": torch.arange(5.0)},
        {"pos_q": pos, "pos_k": pos},
    ):
        found = []
        for native in ("1", "0"):
            monkeypatch.setenv("QKEEL_NATIVE", native)
            out, stats = attend(stats=True, **options)
            found.append((out, stats.max_logit, stats.n_pairs))
        assert_close(*found, equal_nan=True)
