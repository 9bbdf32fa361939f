"""Constructors, remedies, kernels and modules with options and sizes of any kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.conformance.cases import allowed_error, truth_of
from tests.contract.conformance.cases import (
    MASKS,
    SPECS,
    Geometry,
    fits,
    masking,
    random_params,
    tensors,
)
from tests.fuzz.hostile import NUMBERS, numbers, plain, texts
from tests.fuzz.hunt import Hunt

import qkeel
from qkeel import spec
from qkeel.lab import Grid, LongContexts, RunConfig
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig
from qkeel.nn import MLA, Attention, Decoder, DecoderConfig
from qkeel.ops import KERNELS
from qkeel.remedies.apply import REMEDIES
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.norm import Norm

# Constructors of the slots, the modules' sizes and the configurations, with options of any kind.


_object_SLOTS = [name for name in spec.__all__ if isinstance(getattr(spec, name), type)]
BUILT: dict[str, type] = {
    **{
        name: getattr(spec, name)
        for name in _object_SLOTS
        if dataclasses.is_dataclass(getattr(spec, name))
        and name not in ("AttentionCall", "AttentionSpec")
    },
    **{
        cls.__name__: cls
        for cls in (RunConfig, DataConfig, ImagesConfig, ModelConfig, OptimConfig)
    },
    **{cls.__name__: cls for cls in (Grid, LongContexts)},
}
_object_WORDS = [
    "head",
    "layer",
    "q",
    "k",
    "qk",
    "qkv",
    "none",
    "dim",
    "one_plus_dim",
    "head_dim",
    "scalar",
]
_object_WORDS += ["both", "power"]


def built_objects_inputs() -> SearchStrategy[tuple[str, dict[str, Any]]]:
    """A class and options for some of its fields, each of a kind the field's default has or of any."""
    return st.sampled_from(sorted(BUILT)).flatmap(_object_of)


def _object_of(name: str) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    """Options of a class. Slots take what their annotations say; configurations, which files give, take anything."""
    any_kind = name not in _object_SLOTS
    fields = {
        f.name: _object_value(f, any_kind)
        for f in dataclasses.fields(BUILT[name])
        if f.init
    }
    known = {f: values for f, values in fields.items() if values is not None}
    needed = {
        f.name
        for f in dataclasses.fields(BUILT[name])
        if f.init and _object_required(f)
    }
    optional = {n: known[n] for n in known.keys() - needed}
    return st.tuples(
        st.just(name),
        st.fixed_dictionaries({n: known[n] for n in needed}, optional=optional),
    )


def _object_required(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )


def _object_value(
    field: dataclasses.Field[Any], any_kind: bool
) -> SearchStrategy[Any] | None:
    words = st.one_of(st.sampled_from(_object_WORDS), texts())
    kind, free = str(field.type), [plain()] if any_kind else []
    none = [st.none()] if "None" in kind else []
    if isinstance(field.default, bool) or kind == "bool":
        return st.one_of(st.booleans(), *free)
    if "float" in kind or "int" in kind:
        whole = st.one_of(st.sampled_from(NUMBERS), st.integers(-10, 100))
        several = [st.lists(numbers(), max_size=3)] if "Sequence" in kind else []
        return st.one_of(
            *several or [numbers() if "float" in kind or any_kind else whole],
            *none,
            *free,
        )
    if "str" in kind or "Literal" in kind or isinstance(field.default, str):
        several = [st.lists(words, max_size=3)] if "Sequence" in kind else []
        return st.one_of(*several or [words], *none, *free)
    return plain() if any_kind else None


def check_built_objects(case: tuple[str, dict[str, Any]]) -> None:
    """Makes the object; one that is made can be printed, copied, and used for what it is."""
    name, options = case
    made = BUILT[name](**options)
    repr(made)
    hash(made) if name in _object_SLOTS else None
    if isinstance(made, RunConfig):
        assert RunConfig.from_dict(made.to_dict()) == made
        assert len(made.run_id) == 12
    if isinstance(made, Norm):
        spec.AttentionSpec(norm=made).explain()


# Names and options of remedies on small models: applied, run, taken away again, or refused.


_remedy_OPTIONS = [
    "tau",
    "cap",
    "threshold",
    "over",
    "gain",
    "factor",
    "eps",
    "alpha",
    "ratio",
    "rate",
]
_remedy_OPTIONS += ["p", "decay", "weight"]


def applied_remedies_inputs() -> SearchStrategy[
    tuple[str, str, bool, dict[str, Any], int | None]
]:
    """A model, a remedy, whether there is an optimizer, options, the training length."""
    name = st.one_of(
        st.sampled_from(sorted(REMEDIES)),
        st.lists(st.sampled_from(sorted(REMEDIES)), min_size=2, max_size=2).map(
            "+".join
        ),
    )
    value = st.one_of(
        numbers(),
        texts(),
        st.booleans(),
        st.sampled_from(["head", "layer", "dim", "scalar", "none"]),
    )
    options = st.dictionaries(st.sampled_from(_remedy_OPTIONS), value, max_size=2)
    length = st.one_of(st.none(), st.integers(-1, 64))
    return st.tuples(
        st.sampled_from(["attention", "mla", "decoder", "linear"]),
        name,
        st.booleans(),
        options,
        length,
    )


def _remedy_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "attention":
        return Attention(16, 4, 2)
    if kind == "mla":
        return MLA(16, 2)
    return (
        Decoder(DecoderConfig(vocab_size=11, d_model=16, n_heads=2, n_layers=1))
        if kind == "decoder"
        else torch.nn.Linear(4, 4)
    )


def check_applied_remedies(
    case: tuple[str, str, bool, dict[str, Any], int | None],
) -> None:
    """Trains one step under the remedy; afterwards the model is bit for bit what it would be without."""
    kind, name, stepped, options, length = case
    model = _remedy_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if stepped else None
    x = (
        torch.zeros(1, 5, dtype=torch.long)
        if kind == "decoder"
        else torch.linspace(-1, 1, 80).view(1, 5, 16)
    )
    before = {n: p.clone() for n, p in model.state_dict().items()}
    handle = qkeel.apply(model, name, optimizer, train_length=length, **options)
    try:
        if kind != "linear":
            model(x).square().mean().backward()
        if optimizer is None:
            model.zero_grad()
    finally:
        handle.remove()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


# Calls of attention: every kernel that takes one gives the oracle's numbers in float64, statistics too.


_kernel_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


def kernels_float64_inputs() -> SearchStrategy[dict[str, Any]]:
    """A spec, sizes, a kind of mask, a dtype, how large q is, and a seed."""
    return st.fixed_dictionaries(
        {
            "spec": st.sampled_from(sorted(SPECS)),
            "groups": st.integers(1, 3),
            "shared": st.integers(1, 3),
            "t": st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 33, 64, 130])),
            "s": st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 33, 64, 130])),
            "d": st.sampled_from([2, 4, 8, 16, 24, 32, 64]),
            "values": st.sampled_from([0, 1, 8, 20]),
            "mask": st.sampled_from(MASKS),
            "dtype": st.sampled_from(sorted(_kernel_DTYPES)),
            "large": st.sampled_from([0.0, 0.1, 1.0, 1.0, 5.0, 30.0]),
            "seed": st.integers(0, 2**20),
        }
    )


@torch.no_grad()
def check_kernels_float64(case: dict[str, Any]) -> None:
    """Compares the output of each kernel; the tolerance is that of the conformance tests."""
    call = _kernel_call(case)
    if call is None:
        return
    truth = truth_of(call)
    allowed = (
        1e-10 * (1 + truth.out.abs().max().item())
        if case["dtype"] == "f64"
        else allowed_error(call, truth)
    )
    for name, kernel in KERNELS.items():
        if kernel.supports(call) is None:
            out = kernel(call)
            assert out.dtype == call.q.dtype, name
            assert out.shape == truth.out.shape, name
            error = (out.double() - truth.out).abs().max().item()
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _kernel_call(case: dict[str, Any]) -> AttentionCall | None:
    spec, dtype = SPECS[case["spec"]], _kernel_DTYPES[case["dtype"]]
    g = case["groups"]
    x = Geometry(2, g * case["shared"], g, case["t"], case["s"], case["d"])
    if not fits(spec, x):
        return None
    rng = torch.Generator().manual_seed(case["seed"])
    q, k, v = tensors(x, dtype, rng)
    if case["values"]:
        v = torch.randn(2, g, x.s, case["values"], generator=rng).to(dtype)
    q = q * case["large"]
    params = random_params(spec, x, dtype, rng)
    call = make_call(
        spec, q, k, v, params=params, **masking(case["mask"], x, dtype, rng)
    )
    return dataclasses.replace(call)


CLASSES: dict[str, Hunt] = {
    "objects": Hunt(inputs=built_objects_inputs, check=check_built_objects),
    "apply": Hunt(inputs=applied_remedies_inputs, check=check_applied_remedies),
    "kernels": Hunt(inputs=kernels_float64_inputs, check=check_kernels_float64),
}
