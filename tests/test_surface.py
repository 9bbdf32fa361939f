"""The public calls: the model comes first, then the remedy, then the optimizer, then keywords; earlier calls warn."""

import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import qkeel
import qkeel.audit
from qkeel.autopilot import attach
from qkeel.nn import Attention
from qkeel.remedies import Target

# The parameters that may be given by position; everything else is a keyword.
POSITIONAL = {
    "apply": ("model", "remedy", "optimizer"),
    "attention": ("q", "k", "v"),
    "autopilot": ("model", "optimizer"),
    "check": ("model_or_path", "batch"),
    "explain": ("model", "batch"),
    "export": ("model", "architecture", "path"),
    "find_sites": ("model", "batch"),
    "fold": ("model",),
    "load": ("path",),
    "preset": ("name",),
    "presets": (),
    "retrofit": ("model", "remedy", "batch"),
    "watch": ("model", "optimizer"),
}


def function(name):
    """A public function; `qkeel.autopilot` is at once a package and its function."""
    member = getattr(qkeel, name)
    return getattr(member, name) if inspect.ismodule(member) else member


@pytest.mark.parametrize("name", POSITIONAL)
def test_the_model_comes_first_and_whatever_is_optional_is_a_keyword(name):
    parameters = inspect.signature(function(name)).parameters.values()
    assert (
        tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        == POSITIONAL[name]
    )


def attention():
    torch.manual_seed(0)
    model = Attention(16, 4)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(1, 5, 16)


def heads():
    return nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)


def undone(handle):
    handle.remove()


M, O, X = attention()
H, Y = heads()
EARLIER = {
    "remedy first": (
        lambda: undone(qkeel.apply("softcap", M)),
        "write apply(model, remedy, optimizer);",
    ),
    "with a batch": (
        lambda: undone(qkeel.apply("lalr", M, O, example=X)),
        "(model, remedy, optimizer, batch=batch);",
    ),
    "all by name": (
        lambda: undone(qkeel.apply(named="softcap", model=M)),
        "write apply(model, remedy, optimizer);",
    ),
    "arguments apart": (
        lambda: qkeel.find_sites(H, Y, Y, Y),
        "write find_sites(model, batch);",
    ),
    "a probe": (
        lambda: undone(qkeel.watch(M, O, probe=X)),
        "write watch(model, optimizer, probe_batch=probe_batch);",
    ),
    "autopilot": (
        lambda: undone(qkeel.autopilot(M, O, example=X)),
        "write autopilot(model, optimizer, batch=batch);",
    ),
    "attached": (
        lambda: undone(attach(qkeel.watch(M, O), O, example=X)),
        "attach(monitor, optimizer, batch=batch);",
    ),
    "explain_model": (lambda: qkeel.explain_model, "write qkeel.explain,"),
    "what to check": (
        lambda: qkeel.check(what=M, batch=X),
        "write check(model_or_path, batch);",
    ),
    "a remedy's example": (
        lambda: Target(model=M, optimizer=O, sites=[]).example,
        "write target.batch,",
    ),
}


@pytest.mark.parametrize("case", EARLIER)
def test_a_call_of_0_1_0_works_and_one_warning_at_its_line_shows_the_new_one(
    case,
):
    call, shown = EARLIER[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (warning,) = [w for w in caught if w.category is DeprecationWarning]
    assert shown in str(warning.message)
    assert Path(warning.filename) == Path(__file__)
    assert warning.lineno == call.__code__.co_firstlineno


def test_arguments_apart_find_the_sites_of_one_batch():
    with pytest.warns(DeprecationWarning, match="find_sites"):
        earlier = qkeel.find_sites(H, Y, Y, value=Y)
    assert (
        str(earlier)
        == str(qkeel.find_sites(H, (Y, Y, Y)))
        == str(qkeel.find_sites(H, {"query": Y, "key": Y, "value": Y}))
    )


@pytest.mark.parametrize(
    "wrong",
    [lambda: qkeel.apply(M, O), lambda: qkeel.apply(M, M), lambda: qkeel.apply(M, 3)],
)
def test_something_else_in_place_of_the_remedy_is_answered_with_the_right_line(
    wrong,
):
    with pytest.raises(
        TypeError, match=r'write qkeel.apply\(model, "qk_norm", optimizer\)'
    ):
        wrong()
