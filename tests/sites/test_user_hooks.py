"""Passes that qkeel makes leave the user's hooks, and what forward stores outside the model, alone."""

import collections
import functools

import pytest
import torch
import torch.nn.functional as F
from tests.attention import Joint, to_heads
from tests.training import sgd, warned
from torch import Tensor, nn

import qkeel
from qkeel.capture.user_hooks import returns_nothing
from qkeel.errors import QkeelWarning

CALLS = []
OUTPUTS = {}
NUMBER = 0


class Layer(Joint):
    def __init__(self):
        super().__init__(m=16)
        self.o = nn.Linear(16, 16)

    def forward(self, x):
        CALLS.append(len(x))
        return x + self.o(super().forward(x))


class Normed(Layer):
    """A layer with a norm of queries and keys, of whose gain a search asks gradients."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8) + 0.5)

    def heads(self, x):
        q, k, v = super().heads(x)
        return *(F.rms_norm(y, (8,), self.gain) for y in (q, k)), v


class Store:
    """A plain object with a list, a running mean and a counter."""

    def __init__(self):
        self.items = []
        self.mean, self.counts = torch.zeros(16), collections.Counter[str]()

    def keep(self, module, args, output):
        self.items.append(output)

    def __call__(self, module, args, output):
        self.mean.lerp_(output.detach().mean((0, 1)), 0.1)


def in_globals(module, args, output):
    global NUMBER
    NUMBER += 1
    OUTPUTS[len(OUTPUTS)] = output


class Hooks:
    """The kinds of hooks, and what they have stored."""

    def __init__(self):
        self.store, self.features, self.number = Store(), list[Tensor](), lambda: 0
        features, store, count = self.features, self.store, 0

        def counting(module, args, output):
            nonlocal count
            count += 1

        def returning(module, args, output):
            features.append(output)
            return output * 1.0

        def before(module, args):
            store.counts["before"] += 1

        self.number = lambda: count
        self.after = [
            lambda module, args, output: features.append(output),
            lambda module, args, output: store.items.append(output.mean()),
            counting,
            returning,
            store.keep,
            store,
            in_globals,
        ]
        self.before = before

    def state(self):
        store = self.store
        lengths = len(self.features), len(store.items), len(OUTPUTS), len(CALLS)
        return (
            *lengths,
            self.number(),
            NUMBER,
            store.mean.tolist(),
            dict(store.counts),
        )


def hooked():
    """Layers with hooks of every kind on each of them and on the whole."""
    torch.manual_seed(0)
    model, hooks = nn.Sequential(Layer(), Layer()), Hooks()
    for module in (model, *model):
        module.register_forward_pre_hook(hooks.before)
        for hook in hooks.after:
            module.register_forward_hook(hook)
    return model, hooks


SEARCHES = {
    "find_sites": lambda model, x: qkeel.find_sites(model, x),
    "check": lambda model, x: qkeel.check(model, x),
    "explain": lambda model, x: qkeel.explain(model, x),
    "apply": lambda model, x: qkeel.apply(
        model, "qk_clip", sgd(model, 0.0), batch=x
    ).remove(),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_leaves_what_hooks_and_forward_store(search):
    model, hooks = hooked()
    x = torch.randn(2, 5, 16)
    model(x)
    before, out = hooks.state(), model(x)
    again = hooks.state()
    SEARCHES[search](model, x)
    assert hooks.state() == again
    assert before != again
    assert torch.equal(model(x), out)
    after = hooks.state()
    lengths = [
        (a, b, c) for a, b, c in zip(before[:6], again[:6], after[:6], strict=True)
    ]
    assert all(c - b == b - a for a, b, c in lengths)


def test_hooks_on_gradients_see_none_of_a_search():
    """Logged gradients, and rows that a hook freezes by zeros, which would seem to make no head."""
    model, x, gradients = nn.Sequential(Normed(), Normed()), torch.randn(2, 5, 16), []

    def log(*args):
        gradients.append(args)

    on_all = nn.modules.module.register_module_full_backward_hook(log)
    try:
        for module in model.modules():
            module.register_full_backward_pre_hook(log)
            for p in module.parameters(recurse=False):
                p.register_hook(log)
        frozen = model[0].qkv.register_full_backward_pre_hook(
            lambda module, grads: (torch.zeros_like(grads[0]),)
        )
        sites = qkeel.find_sites(model, x)
        assert [site.verified for site in sites] == [True, True]
        assert all(site.query_gains for site in sites)
        assert gradients == []
        frozen.remove()
        model(x.requires_grad_()).sum().backward()
        assert len(gradients) > 7
    finally:
        on_all.remove()


def test_a_hook_before_forward_runs_where_one_after_it_changes_the_output():
    model, inputs = nn.Sequential(Layer(), Layer()), []
    model[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model[1].register_forward_hook(lambda module, args, output: inputs.pop() + output)
    sites = qkeel.find_sites(model, torch.randn(2, 5, 16))
    assert [site.verified for site in sites] == [True, True]
    assert inputs == []


def returns_number(module, args, output):
    CALLS.append(1)
    return abs(output)


def returns_in_one_branch(module, args, output):
    if module.training:
        return None
    return output


def returns_early(module, args, output):
    if module.training:
        return
    CALLS.append(1)


def records_in_both_branches(module, args, output):
    if module.training:
        return CALLS.append(1)
    return OUTPUTS.update({1: output.detach()})


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda module, args, output: CALLS.append(1), True),
        (lambda module, args, output: OUTPUTS.setdefault(1, []).append(output), True),
        (lambda module, args, output: returns_early(module, args, output), True),
        (lambda module, args, output: returns_number(module, args, output), False),
        (
            lambda module, args, output: output + returns_early(module, args, output),
            False,
        ),
        (lambda module, args, output: output * 2, False),
        (lambda module, args, output: (CALLS.append(1), output)[1], False),
        (returns_early, True),
        (records_in_both_branches, True),
        (returns_number, False),
        (returns_in_one_branch, False),
    ],
)
def test_hooks_that_return_nothing_are_known_by_their_code(hook, expected):
    assert returns_nothing(hook) is expected


def test_a_hook_that_changes_the_output_runs_in_the_search():
    model = nn.Sequential(Layer(), Layer())
    runs = []

    def wider(module, args, output):
        runs.append(1)
        assert len(runs) < 100
        return output.repeat(1, 2, 1)

    lengths = []
    model[1].qkv.register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].shape[1]) or args
    )
    model[0].register_forward_hook(wider)
    qkeel.find_sites(model, torch.randn(2, 5, 16))
    assert (runs, lengths) == ([], [])  # put back
    model(torch.randn(2, 5, 16))
    assert (len(runs), lengths) == (1, [10])


def test_hooks_for_saved_tensors_see_the_users_passes_alone():
    def saved(is_watched):
        torch.manual_seed(0)
        model, shapes = Layer(), []
        optimizer = sgd(model)
        if is_watched:
            qkeel.watch(model, optimizer)

        def pack(x):
            shapes.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randn(2, 5, 16)).sum().backward()
        return shapes

    assert saved(is_watched=True) == saved(is_watched=False)


def test_a_hook_that_the_first_pass_registers_is_there_once_after_a_search():
    class Registering(Layer):
        is_ready = False

        def forward(self, x):
            if not self.is_ready:
                self.is_ready = True
                self.o.register_forward_hook(
                    lambda *_: calls.append(1), always_call=True
                )
            return super().forward(x)

    model, calls, x = Registering(), [], torch.randn(2, 5, 16)
    qkeel.find_sites(model, x)
    assert not model.o._forward_hooks
    assert not model.o._forward_hooks_always_called
    calls.clear()
    model(x)
    assert calls == [1]


def weights_by_hand(x, model):
    (x @ x.mT / 4).softmax(-1)


def fused_weights(x, model):
    y = to_heads(x, 2, -1)
    F.scaled_dot_product_attention(50 * y, y, y)


def weights_without_gradients(x, model):
    with torch.no_grad():
        torch.einsum("btd,bsd->bts", x, x).softmax(-1)


def a_part_of_the_model(x, model):
    with torch.no_grad():
        model[1](3 * x)


# Each way with each probe, in places that change with both; and before the whole model.
PLACES = ["0.qkv", "1.o", "0", "1"]
WHENS = ["before", "after", "with keywords", "after all", "returned"]
PROBES = [weights_by_hand, fused_weights, weights_without_gradients]
RECORDERS = [
    (PLACES[(i + j) % 4], when, probe)
    for i, when in enumerate(WHENS)
    for j, probe in enumerate(PROBES)
]
RECORDERS += [
    ("", when, probe)
    for when in ("before", "before all")
    for probe in (fused_weights, a_part_of_the_model)
]


@pytest.mark.parametrize(("place", "when", "probe"), RECORDERS)
def test_attention_that_a_hook_computes_to_record_it_is_no_layer(place, when, probe):
    def watched(is_probed):
        torch.manual_seed(0)
        model, x = nn.Sequential(Layer(), Layer()), torch.randn(2, 5, 16)
        module, seen = model.get_submodule(place), []

        def hook(called, args, *rest):
            if called is module:
                seen.append(probe(args[0], model))

        def passed_on(called, args, output):
            hook(called, args)
            return output

        register = {
            "before": module.register_forward_pre_hook,
            "after": module.register_forward_hook,
            "with keywords": functools.partial(
                module.register_forward_hook, with_kwargs=True
            ),
            "before all": nn.modules.module.register_module_forward_pre_hook,
            "after all": nn.modules.module.register_module_forward_hook,
            "returned": module.register_forward_hook,
        }[when]
        probing = passed_on if when == "returned" else hook
        handle = register(probing) if is_probed else None
        names = [site.name for site in qkeel.find_sites(model, x)]
        # What returns a value runs in a search too.
        assert not seen or when == "returned"
        optimizer = sgd(model)
        with (
            warned(QkeelWarning) as said,
            qkeel.watch(model, optimizer, rules=[]) as monitor,
        ):
            for _ in range(3):
                model(x).square().mean().backward()
                optimizer.step()
        assert said == []
        assert len(seen) == 3 * is_probed or when == "returned"
        if handle is not None:
            handle.remove()
        assert names == [site.name for site in monitor.sites] == ["0", "1"]
        return {name: x.tolist() for name, x in monitor.sample.heads.items()}

    assert watched(is_probed=True) == watched(is_probed=False)
