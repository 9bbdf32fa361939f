"""`attn_implementation="qkeel"` computes what transformers' own does in every causal model, and is watched alike."""

import random
import subprocess
import sys

import pytest
from tests.training import adamw, sgd
from torch.testing import assert_close

pytest.importorskip("transformers")

import torch
from tests.remedies.foreign import example, hf, out
from tests.zoo.test_zoo import named
from tools.zoo.build import build
from tools.zoo.tables import entries
from torch import nn

import qkeel
from qkeel.errors import RefusedError
from qkeel.integrations import huggingface, register_attention
from qkeel.integrations.huggingface import attend

NO_DROPOUT = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
}  # with it torch attends
FEW = (
    "llama",
    "gpt2",
    "gemma2",
    "gpt_oss",
    "deepseek_v32",
    "deepseek_v4",
)
ALL = list(entries("causal"))
# What is refused: sinks of each query, chosen blocks; models that write attention out, or have their own table of it.
REFUSED = (
    "passes sinks= to its attention",
    "passes block_indices= to its attention",
    "implements its attention itself",
    "'qkeel'",
)
# What cannot be compared: it fails with eager attention as well, here or in the backward pass.
NOT_COMPARED = ("Gemma3nForConditionalGeneration", "ReformerModelWithLMHead")


@pytest.fixture(scope="module", autouse=True)
def _registered():
    assert register_attention() == "qkeel"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("QKEEL_NATIVE", "1")
        yield


def results(entry, implementation, state):
    """The logits of a model of the zoo, and the gradients of a function of them."""
    model = build(entry, implementation)
    if state is not None:
        model.load_state_dict(state)
    given = model(**entry.maker(model))
    logits = given[0] if "logits" not in given else given.logits
    weights = [
        p for p in model.parameters() if p.requires_grad and p.is_floating_point()
    ]
    grads = torch.autograd.grad(logits.float().cos().sum(), weights, allow_unused=True)
    return model, [logits.detach(), *(g for g in grads if g is not None)]


def check(entry):
    """Compares with eager attention; returns why it is refused, where it is."""
    reference, eager = results(entry, "eager", None)
    try:
        _, ours = results(entry, "qkeel", reference.state_dict())
    except (RefusedError, KeyError) as error:
        return str(error)
    assert len(eager) == len(ours)
    for i, (a, b) in enumerate(zip(eager, ours)):
        assert torch.isfinite(b).all() or not torch.isfinite(a).all(), i
        assert (a - b).abs().max() <= 2e-4 * max(1.0, float(a.abs().max())), (
            f"number {i} of {entry.class_name}"
        )
    return ""


@pytest.mark.parametrize("entry", [e for e in ALL if e.name in FEW], ids=named)
def test_logits_and_gradients_are_those_of_eager_attention(
    entry,
):
    assert check(entry) == ""


@pytest.mark.zoo
@pytest.mark.parametrize("entry", ALL, ids=named)
def test_every_causal_model_has_the_logits_and_gradients_of_eager_attention(
    entry,
):
    if entry.class_name in NOT_COMPARED:
        pytest.skip("it fails with eager attention too")
    refused = check(entry)
    if refused:
        assert any(reason in refused for reason in REFUSED), refused
        pytest.skip(refused)


def near(measured, expected):
    """Statistics of the same sites that are the same but for rounding."""
    assert list(measured) == list(expected) != []
    for name, stats in measured.items():
        for field in ("max_logit", "entropy"):
            ours, theirs = (getattr(x, field) for x in (stats, expected[name]))
            assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_model_is_watched_as_with_sdpa(kind):
    measured, losses = [], []
    for implementation in ("sdpa", "qkeel"):
        model = hf(kind, implementation, **NO_DROPOUT.get(kind, {})).train()
        x = example(kind, batch=2, tokens=24)
        optimizer = adamw(model, 0.01)
        with qkeel.watch(model, optimizer) as monitor:
            for _ in range(2):
                loss = out(model, x).square().mean()
                loss.backward()
                optimizer.step()
            losses.append(float(loss.detach()))
            measured.append(monitor.read())
            assert all(site.terms and site.verified for site in monitor.sites)
    near(*measured)
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v32", "gemma2"])
def test_sinks_chosen_keys_and_a_softcap_are_watched_as_with_eager_attention(kind):
    entry, measured = next(e for e in ALL if e.name == kind), []
    state = build(entry, "eager").state_dict()
    for implementation in ("eager", "qkeel"):
        model = build(entry, implementation)
        model.load_state_dict(state)
        with torch.no_grad(), qkeel.watch(model) as monitor:
            model(**entry.maker(model))
        measured.append(monitor.read())
    near(*measured)


def test_remedies_reach_it_as_they_reach_sdpa():
    x = example("llama")
    for remedy in ("qk_clip:threshold=0.01", "qk_norm", "softcap"):
        found = []
        for implementation in ("sdpa", "qkeel"):
            model = hf("llama", implementation).train()
            optimizer = sgd(model)
            qkeel.apply(model, remedy, optimizer, batch=x)
            for _ in range(2):
                out(model, x).square().mean().backward()
                optimizer.step()
            found.append(out(model, x).detach())
        assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def truth(q, k, v, mask, causal, options):
    """What `attend` says that it computes, in float64, from every pair of a query and a key."""
    (t, s), share = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(share, 1) for x in (k, v))
    z = q @ k.mT * options.get("scaling", q.shape[-1] ** -0.5)
    z = z + options.get("position_bias", 0.0)
    shown = torch.ones(t, s, dtype=torch.bool)
    if causal and mask is None and t > 1:
        shown = shown.tril()
    if mask is not None:
        shown = shown & (mask if mask.dtype == torch.bool else mask > -1e30)
    if "indices" in options:
        shown = (
            shown & (options["indices"][..., None] == torch.arange(s)).any(2)[:, None]
        )
    cap = options.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    z = z.masked_fill(~shown, -torch.inf)
    for name in {"s_aux", "sinks"} & {*options}:
        sink = options[name].double().view(-1, 1, 1).expand(*z.shape[:2], t, 1)
        z, v = torch.cat([z, sink], -1), nn.functional.pad(v, (0, 0, 0, 1))
    return (z.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("native", ["1", "0"])
def test_drawn_calls_are_computed_as_written(native, monkeypatch):
    monkeypatch.setenv("QKEEL_NATIVE", native)
    for seed in range(60):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        pick, toss = rng.choice, lambda p=0.5, rng=rng: rng.random() < p
        g, t, d = pick((1, 2)), pick((1, 4, 9)), pick((8, 24))
        h, s = g * pick((1, 3)), pick((t, t + 3))
        q, k = torch.randn(2, h, t, d), torch.randn(2, g, s, d)
        v = torch.randn(2, g, s, pick((8, d)))
        shown = (torch.rand(2, 1, t, s) < 0.6) | torch.eye(t, s, dtype=torch.bool)
        low = torch.zeros(2, 1, t, s).masked_fill(~shown, torch.finfo(q.dtype).min)
        mask, module, options = pick((None, shown, low)), nn.Module(), {}
        causal = toss()
        if toss():
            options["is_causal"] = causal
        elif not causal:
            module.is_causal = False
        if toss():
            options["scaling"] = pick((0.5, 1.0))
        if toss(0.3):
            options["softcap"] = 2.0
        elif toss(0.4):
            options["position_bias"] = torch.randn(1, h, t, s)
        if toss(0.3):
            options[pick(("s_aux", "sinks"))] = torch.randn(h)
        if (s == t or mask is not None) and toss(0.3):
            own = torch.arange(t)[None, :, None].expand(2, t, 1)
            options["indices"] = torch.cat([own, torch.randint(s, (2, t, 2))], -1)
        out, weights = attend(module, q, k, v, mask, **options)
        assert (weights, out.is_contiguous()) == (None, True)
        assert_close(
            out.double(),
            truth(q, k, v, mask, causal, options),
            rtol=2e-5,
            atol=2e-5,
            msg=lambda text, seed=seed: f"{seed}: {text}",
        )


class Config:
    """A configuration of no model of transformers."""


@pytest.mark.parametrize(
    ("sdpa", "backend", "kind"),
    [(True, True, "sdpa"), (True, False, "sdpa"), (False, True, "eager")],
)
def test_a_model_gets_the_mask_that_it_reads(sdpa, backend, kind, monkeypatch):
    supports = {"_supports_sdpa": sdpa, "_supports_attention_backend": backend}
    home = type("Home", (), supports)
    for name in ("sdpa", "eager"):
        made = lambda name=name, **_: name  # noqa: E731
        monkeypatch.setattr(huggingface, f"{name}_mask", made)
    for homes, expected in (
        ({}, "eager"),
        ({Config: home}, kind),
        ({Config: (home, object)}, kind),
        ({Config: None}, "sdpa"),
    ):
        monkeypatch.setattr(huggingface, "MODEL_MAPPING", homes)
        assert huggingface.mask(config=Config()) == expected


class Attends(nn.Module):
    """A module that gives attention a tensor of its own."""

    def forward(self, x, **more):
        return attend(self, x, x, x, None, slopes=x, **more)[0]


def test_what_changes_attention_otherwise_is_refused():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(
        RefusedError, match=r"Attends passes slopes= to its attention.*eager"
    ):
        Attends()(q)
    with pytest.raises(RefusedError, match=r"sinks=.*eager"):
        attend(nn.Module(), q, q, q, None, sinks=torch.zeros(1, 2, 3, 1))
    assert attend(nn.Module(), q, q, q, None, cache=None)[0].shape == (1, 3, 2, 8)
    with pytest.raises(RefusedError, match=r"cache=.*eager"):
        attend(nn.Module(), q, q, q, None, cache=object())
    mpt = next(e for e in ALL if e.name == "mpt")
    assert "MptModel implements its attention itself" in check(mpt)


@pytest.mark.parametrize(
    "name", ["num_items_in_batch", "shift_labels", "weights_of_my_loss"]
)
def test_what_a_caller_gives_the_model_for_its_loss_changes_nothing(name):
    model, x = hf("llama", "qkeel"), example("llama")
    x = x if isinstance(x, dict) else {"input_ids": x}
    given = x["input_ids"] if name == "shift_labels" else torch.tensor(7)
    assert torch.equal(model(**x, **{name: given}).logits, model(**x).logits)


@pytest.mark.slow
def test_importing_qkeel_imports_no_transformers():
    code = "import sys, qkeel, qkeel.integrations, qkeel.nn; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
