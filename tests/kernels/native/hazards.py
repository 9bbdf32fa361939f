"""What else may go on in torch while attention is computed: a table of hazards, each done to a module or to a call."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, linearize, vjp, vmap
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

Found = list[Any]  # tensors: values and gradients
Attend = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hazard:
    """Something done to a module and its input, or to a call's function and q, k, v.

    `on`, `off`: what the error says with the compiled kernels and without; "" where the numbers are right.
    """

    do: Callable[..., Found]
    on: str = ""
    off: str = ""
    tolerance: float = 2e-5
    alone: bool = False  # in a process without the shape checks of the tests, which are in the way of compilers


def trained(m: Any, x: Tensor) -> Found:
    """The output and the gradients of a loss that depends on all of it."""
    x = x.detach().requires_grad_()
    y = m(x)
    return [y, *gradients(y.sin().sum(), m, x)]


def gradients(loss: Tensor, m: Any, *more: Tensor) -> Found:
    given = [*more, *(p for p in m.parameters() if p.requires_grad)]
    found = torch.autograd.grad(loss, given, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, given)]


def attended(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Found:
    """The output, and the gradients of what the call was given."""
    y = attend(q, k, v, **given)
    wanted = [x for x in (q, k, v) if x.requires_grad]
    return [y, *torch.autograd.grad(y.sin().sum(), wanted)] if wanted else [y]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def overwriting_hook(m: Any, x: Tensor) -> Found:
    m.v_proj.register_forward_hook(lambda _, __, out: out.mul_(0.5))
    return trained(m, x)


def backward_hooks(m: Any, x: Tensor) -> Found:
    m.q_proj.register_full_backward_hook(lambda _, got, __: (got[0] * 3,))
    m.k_proj.register_full_backward_pre_hook(lambda _, up: (up[0] * 2,))
    return trained(m, x)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized_gain(m: Any, x: Tensor) -> Found:
    parametrize.register_parametrization(m, "q_norm", Twice())
    return trained(m, x)


# Modes, and what is around a call.


def under(context: Callable[[], Any]) -> Callable[[Any, Tensor], Found]:
    """Forward and backward inside of a context."""

    def do(m: Any, x: Tensor) -> Found:
        with context():
            return trained(m, x)

    return do


def no_gradient(m: Any, x: Tensor) -> Found:
    with torch.no_grad():
        quiet = m(x)
    return [quiet, *trained(m, x)]


def inference_first(m: Any, x: Tensor) -> Found:
    """What is kept from a call, tables of angles say, must serve a call with a gradient."""
    with torch.inference_mode():
        quiet = [m(x).clone(), m(x[:, :1]).clone()]
    return [*quiet, *trained(m, x), *trained(m, x[:, :1])]


def inference_input(m: Any, x: Tensor) -> Found:
    with torch.inference_mode():
        x = x * 2
    y = m(x.clone())
    return [y, *gradients(y.sin().sum(), m)]


def fake_first(m: Any, x: Tensor) -> Found:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        m(mode.from_tensor(x))
        m(mode.from_tensor(x[:, :1]))
    return [*trained(m, x), *trained(m, x[:, :1])]


def default_dtype(m: Any, x: Tensor) -> Found:
    torch.set_default_dtype(torch.float64)
    try:
        return trained(m, x)
    finally:
        torch.set_default_dtype(torch.float32)


def to_array(x: Tensor) -> np.ndarray[Any, Any]:
    return x.numpy(force=True).copy()


class Counting(TorchDispatchMode):
    """A mode that sees every operator and computes it as it is."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Found]:
    def do(m: Any, x: Tensor) -> Found:
        again = functools.partial(
            torch.utils.checkpoint.checkpoint, m, use_reentrant=reentrant
        )
        x = x.clone().requires_grad_()
        y = again(x) + torch.utils.checkpoint.checkpoint(
            again, x * 2, use_reentrant=reentrant
        )
        y.sin().sum().backward()
        return [y, x.grad, *(p.grad for p in m.parameters())]

    return do


def autocast(dtype: torch.dtype) -> Callable[[Any, Tensor], Found]:
    def do(m: Any, x: Tensor) -> Found:
        with torch.autocast("cpu", dtype):
            y = m(x)
        return [y, *gradients(y.double().sin().sum(), m)]

    return do


def autocast_switched_off_within(m: Any, x: Tensor) -> Found:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        return trained(m, x)


def traced(m: Any, x: Tensor) -> Found:
    program: Any = torch.jit.trace(m, (x,), check_trace=False)
    return [program(x), program(-x)]


def compiled(m: Any, x: Tensor) -> Found:
    m.compile(backend="aot_eager")
    return [*trained(m, x), *trained(m, 2 * x)]


# Transforms and tangents.


def of_parameters(
    m: Any, x: Tensor
) -> tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]]:
    given = {n: p.detach() for n, p in m.named_parameters()}
    return lambda p: functional_call(m, p, (x,)).sin().sum(), given


def grad_of(m: Any, x: Tensor) -> Found:
    loss, given = of_parameters(m, x)
    return list(grad(loss)(given).values())


def mapped(m: Any, x: Tensor) -> Found:
    return [
        vmap(m)(torch.stack([x, -x, 2 * x])),
        vmap(m, in_dims=3, out_dims=2)(torch.stack([x, -x], 3)),
    ]


def forward_tangent(m: Any, x: Tensor) -> Found:
    return [
        *jvp(m, (x,), (x.cos(),)),
        vjp(m, x)[1](x.sin())[0],
        linearize(m, x)[1](x.cos()),
    ]


def hessian_of(m: Any, x: Tensor) -> Found:
    def loss(row: Tensor) -> Tensor:
        return m(torch.cat([row[None, None], x[:1, 1:3]], 1)).sin().sum()

    return [hessian(loss)(x[0, 0])]


def dual_value(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(
            attend(q, k, forward_ad.make_dual(v, torch.ones_like(v)))
        )
        return [y.primal, y.tangent]


def dual_then_backward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    q, k, v = leaves(q, k, v)
    with forward_ad.dual_level():
        y: Any = forward_ad.unpack_dual(
            attend(forward_ad.make_dual(q, q.detach().cos()), k, v)
        )
        return [y.tangent, *torch.autograd.grad(y.tangent.sum(), [q, k, v])]


def twice(m: Any, x: Tensor) -> Found:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(m(x).sin().sum(), x, create_graph=True)
    return [*torch.autograd.grad(first.square().sum(), [x])]


def twice_chunked(m: Any, x: Tensor) -> Found:
    m.impl = "chunked"
    return [
        *twice(m, x),
        jacrev(
            jacrev(lambda row: m(torch.cat([row[None, None], x[:1, 1:3]], 1)).sum())
        )(x[0, 0]),
    ]


def twice_in_value(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    (v,) = leaves(v)
    (first,) = torch.autograd.grad(attend(q, k, v).pow(3).sum(), v, create_graph=True)
    return [first, *torch.autograd.grad(first.square().sum(), [v])]


def only_value(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    return attended(attend, q, k, v.detach().clone().requires_grad_())


def only_mask(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    mask = (
        torch.linspace(-1, 1, q.shape[2] * k.shape[2], dtype=q.dtype)
        .view(q.shape[2], -1)
        .requires_grad_()
    )
    y = attend(q, k, v, mask=mask)
    return [y, *torch.autograd.grad(y.sin().sum(), [mask])]


# Copies and threads.


def pickled(m: Any, x: Tensor) -> Found:
    m(x)
    return trained(pickle.loads(pickle.dumps(m)), x)


def threads(m: Any, x: Tensor) -> Found:
    with ThreadPoolExecutor(4) as pool:
        return [
            y
            for found in pool.map(lambda i: trained(m, x * i), range(1, 5))
            for y in found
        ]


# Inputs.


def laid_out(change: Callable[[Tensor], Tensor]) -> Callable[..., Found]:
    """q, k and v in a layout of its own, as a view of leaves."""

    def do(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
        given = leaves(q, k, v)
        y = attend(*(change(x) for x in given))
        return [y, *torch.autograd.grad(y.sin().sum(), given)]

    return do


def unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def overlapping(x: Tensor) -> Tensor:
    """Windows over one row of numbers: elements share memory."""
    return x.flatten()[:200].unfold(0, 16, 4)[:24].view(1, 2, 12, 16)


def negated(x: Tensor) -> Tensor:
    """A view whose numbers are those in memory with the other sign."""
    return torch.complex(x.cos(), x).conj().imag


def empty(axis: int) -> Callable[..., Found]:
    def do(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
        q, k, v = leaves(*(x.narrow(axis, 0, 0) for x in (q, k, v)))
        y = attend(q, k, v)
        return [y, *torch.autograd.grad(y.sum(), [q, k, v])]

    return do


def without_keys(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    return attended(attend, *leaves(q, k[:, :, :0], v[:, :, :0]))


def parameters(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    return attended(attend, *(nn.Parameter(x) for x in (q, k, v)))


class Counted(Tensor):
    """A subclass that sees every function of torch."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def of_class(kind: type[Tensor]) -> Callable[..., Found]:
    def do(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
        q, k, v = leaves(q, k, v)
        y = attend(q.as_subclass(kind), k, v.as_subclass(kind))
        assert type(y) is kind or q.dtype == torch.float64
        got = torch.autograd.grad(y.as_subclass(Tensor).sin().sum(), [q, k, v])
        return [y.as_subclass(Tensor), *got]

    return do


def wrapper_subclass(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    y = attend(TwoTensor(q, 2 * q), TwoTensor(k, k), TwoTensor(v, v))
    return [y.a, y.b]


def transposed_gradient(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    q, k, v = leaves(q, k, v)
    y = attend(q, k, v)
    up = (
        torch.linspace(-1, 1, y.numel(), dtype=y.dtype)
        .view(y.shape[::-1])
        .permute(3, 2, 1, 0)
    )
    return [*torch.autograd.grad(y, [q, k, v], up)]


def negated_gradient(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    q, k, v = leaves(q, k, v)
    y = attend(q, k, v)
    return [*torch.autograd.grad(y, [q, k, v], negated(y.detach().cos()))]


def mutated(which: str) -> Callable[..., Found]:
    """One of a call's tensors is overwritten between forward and backward."""

    def do(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
        q, k, v = leaves(q, k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        given = {"q": q * 1, "k": k * 1, "v": v * 1, "mask": mask}
        y = attend(**given)
        changed = {**given, "out": y}[which]
        with torch.no_grad():
            changed.fill_(True) if which == "mask" else changed.mul_(1.5)
        loss = (y if which != "out" else y * 1).sum()
        return [*torch.autograd.grad(loss, [q, k, v])]

    return do


def mutated_gain(m: Any, x: Tensor) -> Found:
    loss = m(x).sin().sum()
    with torch.no_grad():
        m.q_norm.mul_(1.5)
    return gradients(loss, m)


def not_a_number(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    v = v.clone()
    v[0, 1, 3, 2] = torch.nan
    q, k, v = leaves(q, k, v)
    y = attend(q, k, v)
    y.nan_to_num(0.0).sum().backward()
    return [y]


def jagged(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Found:
    parts = [
        torch.nested.nested_tensor([x[0].mT, x[1].mT], layout=torch.jagged).transpose(
            -1, -2
        )
        for x in (q, k, v)
    ]
    return [attend(*parts).values()]


def with_cache(m: Any, x: Tensor) -> Found:
    """Decoding, with hooks on the projections, inside and outside of inference mode in turn."""
    kept: list[Tensor] = []
    m.k_proj.register_forward_hook(lambda _, __, out: kept.append(out))
    cache, found = m.new_cache(), []
    for i in range(x.shape[1]):
        with torch.inference_mode(i % 2 == 1), torch.no_grad():
            found.append(m(x[:, i : i + 1], cache=cache).clone())
    return [*found, *(k.clone() for k in kept)]
