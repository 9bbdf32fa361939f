"""Laws that every remedy keeps: undone bit for bit, refused in words, neutral if set so, copied, saved and resumed.

Remedies share a few mechanisms. So each of them is put to every law on one small model, of grouped heads with biases,
and one remedy of each mechanism on the other kinds of attention too; `make slow` runs every remedy on every kind.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.each_row import each_row
from tests.quick import quick
from torch import Tensor, nn

import qkeel
from qkeel.errors import (
    AlreadyAppliedError,
    NonFiniteError,
    RefusedError,
    UnknownNameError,
)
from qkeel.nn import GAU, MLA, MLP, Attention, Block, GAUBlock, LatentSizes
from qkeel.remedies import ALIASES, REMEDIES, Remedy, Target, parse
from qkeel.sites import find_sites

from .kinds import KINDS, refusal_of

D, T = 16, 7


def apply(model: nn.Module, remedy: Any, optimizer: torch.optim.Optimizer) -> Any:
    """With what some formulas need, and the batch that remedies on the final logits ask for."""
    terms = remedy if isinstance(remedy, list) else [remedy]
    batch = (
        probe() if any(term in ("z_loss", "final_softcap") for term in terms) else None
    )
    return qkeel.apply(model, remedy, optimizer, train_length=16, batch=batch)


class Model(nn.Module):
    """Two blocks and a head; no cache, no options: what training code of a user looks like."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(kind) for _ in range(2))
        self.head = nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def block(kind: str) -> Block | GAUBlock:
    return (
        GAUBlock(GAU(D, size=8))
        if kind == "GAU"
        else Block(attention(kind), MLP(D, 24), D)
    )


def attention(kind: str) -> Attention | MLA:
    if kind == "MLA":
        return MLA(
            D,
            4,
            sizes=LatentSizes(
                q_latent=10, kv_latent=8, rope_dim=2, nope_dim=4, value_dim=6
            ),
        )
    return Attention(
        D, 4, 2 if kind.startswith("GQA") else None, bias=kind.endswith("bias")
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    gains = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    groups = [
        {"params": rest, "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    size: float = 1.0,
) -> None:
    model.train()
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = (
            size * torch.randn(2, T, D, generator=rng),
            torch.randint(5, (2 * T,), generator=rng),
        )
        nn.functional.cross_entropy(model(x).flatten(0, 1), y).backward()
        optimizer.step()


def probe() -> Tensor:
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(2))


class Snapshot:
    """Everything `remove()` must put back: outputs, state, each module's class and `__dict__`, the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.eval()
        with torch.no_grad():
            self.output = model(probe())
        self.state = {n: x.clone() for n, x in model.state_dict().items()}
        self.modules = {
            n: (type(m), m, _plain(m.__dict__)) for n, m in model.named_modules()
        }
        self.groups = [
            {k: list(v) if k == "params" else v for k, v in g.items()}
            for g in optimizer.param_groups
        ]
        self.moments = {
            p: {k: _copy(v) for k, v in s.items()} for p, s in optimizer.state.items()
        }
        self.hooks = {
            n: len(v) for n, v in vars(optimizer).items() if n.endswith("hooks")
        }

    def assert_same(self, other: Snapshot) -> None:
        assert torch.equal(self.output, other.output)
        assert list(self.state) == list(other.state)
        assert all(torch.equal(self.state[n], other.state[n]) for n in self.state)
        assert list(self.modules) == list(other.modules)
        for name, (kind, module, attributes) in self.modules.items():
            assert other.modules[name][:2] == (kind, module), name
            assert list(attributes) == list(other.modules[name][2]), name
            for key, value in attributes.items():
                assert _same(value, other.modules[name][2][key]), f"{name}.{key}"
        assert len(self.groups) == len(other.groups)
        for mine, its in zip(self.groups, other.groups):
            assert list(mine) == list(its)
            assert [id(p) for p in mine["params"]] == [id(p) for p in its["params"]]
            assert all(mine[k] == its[k] for k in mine if k != "params")
        assert self.hooks == other.hooks
        assert list(self.moments) == list(other.moments)
        for p, state in self.moments.items():
            assert all(_same(v, other.moments[p][k]) for k, v in state.items())


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    # One level down is where torch keeps parameters, buffers, modules and hooks: names and identities.
    return {
        k: list(v.items())
        if isinstance(v, dict)
        else list(v)
        if isinstance(v, list)
        else v
        for k, v in attributes.items()
    }


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, nn.Parameter):
        return a is b
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


SMALLEST = "GQA bias"
# One remedy for each way of making a change.
MECHANISMS = {
    "qk_norm": "another object in a slot of the spec, with parameters",
    "lalr": "each step of heads scaled",
    "qk_clip": "weights changed after the step",
    "sigma_reparam": "weights computed from others",
    "output_gate": "a module before the output projection",
    "qkv_norm": "a slot of the spec and the block around it",
    "peri_norm": "modules of the block",
    "final_softcap": "a hook on the final logits",
}


def cases() -> list[Any]:
    """Every remedy on every kind of attention, in `make test` those that the mechanisms ask for."""
    every = [
        (name, kind) for name in REMEDIES for kind in (*KINDS, "MHA bias", "GQA bias")
    ]
    return quick(
        every,
        lambda case: (
            case[1] == SMALLEST or (case[0] in MECHANISMS and case[1] in ("MLA", "GAU"))
        ),
    )


def start(
    name: str, kind: str, size: float = 1.0
) -> tuple[Model, torch.optim.Optimizer]:
    """A model some steps into training; skips what the remedy refuses (the refusal has its own test)."""
    if refusal_of(name, kind.removesuffix(" bias")):
        pytest.skip(f"{name} refuses {kind}")
    model = Model(kind)
    optimizer = adamw(model)
    train(model, optimizer, 2, size)
    return model, optimizer


def case_of(case: Any) -> tuple[str, str]:
    """The name and the kind of a case, marked as slow or not."""
    return case if isinstance(case, tuple) and isinstance(case[0], str) else case.values


every_case = pytest.mark.parametrize(("name", "kind"), cases())
every_remedy = pytest.mark.parametrize("name", REMEDIES)
every_mechanism = pytest.mark.parametrize(
    "name", quick(REMEDIES, lambda name: name in MECHANISMS)
)


@every_case
def test_apply_then_remove_restores_everything_bit_for_bit(
    name: str, kind: str
) -> None:
    model, optimizer = start(name, kind)
    before = Snapshot(model, optimizer)
    handle = apply(model, name, optimizer)
    with torch.no_grad():
        model(probe())
    assert handle.active
    handle.remove()
    assert not handle.active
    before.assert_same(Snapshot(model, optimizer))
    handle.remove()
    before.assert_same(Snapshot(model, optimizer))


@every_case
def test_training_with_a_remedy_moves_every_trained_weight_and_stays_finite(
    name: str, kind: str
) -> None:
    model, optimizer = start(name, kind)
    apply(model, name, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sites = find_sites(model) if name == "frozen_qk" else []
    slices = [s for site in sites for s in (*site.query, *site.key)]
    gains = [gain for site in sites for gain in (*site.query_gains, *site.key_gains)]
    stay = {
        *(s.parameter for s in slices),
        *(s.bias for s in slices),
        *(gain.parameter for gain in gains),
    }
    train(model, optimizer, 2)
    for n, p in model.named_parameters():
        assert torch.isfinite(p).all(), n
        assert torch.equal(before[n], p) == (n in stay), n


@every_remedy
def test_applying_twice_is_refused_by_name_and_changes_nothing(name: str) -> None:
    model, optimizer = start(name, SMALLEST)
    untouched = Snapshot(model, optimizer)
    with pytest.raises(AlreadyAppliedError, match=name):
        apply(model, [name, name], optimizer)
    untouched.assert_same(Snapshot(model, optimizer))
    handle = apply(model, name, optimizer)
    before = Snapshot(model, optimizer)
    with pytest.raises(
        AlreadyAppliedError,
        match=rf"{name} is already applied to blocks.0.attention; remove\(\)",
    ):
        apply(model, name, optimizer)
    with pytest.raises(AlreadyAppliedError):
        qkeel.apply(model.blocks[0], name, optimizer, train_length=16)
    before.assert_same(Snapshot(model, optimizer))
    handle.remove()
    apply(model, name, optimizer).remove()


class Boom(Remedy):
    """A remedy that fails half-way."""

    name: ClassVar[str] = "boom"
    line: ClassVar[str] = "fails"
    source: ClassVar[str] = "this test"

    def apply(self, target: Target) -> Any:
        raise RuntimeError("half-way")


@every_mechanism
def test_a_failing_apply_leaves_the_model_as_it_was(name: str) -> None:
    model, optimizer = start(name, SMALLEST)
    before = Snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="half-way"):
        apply(model, [name, Boom()], optimizer)
    before.assert_same(Snapshot(model, optimizer))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name_and_the_model_left_as_it_was(
    value: float,
) -> None:
    model, optimizer = start("none", SMALLEST)
    with torch.no_grad():
        model.blocks[1].attention.k_proj.weight[0, 0] = value  # type: ignore[union-attr]
    keys, modules = list(model.state_dict()), [type(m) for m in model.modules()]
    groups = [list(map(id, g["params"])) for g in optimizer.param_groups]
    for name in REMEDIES:
        if name == "none":
            apply(model, name, optimizer).remove()
        else:
            with pytest.raises(
                NonFiniteError,
                match=f"1.attention.k_proj.weight holds NaN or infinity before {name} ",
            ):
                apply(model, name, optimizer)
        assert list(model.state_dict()) == keys, name
        assert [type(m) for m in model.modules()] == modules, name
        assert [list(map(id, g["params"])) for g in optimizer.param_groups] == groups, (
            name
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_remedy_refuses_it_refuses_with_a_reason_and_changes_nothing(
    kind: str,
) -> None:
    model = Model(kind)
    optimizer = adamw(model)
    before = Snapshot(model, optimizer)
    for name in (name for name in REMEDIES if refusal_of(name, kind)):
        with pytest.raises(RefusedError) as error:
            apply(model, name, optimizer)
        assert len(str(error.value)) > 40, name
        before.assert_same(Snapshot(model, optimizer))


# Per remedy, the hyperparameters that make it the identity, and how exactly: over training steps, or at the start.
NEUTRAL: dict[str, tuple[str, str]] = {
    "none": ("none", "bit for bit over steps"),
    "qk_lr": ("qk_lr:factor=1", "bit for bit over steps"),
    "qk_weight_decay": ("qk_weight_decay:decay=0", "bit for bit over steps"),
    "qk_clip": ("qk_clip:threshold=1e30", "bit for bit over steps"),
    "lalr": ("lalr:tau=1", "bit for bit over one step"),
    "softcap": ("softcap:cap=1e30", "to rounding over steps"),
    "attention_temperature": (
        "attention_temperature:alpha=0",
        "to rounding over steps",
    ),
    "sink": ("sink:learned=false,init=-1e30", "to rounding over steps"),
    "output_gate": ("output_gate:init=keep", "bit for bit at the start"),
    "sigma_reparam": ("sigma_reparam:init=keep", "to rounding at the start"),
    "spectral_cap": ("spectral_cap:cap=1e30", "bit for bit over steps"),
    "z_loss": ("z_loss:coefficient=0,module=head", "to rounding over steps"),
    "final_softcap": ("final_softcap:cap=1e30,module=head", "to rounding over steps"),
    "dropout": ("dropout:rate=0", "bit for bit over steps"),
}
NOT_NEUTRAL = {
    "qk_norm": "a norm fixes the size of q and k",
    "qkv_norm": "a norm fixes the size of q, k and v",
    "key_norm": "a norm fixes the size of k",
    "query_norm": "a norm fixes the size of q",
    "cosine": "it fixes the size of q and k",
    "log_n": "a factor that is 1 at one length only",
    "sigmoid": "no sigmoid is a softmax",
    "softpick": "it has no parameter",
    "frozen_qk": "it has no parameter",
    "swin_norm": "the norms stand elsewhere",
    "peri_norm": "a norm fixes the size of the branches",
}


def test_every_remedy_says_whether_it_has_a_neutral_setting() -> None:
    assert set(NEUTRAL) | set(NOT_NEUTRAL) == set(REMEDIES)
    assert not set(NEUTRAL) & set(NOT_NEUTRAL)


@each_row("name", REMEDIES)
def test_a_remedy_has_a_line_on_the_page_of_remedies(name: str) -> None:
    assert f"`{name}`" in (
        Path(__file__).parents[3] / "docs" / "remedies.md"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "kind"), [case for case in cases() if case_of(case)[0] in NEUTRAL]
)
def test_neutral_hyperparameters_are_the_identity(name: str, kind: str) -> None:
    text, how = NEUTRAL[name]
    steps = {"steps": 5, "step": 1, "start": 0}[how.split()[-1]]
    plain, optimizer = start(name, kind)
    train(plain, optimizer, steps)
    model, optimizer = start(name, kind)
    handle = apply(model, text, optimizer)
    train(model, optimizer, steps)
    ours, theirs = model.eval()(probe()), plain.eval()(probe())
    if how.startswith("bit"):
        assert torch.equal(ours, theirs)
    else:
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    handle.remove()
    if how.startswith("bit"):
        for (n, a), b in zip(model.state_dict().items(), plain.state_dict().values()):
            assert torch.equal(a, b), n


@pytest.mark.parametrize(
    "text",
    [
        "qk_lr:factor=0.1",
        "qk_clip:threshold=0.01",
        "lalr:tau=0.1",
        "softcap:cap=0.1",
        "sigma_reparam:init=one",
        "spectral_cap:cap=0.1",
        "z_loss:coefficient=1,module=head",
        "final_softcap:cap=0.1,module=head",
    ],
)
def test_other_hyperparameters_are_not_the_identity(text: str) -> None:
    name = text.partition(":")[0]
    plain, optimizer = start(name, "GQA")
    train(plain, optimizer)
    model, optimizer = start(name, "GQA")
    apply(model, text, optimizer)
    train(model, optimizer)
    assert not torch.allclose(model.eval()(probe()), plain.eval()(probe()), atol=1e-4)


def test_an_unknown_option_names_the_nearest() -> None:
    for name in (*REMEDIES, *ALIASES):
        known = [f.name for f in dataclasses.fields(REMEDIES[ALIASES.get(name, name)])]  # type: ignore[arg-type]
        with pytest.raises(UnknownNameError, match="unknown option"):
            parse(f"{name}:zzz=1")
        for option in known:
            with pytest.raises(UnknownNameError, match=f"Did you mean .*'{option}'"):
                parse(f"{name}:{option}x=1")


def test_a_misspelt_remedy_names_the_nearest() -> None:
    for name in (*REMEDIES, *ALIASES):
        with pytest.raises(UnknownNameError, match=f"Did you mean .*'{name}'"):
            parse(name + "x")


@pytest.mark.parametrize("first", ["softcap", "qk_norm"])
def test_removing_one_of_two_remedies_keeps_the_other(first: str) -> None:
    second = {"softcap": "qk_norm", "qk_norm": "softcap"}[first]
    slot = {"softcap": "cap", "qk_norm": "norm"}
    model, optimizer = start("softcap", "GQA")
    before = Snapshot(model, optimizer)
    handles = {name: apply(model, name, optimizer) for name in ("softcap", "qk_norm")}
    plain, spec = Attention(D, 4).spec, find_sites(model)[0].spec
    assert all(getattr(spec, s) != getattr(plain, s) for s in slot.values())
    handles[first].remove()
    left = find_sites(model)[0].spec
    assert getattr(left, slot[first]) == getattr(plain, slot[first])
    assert getattr(left, slot[second]) == getattr(spec, slot[second])
    handles[second].remove()
    before.assert_same(Snapshot(model, optimizer))
