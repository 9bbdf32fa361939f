"""retrofit: a norm in a trained model, fitted so that it hardly shows, and taken out bit for bit."""

import copy

import pytest
import torch
from tests.attention import from_heads
from tests.each_row import each_row
from tests.quick import one_in
from tests.training import adamw
from torch import nn
from torch.testing import assert_close

from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.remedies.retrofit import RetrofitConfig, retrofit

from .models import assert_same, snapshot

transformers = pytest.importorskip("transformers")
VOCAB, LENGTH = 16, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
START = RetrofitConfig(iterations=0)
GAINS = RetrofitConfig(iterations=8)


def text(n, seed):
    """Each token has three successors; the second half repeats the first, so attention has something to find."""
    rng = torch.Generator().manual_seed(0)
    after = torch.randint(0, VOCAB, (VOCAB, 3), generator=rng)
    rng.manual_seed(seed)
    x = torch.zeros(n, LENGTH, dtype=torch.long)
    x[:, 0] = torch.randint(0, VOCAB, (n,), generator=rng)
    for i in range(1, LENGTH // 2):
        x[:, i] = after[x[:, i - 1], torch.randint(0, 3, (n,), generator=rng)]
    x[:, LENGTH // 2 :] = x[:, : LENGTH // 2]
    return x


@pytest.fixture(scope="module")
def llama():
    """A Llama that has learnt to copy a little."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    optimizer = adamw(model, 0.01)
    for step in range(60):
        optimizer.zero_grad()
        model(input_ids=(x := text(8, step)), labels=x).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


BATCHES = [text(16, seed) for seed in range(1000, 1003)]


@pytest.mark.parametrize(
    "gain", one_in(["dim", "head_dim", "one_plus_dim", "head", "scalar"], 3)
)
def test_gains_alone_bring_it_closer_and_nothing_else_changes(llama, gain):
    optimizer = adamw(llama, 0.001)
    before = snapshot(llama, optimizer)
    weights = copy.deepcopy(llama.state_dict())
    options = {"optimizer": optimizer, "config": GAINS}
    batch = text(48, 1000)
    with retrofit(llama, f"qk_norm:gain={gain}", batch, **options) as handle:
        report = handle.report
        assert report.naive.kl > 0.05  # or there was nothing to repair
        assert report.gap.kl < report.naive.kl / 3
        gains = set(llama.state_dict()) - set(weights)
        assert len(gains) == 4
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert {id(llama.get_parameter(name)) for name in gains} <= held
        assert all(torch.equal(p, llama.state_dict()[n]) for n, p in weights.items())
        assert all(p.grad is None for p in llama.parameters())
    assert_same(before, snapshot(llama, optimizer))


@pytest.mark.parametrize("gain", ["dim", "head_dim", "head", "scalar"])
def test_a_gain_starts_where_it_brings_the_norm_nearest_to_what_it_norms(llama, gain):
    model, queries = copy.deepcopy(llama).double(), []
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda *call: queries.append(call[2]))
    model(BATCHES[0])
    q = queries[0].unflatten(-1, (4, 16))  # [b t h d]
    n = q / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    shared = {"dim": (0, 1, 2), "head_dim": (0, 1), "head": (0, 1, 3)}
    over = shared.get(gain, (0, 1, 2, 3))
    best = (q * n).sum(over) / n.square().sum(over)
    retrofit(model, f"qk_norm:gain={gain}", BATCHES[:2], config=START)
    started = model.model.layers[0].self_attn.q_norm.weight.detach()
    assert_close(started.squeeze(-1) if gain == "head" else started, best)


@each_row(
    "error, remedy, batch",
    [
        (RefusedError, "qk_norm:gain=none", BATCHES),
        (RefusedError, "qk_norm:kind=l2", BATCHES),
        (RefusedError, "lalr", BATCHES),
        (InvalidTypeError, "qk_norm", []),
        (InvalidTypeError, "qk_norm", "batch"),
        (InvalidTypeError, "qk_norm", None),
        (InvalidTypeError, "qk_norm", ()),
    ],
)
def test_what_has_nothing_to_fit_is_refused_and_left_alone(llama, error, remedy, batch):
    before = snapshot(llama)
    with pytest.raises(error):
        retrofit(llama, remedy, batch)
    assert_same(before, snapshot(llama))


def test_what_is_normed_already_is_refused():
    config = transformers.Qwen3Config(**{**SIZES, "num_hidden_layers": 1})
    with pytest.raises(RefusedError):
        retrofit(transformers.Qwen3ForCausalLM(config), "qk_norm", BATCHES)
    with pytest.raises(InvalidTypeError):
        retrofit("llama", "qk_norm", BATCHES)
    for options in ({"iterations": -1}, {"iterations": 1.5}, {"eps": -1.0}):
        with pytest.raises(InvalidValueError):
            RetrofitConfig(**options)


def padded(rows, pad):
    """A batch whose first row starts with padding."""
    x = text(rows, rows)
    mask = torch.ones_like(x)
    mask[0, :pad] = 0
    at = torch.arange(LENGTH).expand_as(x)
    # Arguments of the shape of the tokens come first.
    return {
        "attention_mask": mask,
        "position_ids": at,
        "input_ids": x,
    }


def test_the_gap_is_that_of_all_tokens_however_they_are_batched(llama):
    batches = [*[padded(2, 0)] * 8, padded(6, 0), padded(1, 18)]
    model = copy.deepcopy(llama)
    report = retrofit(model, "qk_norm", batches, config=START).report
    assert report.held_out == "2 of 10 batches"
    kl = []
    with torch.no_grad():
        for batch in batches[8:]:
            x, mask = batch["input_ids"], batch["attention_mask"]
            inputs = {"input_ids": x, "attention_mask": mask}
            p, q = (m(**inputs).logits.double().log_softmax(-1) for m in (llama, model))
            kl.append((p.exp() * (p - q)).sum(-1)[mask == 1])
    assert report.gap.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    first, *lines = str(report).splitlines()
    assert report.held_out in first
    stages = [report.naive.kl, report.gap.kl]
    printed = [float(line.rpartition(" KL ")[2]) for line in lines]
    assert printed == pytest.approx(stages, rel=1e-3)
    by_batch = sum(float(values.mean()) for values in kl) / 2
    assert abs(by_batch / report.gap.kl - 1) > 0.02  # or the batches differ too little


class Regressor(nn.Module):
    """Attention whose outputs are numbers: one a sample, or channels of every token."""

    def __init__(self, outputs, pooled):
        super().__init__()
        self.read, self.qkv = nn.Linear(3, 16), nn.Linear(16, 48)
        self.write, self.pooled = nn.Linear(16, outputs), pooled

    def forward(self, x, attention_mask):
        h = self.read(x)
        qkv = self.qkv(h).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        seen = attention_mask[:, None, None].bool()
        out = nn.functional.scaled_dot_product_attention(*qkv, attn_mask=seen)
        y = self.write(h + from_heads(out))
        return y.mean(1) if self.pooled else y


@pytest.mark.parametrize(
    ("outputs", "pooled", "length", "kind"),
    [
        (1, True, 6, torch.float32),
        (1, False, 6, torch.bool),
        (3, False, 4, torch.float32),
        (3, False, 4, torch.int64),
        (3, False, 4, torch.bool),
    ],
)
def test_numbers_are_fitted_by_their_squared_error_on_rows_that_were_not_fitted(
    outputs, pooled, length, kind
):
    """Of tokens that are no padding."""
    torch.manual_seed(outputs)
    model, x = Regressor(outputs, pooled), torch.randn(40, 6, 3)
    mask = (torch.arange(6) < length).to(kind).expand(40, -1)
    with torch.no_grad():
        model.qkv.weight[:16] *= 6
        old = model(x[32:], mask[32:])
        # A mask is known by its name, which an argument by position has in forward.
        batch = (x, mask) if kind is torch.bool else {"x": x, "attention_mask": mask}
        report = retrofit(model, "qk_norm", batch).report
        changed = (model(x[32:], mask[32:]) - old).square()
        counted = changed if pooled else changed[mask[32:] == 1]
        error = float(counted.mean() / old.var(correction=0))
    assert report.held_out == "8 of 40 sequences"
    assert report.gap.error == pytest.approx(error, rel=1e-3)
    assert report.naive.error is not None
    assert f"squared error {report.gap.error:.4g} " in str(report)
    assert error < 0.95 * report.naive.error


def test_a_single_row_is_measured_itself(llama):
    with retrofit(llama, "qk_norm", BATCHES[0][:1], config=START) as handle:
        assert handle.report.held_out == ""
