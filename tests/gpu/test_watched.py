"""Models of others on a CUDA device: watched, remedied and audited there as on the CPU."""

import warnings

import pytest
import torch
from benchmarks.watch import GPT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import qkeel
from qkeel.errors import QkeelError
from qkeel.remedies import REMEDIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def plain():
    return GPT(64, 2)


def from_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    if name == "GPT2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
    else:
        sizes |= {"intermediate_size": 96, "num_key_value_heads": 2}
    return getattr(
        transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    )(getattr(transformers, f"{name}Config")(**sizes))


MODELS = {"plain": plain} | {
    name: lambda name=name: from_transformers(name)
    for name in ("GPT2", "Llama", "Qwen3")
}


def logits_of(model, tokens):
    found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


def made(name, device):
    torch.manual_seed(3)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for parameter in model.parameters():
        if parameter.dim() == 2:  # wide logits, so that a mistake in them shows
            parameter.data.mul_(4.0)
    tokens = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(4)).to(
        device
    )
    model = model.to(device).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), tokens


def train(model, optimizer, tokens, steps):
    losses = []
    for _ in range(steps):
        loss = cross_entropy(
            logits_of(model, tokens)[:, :-1].flatten(0, 1).float(),
            tokens[:, 1:].flatten(),
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stats", [True, "max"])
def test_what_is_recorded_is_what_a_cpu_records(name, stats):
    found = []
    for device in ("cuda", "cpu"):
        model, optimizer, tokens = made(name, device)
        monitor = qkeel.watch(model, optimizer, stats=stats, rules=[])
        train(model, optimizer, tokens, 1)
        found.append(dict(monitor.history.heads))
        monitor.remove()
    ours, truth = found
    assert ours.keys() == truth.keys()
    assert "max_logit" in truth
    for field, numbers in truth.items():
        torch.testing.assert_close(
            torch.as_tensor(ours[field]),
            torch.as_tensor(numbers),
            rtol=2e-3,
            atol=2e-3,
            equal_nan=True,
            msg=field,
        )


@pytest.mark.parametrize("name", MODELS)
def test_watching_leaves_every_bit_of_training(name, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, losses = torch.are_deterministic_algorithms_enabled(), []
    # Two runs that nobody watches would differ without.
    torch.use_deterministic_algorithms(True)
    try:
        for stats in (None, True, "max"):
            model, optimizer, tokens = made(name, "cuda")
            monitor = (
                None
                if stats is None
                else qkeel.watch(model, optimizer, stats=stats, rules=[])
            )
            losses.append(train(model, optimizer, tokens, 4))
            if monitor is not None:
                monitor.remove()
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("remedy", [name for name in REMEDIES if name != "dropout"])
def test_a_remedy_does_on_a_gpu_what_it_does_on_a_cpu(name, remedy):
    text = {"qk_clip": "qk_clip:threshold=1", "softcap": "softcap:cap=5"}.get(
        remedy, remedy
    )
    results = []
    for device in ("cuda", "cpu"):
        model, optimizer, tokens = made(name, device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                handle = qkeel.apply(model, text, optimizer, batch=tokens)
        except QkeelError as error:
            results.append(type(error))
            continue
        losses = train(model, optimizer, tokens, 3)
        assert torch.isfinite(losses).all()
        results.append(losses)
        handle.remove()
    if isinstance(results[0], type):
        assert results[0] is results[1]
    else:
        torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)
