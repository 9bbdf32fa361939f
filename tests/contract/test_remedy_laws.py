"""Laws that hold for every remedy: how it starts, what its removal restores, what copies and checkpoints keep, what
its hyperparameters do, and what it refuses.

One table: each law is a test over all remedies, on qkeel's own decoder and on a model that is not qkeel's; one remedy
of each mechanism is put to other kinds of attention, too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from qkeel import AttentionSpec, find_sites
from qkeel.errors import (
    AlreadyAppliedError,
    NonFiniteError,
    RefusedError,
    UnknownNameError,
)
from qkeel.nn import Attention, Decoder, DecoderConfig
from qkeel.remedies import ALIASES, Remedy, Target, parse

from .conformance.kinds import KINDS, model_of, refusal_of

VOCAB, WIDTH = 7, 16
IDS = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(7))
REMEDIES = [name for name in qkeel.remedies() if name != "none"]
# Remedies that act on optimizer steps alone.
STEPS = {"qk_clip", "lalr", "qk_lr", "frozen_qk", "qk_weight_decay", "spectral_cap"}
# Remedies that act on blocks or on the output.
BLOCKS = {"qkv_norm", "z_loss", "final_softcap", "swin_norm", "peri_norm", "dropout"}
# Remedies under which the model starts as it was, in evaluation mode.
NEUTRAL = STEPS | {"sigma_reparam", "output_gate", "z_loss", "dropout"}
# Options with which a remedy acts on these small models.
OPTIONS = {
    "attention_temperature": "attention_temperature:floor=2",
    "qk_clip": "qk_clip:threshold=0.02,steps=matched",
    "spectral_cap": "spectral_cap:cap=0.5",
    "final_softcap": "final_softcap:cap=0.05",
    "softcap": "softcap:cap=0.02",
    "qk_weight_decay": "qk_weight_decay:decay=0.5",
}
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


def own() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(
            vocab_size=VOCAB, d_model=WIDTH, n_heads=4, n_kv_heads=2, n_layers=2
        )
    )
    model.init_weights()
    return model


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.mlp = (
            Attend(),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        )
        self.first, self.second = (
            nn.RMSNorm(WIDTH, eps=1e-6),
            nn.RMSNorm(WIDTH, eps=1e-6),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.mlp(self.second(x))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Foreign(nn.Module):
    """A pre-norm transformer in plain PyTorch, of one layer: to find its heads takes more time than all else here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), Layer()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": own,
    "foreign": Foreign,
    **{kind: functools.partial(model_of, kind) for kind in ("MLA", "GAU")},
}
CASES = [(name, kind) for name in REMEDIES for kind in ("own", "foreign")]
CASES += [(name, kind) for name in MECHANISMS for kind in ("MLA", "GAU")]
every_case = pytest.mark.parametrize(("name", "kind"), CASES)


def model_for(name: str, kind: str) -> nn.Module:
    """A model that the remedy takes: what it refuses has a test of its own."""
    if kind in KINDS and refusal_of(name, kind):
        pytest.skip(f"{name} refuses {kind}")
    torch.manual_seed(0)
    return MODELS[kind]()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.03
    )


def apply(model: nn.Module, remedy: Any, optimizer: torch.optim.Optimizer) -> Any:
    """With an example where there is nothing of qkeel's, or where the final logits are meant."""
    if isinstance(remedy, str):
        remedy = OPTIONS.get(remedy, remedy)
    asks = not isinstance(model, Decoder) or "z_loss" in remedy or "final" in remedy
    batch = IDS if asks else None
    return qkeel.apply(model, remedy, optimizer, batch=batch, train_length=8)


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)  # dropout
        ids = (IDS + step) % VOCAB
        optimizer.zero_grad()
        F.cross_entropy(
            model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        optimizer.step()


def shape_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything but the values: names, order, classes, attributes, hooks, groups, and what the optimizer knows."""
    modules = [
        (n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks))
        for n, m in model.named_modules()
    ]
    attributes = [
        (k, v if type(v) in (bool, int, float, str, AttentionSpec) else id(v))
        for m in model.modules()
        for k, v in m.__dict__.items()
    ]
    hooks = (
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    )
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    return [
        modules,
        attributes,
        [(n, id(p)) for n, p in model.named_parameters()],
        list(model.state_dict()),
        hooks,
        groups,
        bits(optimizer.state_dict()),
    ]


def bits(value: Any) -> Any:
    """Nested plain values, with tensors as their numbers: they compare equal where the numbers do."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: bits(x) for name, x in value.items()}
    return [bits(x) for x in value] if isinstance(value, list) else value


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[name]) for name, x in a.items()
    )


@every_case
def test_start_undo_and_a_second_time_leave_all_bit_for_bit(
    name: str, kind: str
) -> None:
    model = model_for(name, kind)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    model.eval()
    out = model(IDS)
    shape, before = shape_of(model, optimizer), values(model)
    handle = apply(model, name, optimizer)
    assert handle.active
    assert torch.equal(model(IDS), out) is (name in NEUTRAL)
    inside = values(model)
    with pytest.raises(AlreadyAppliedError, match=name):
        apply(model, name, optimizer)
    assert equal(values(model), inside)
    handle.remove()
    handle.remove()
    assert not handle.active
    assert shape_of(model, optimizer) == shape
    assert equal(values(model), before)
    assert torch.equal(model(IDS), out)


@every_case
def test_it_trains_every_weight_but_frozen_ones_and_leaves_no_trace_but_the_weights(
    name: str, kind: str
) -> None:
    plain, model = model_for(name, kind), model_for(name, kind)
    for each in (plain, model):
        for n, p in each.named_parameters():
            p.requires_grad_(".v" not in n and "embed" not in n)
    optimizer, other = adamw(model), adamw(plain)
    names, groups = list(model.state_dict()), optimizer.param_groups[0]["params"]
    held_before, stay = [*groups], set[str | None]()
    for site in find_sites(model, IDS) if name == "frozen_qk" else ():
        for weight in (*site.query, *site.key):
            stay |= {weight.parameter, weight.bias}
    handle = apply(model, name, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, 3)
    train(plain, other, 3)
    for n, p in model.named_parameters():
        assert p.isfinite().all(), n
        assert torch.equal(before[n], p) == (n in stay or not p.requires_grad), n
    handle.remove()
    assert list(model.state_dict()) == names
    assert len(groups) == len(held_before)
    assert all(a is b for a, b in zip(groups, held_before))
    assert not optimizer._optimizer_step_post_hooks
    assert not equal(values(model), values(plain))
    assert {*optimizer.state} <= {*groups}


@every_case
def test_copies_compute_the_same_and_a_resumed_run_is_the_one_that_was_not_stopped(
    name: str, kind: str
) -> None:
    def fresh() -> tuple[Any, Any, Any]:
        model = model_for(name, kind)
        optimizer = adamw(model)
        return model, optimizer, apply(model, name, optimizer)

    model, optimizer, handle = fresh()
    train(model, optimizer, 2)
    model.eval()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(IDS), model(IDS))
        assert list(twin.state_dict()) == list(model.state_dict())
        if name in STEPS:
            apply(twin, name, adamw(twin)).remove()
    assert not copy.deepcopy(optimizer)._optimizer_step_post_hooks
    model.train()
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), handle.state()], buffer)
    train(model, optimizer, 2, first=2)
    buffer.seek(0)
    saved = torch.load(buffer)
    again, other, resumed = fresh()
    train(again, other, 1, first=9)
    for part, state in zip((again, other), saved):
        part.load_state_dict(state)
    resumed.load(saved[2])
    train(again, other, 2, first=2)
    assert equal(values(model), values(again))


@pytest.mark.slow
@every_case
def test_compiled_before_or_after_the_same_weights_come_out(
    name: str, kind: str
) -> None:
    results = []
    for when in ("never", "before", "after"):
        torch.compiler.reset()
        # AdamW makes steps of rounding where a gradient is 0 but for it; in float32 these are as large as others.
        model = model_for(name, kind).double()
        optimizer = adamw(model)
        run: Any = (
            torch.compile(model, backend="aot_eager") if when == "before" else model
        )
        with apply(run, name, optimizer):
            run = torch.compile(model, backend="aot_eager") if when == "after" else run
            train(run, optimizer, 2)
            results.append([p.detach().clone() for p in model.parameters()])
    if name != "dropout":  # compiled code draws other random numbers
        for other in results[1:]:
            assert all(
                torch.allclose(a, b, rtol=0, atol=1e-9)
                for a, b in zip(results[0], other, strict=True)
            )


@pytest.mark.parametrize(
    "name", [name for name in REMEDIES if name not in STEPS | BLOCKS]
)
def test_decoding_with_a_cache_computes_what_one_pass_does(name: str) -> None:
    torch.manual_seed(0)
    model, x = (
        Attention(WIDTH, 4, 2).double(),
        torch.randn(2, 8, WIDTH, dtype=torch.float64),
    )
    qkeel.apply(model, OPTIONS.get(name, name), train_length=8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model.eval()
        cache = model.new_cache()
        steps = torch.cat(
            [model(x[:, i : i + 1], cache=cache) for i in range(x.shape[1])], dim=1
        )
        assert torch.allclose(steps, model(x), atol=1e-12)


class Boom(Remedy):
    """A remedy that fails half-way."""

    name: ClassVar[str] = "boom"
    line: ClassVar[str] = "fails"
    source: ClassVar[str] = "this test"

    def apply(self, target: Target) -> Any:
        raise RuntimeError("half-way")


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_failing_apply_leaves_the_model_as_it_was(name: str) -> None:
    model = own()
    optimizer = adamw(model)
    shape, before = shape_of(model, optimizer), values(model)
    with pytest.raises(RuntimeError, match="half-way"):
        apply(model, [name, Boom()], optimizer)
    with pytest.raises(AlreadyAppliedError, match=name):
        apply(model, [name, name], optimizer)
    assert shape_of(model, optimizer) == shape
    assert equal(values(model), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name_and_the_model_left_as_it_was(
    value: float,
) -> None:
    model = own()
    optimizer = adamw(model)
    with torch.no_grad():
        model.get_parameter("blocks.1.attention.k_proj.weight")[0, 0] = value
    shape = shape_of(model, optimizer)
    apply(model, "none", optimizer).remove()
    for name in REMEDIES:
        with pytest.raises(
            NonFiniteError, match=f"1.attention.k_proj.weight .* before {name} "
        ):
            apply(model, name, optimizer)
        assert shape_of(model, optimizer) == shape, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_remedy_refuses_it_refuses_with_a_reason_and_changes_nothing(
    kind: str,
) -> None:
    model = model_of(kind)
    optimizer = adamw(model)
    shape, before = shape_of(model, optimizer), values(model)
    for name in (name for name in REMEDIES if refusal_of(name, kind)):
        with pytest.raises(RefusedError) as error:
            apply(model, name, optimizer)
        assert len(str(error.value)) > 40, name
        assert shape_of(model, optimizer) == shape, name
        assert equal(values(model), before), name


# Per remedy, the hyperparameters that make it the identity, and how exactly: over training steps, or at the start.
IDENTITIES: dict[str, tuple[str, str]] = {
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
    "final_softcap": (
        "final_softcap:cap=1e30,module=head",
        "to rounding over one step",
    ),
    "dropout": ("dropout:rate=0", "bit for bit over steps"),
}
NO_IDENTITY = {
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


def test_every_remedy_has_a_line_on_its_page_and_says_whether_it_can_be_the_identity() -> (
    None
):
    assert {*IDENTITIES, *NO_IDENTITY} == {*REMEDIES}
    assert not {*IDENTITIES} & {*NO_IDENTITY}
    page = Path(__file__).parents[2] / "docs" / "remedies.md"
    lines = page.read_text(encoding="utf-8")
    assert [name for name in REMEDIES if f"`{name}`" not in lines] == []


@pytest.mark.parametrize(
    ("name", "kind"), [case for case in CASES if case[0] in IDENTITIES]
)
def test_neutral_hyperparameters_are_the_identity(name: str, kind: str) -> None:
    text, how = IDENTITIES[name]
    steps = {"steps": 5, "step": 1, "start": 0}[how.split()[-1]]
    model, plain = model_for(name, kind), model_for(name, kind)
    optimizer, other = adamw(model), adamw(plain)
    handle = apply(model, text, optimizer)
    train(model, optimizer, steps)
    train(plain, other, steps)
    ours, theirs = model.eval()(IDS), plain.eval()(IDS)
    handle.remove()
    if how.startswith("bit"):
        assert torch.equal(ours, theirs)
        assert equal(values(model), values(plain))
    else:
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_unknown_name_or_option_names_the_nearest() -> None:
    for name in (*REMEDIES, *ALIASES):
        with pytest.raises(UnknownNameError, match=f"Did you mean .*'{name}'"):
            parse(name + "x")
        with pytest.raises(UnknownNameError, match="unknown option"):
            parse(f"{name}:zzz=1")
        for field in dataclasses.fields(parse(name)[0]):  # type: ignore[arg-type]
            with pytest.raises(
                UnknownNameError, match=f"Did you mean .*'{field.name}'"
            ):
                parse(f"{name}:{field.name}x=1")


@pytest.mark.parametrize("first", ["softcap", "qk_norm"])
def test_removing_one_of_two_remedies_keeps_the_other(first: str) -> None:
    second = {"softcap": "qk_norm", "qk_norm": "softcap"}[first]
    slot = {"softcap": "cap", "qk_norm": "norm"}
    model = own()
    optimizer = adamw(model)
    shape, plain = shape_of(model, optimizer), find_sites(model)[0].spec
    handles = {name: apply(model, name, optimizer) for name in ("softcap", "qk_norm")}
    spec = find_sites(model)[0].spec
    assert all(getattr(spec, s) != getattr(plain, s) for s in slot.values())
    handles[first].remove()
    left = find_sites(model)[0].spec
    assert getattr(left, slot[first]) == getattr(plain, slot[first])
    assert getattr(left, slot[second]) == getattr(spec, slot[second])
    handles[second].remove()
    assert shape_of(model, optimizer) == shape
