"""retrofit: a norm in a trained model, fitted so that it hardly shows, taken out bit for bit, exported."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quick import one_in
from torch import Tensor, nn

import qkeel
from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, RefusedError
from qkeel.remedies.change_norm import HeadNorm
from qkeel.remedies.retrofit import RetrofitConfig, retrofit
from qkeel.remedies.retrofit.balance import Balance
from qkeel.remedies.retrofit.fit_gains import least_squares
from qkeel.remedies.retrofit.outputs import Reference
from qkeel.remedies.retrofit.replay import QueryRows
from qkeel.sites import find_sites

from .foreign import example, hf
from .models import assert_same, decoder, snapshot, tokens, train

transformers = pytest.importorskip("transformers")
VOCAB, LENGTH = 16, 24


def text(n: int, rng: torch.Generator) -> Tensor:
    """Each token has three successors; the second half repeats the first, so attention has something to find."""
    after = torch.randint(
        0, VOCAB, (VOCAB, 3), generator=torch.Generator().manual_seed(0)
    )
    x = torch.zeros(n, LENGTH, dtype=torch.long)
    x[:, 0] = torch.randint(0, VOCAB, (n,), generator=rng)
    for i in range(1, LENGTH // 2):
        x[:, i] = after[x[:, i - 1], torch.randint(0, 3, (n,), generator=rng)]
    x[:, LENGTH // 2 :] = x[:, : LENGTH // 2]
    return x


def trained(steps: int, width: int = 64, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        **sizes,
        **heads,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = text(8, rng)
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    """A Llama that has learnt to copy a little."""
    return trained(100)


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [text(16, rng) for _ in range(4)]


@pytest.fixture
def held_out() -> list[Any]:
    return [((text(64, torch.Generator().manual_seed(3)),), {})]


def naive_kl(model: nn.Module, held_out: list[Any]) -> tuple[Reference, float]:
    reference = Reference(model, held_out)
    with qkeel.apply(model, "qk_norm", batch=held_out[0][0][0]):
        return reference, reference.gap().kl


def test_after_calibration_the_first_outputs_are_ten_times_closer_than_naive_insertion(
    llama: nn.Module, batches: list[Tensor], held_out: list[Any], tmp_path: Path
) -> None:
    reference, naive = naive_kl(llama, held_out)
    before = snapshot(llama)
    with retrofit(llama, "qk_norm", batches) as found:
        report = found.report
        assert report.distilled is None
        assert report.balanced is not None
        assert report.naive.kl > 0.05  # or there was nothing to repair
        assert (
            report.gap.kl == report.balanced.kl < report.fitted.kl < report.naive.kl / 3
        )
        assert report.gap.kl < report.naive.kl / 10
        assert reference.gap().kl < naive / 10  # on text that it was not fitted to
        out = qkeel.export(llama, "qwen3", tmp_path / "qwen3")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert type(loaded).__name__ == "Qwen3ForCausalLM"
        logits = llama(batches[0]).logits
        assert (
            loaded(batches[0]).logits - logits
        ).abs().max() <= 1e-6 * logits.abs().max()
    assert_same(before, snapshot(llama))


@pytest.mark.slow
def test_distillation_comes_on_top_and_all_of_it_comes_off(
    llama: nn.Module, batches: list[Tensor], held_out: list[Any]
) -> None:
    reference, naive = naive_kl(llama, held_out)
    before = snapshot(llama)
    with retrofit(
        llama,
        "qk_norm",
        batches,
        config=RetrofitConfig(iterations=10, distil=60, lr=3e-3),
    ) as found:
        report = found.report
        assert report.distilled is not None
        assert report.balanced is not None
        assert report.gap.kl == report.distilled.kl < report.balanced.kl
        assert reference.gap().kl < naive / 15
    assert_same(before, snapshot(llama))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("llama", 4), ("neox", 4), ("gpt2", 8), ("qwen2", 4), ("deepseek", 0)],
)
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_queries_scaled_against_keys_leave_a_model_without_a_norm_as_it_is(
    name: str, numbers: int, how: str
) -> None:
    """Llama pairs halves, GPT-NeoX here the first two of eight; GPT-2 turns nothing; latent keys have none."""
    model, batch = hf(name, how).double(), ((example(name),), {})
    state = {n: p.clone() for n, p in model.state_dict().items()}
    reference = Reference(model, [batch])
    balance = Balance.of(reference, find_sites(model, batch[0]))
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in state.items())
    if balance is None:
        assert numbers == 0
        return
    assert [t.shape for t in balance.numbers] == [
        (2 if name in ("llama", "qwen2") else 4, numbers)
    ] * 2
    with torch.no_grad():
        for t in balance.numbers:
            t.uniform_(-1, 1)
    balance.put()
    assert not torch.equal(
        state[balanced_weight(name)], model.state_dict()[balanced_weight(name)]
    )
    assert reference.gap().kl < 1e-14
    balance.restore()
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in state.items())


def balanced_weight(name: str) -> str:
    """A weight that makes queries."""
    fused = {
        "gpt2": "transformer.h.0.attn.c_attn.weight",
        "neox": "gpt_neox.layers.0.attention.query_key_value.weight",
    }
    return fused.get(name, "model.layers.0.self_attn.q_proj.weight")


def test_weights_that_something_else_uses_are_not_scaled(batches: list[Tensor]) -> None:
    model = trained(0)
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[
        0
    ].self_attn.q_proj.weight
    sites = find_sites(model, batches[0])
    assert Balance(model, sites).sites == []


@pytest.mark.parametrize("gain", one_in(["dim", "head_dim", "one_plus_dim"], 3))
def test_gains_alone_bring_it_closer_by_attention_and_by_output(
    llama: nn.Module, batches: list[Tensor], held_out: list[Any], gain: str
) -> None:
    reference, naive = naive_kl(llama, held_out)
    weights = {n: p.clone() for n, p in llama.state_dict().items()}
    how = RetrofitConfig(iterations=8, balance=False)
    with retrofit(llama, f"qk_norm:gain={gain}", batches[:2], config=how) as found:
        report = found.report
        assert report.balanced is report.distilled is None
        assert reference.gap().kl < naive / 3
        assert all(torch.equal(p, llama.state_dict()[n]) for n, p in weights.items())
        assert all(p.grad is None for p in llama.parameters())
        assert all(p.requires_grad for p in llama.parameters())
        for layer in report.layers:
            assert sum(layer.attention_kl) < sum(layer.attention_kl_naive)
            assert len(layer.attention_kl) == 4


def test_least_squares_recovers_a_scale_per_head_and_ignores_what_softmax_ignores() -> (
    None
):
    rng = torch.Generator().manual_seed(0)
    new = torch.randn(2, 3, 5, 7, generator=rng, dtype=torch.float64)
    factors = torch.tensor([0.2, 1.0, 6.0], dtype=torch.float64)
    old = new * factors[:, None, None] + torch.randn(
        2, 3, 5, 1, generator=rng, dtype=torch.float64
    )
    visible = (torch.arange(7) <= torch.arange(5)[:, None] + 2).expand(2, 3, 5, 7)
    counted = torch.ones(2, 3, 5, dtype=torch.bool)
    one, two = (
        QueryRows(logits=z.masked_fill(~visible, 1e4), visible=visible, counted=counted)
        for z in (old, new)
    )
    assert torch.allclose(least_squares([one], [two], shared=False), factors)
    # By hand, a single row of weights p, shared over heads: a = Cov_p(z, x) / Var_p(x).
    z, x = torch.tensor([0.0, torch.log(torch.tensor(3.0))]), torch.tensor([1.0, 2.0])
    seen, rows = (
        torch.ones(1, 1, 1, 2, dtype=torch.bool),
        torch.ones(1, 1, 1, dtype=torch.bool),
    )
    one, two = (
        QueryRows(logits=v.view(1, 1, 1, 2), visible=seen, counted=rows) for v in (z, x)
    )
    assert torch.allclose(
        least_squares([one], [two], shared=True),
        torch.log(torch.tensor([3.0]).double()),
    )


@pytest.mark.parametrize("gain", ["dim", "head"])
def test_own_models_are_retrofitted_too(gain: str) -> None:
    model = decoder(n_kv_heads=2)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 30)
    model.zero_grad()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight.mul_(4)
    given, before = [tokens(8, 12)], snapshot(model)
    with retrofit(
        model,
        f"qk_norm:gain={gain}",
        given,
        config=RetrofitConfig(iterations=4, distil=10),
    ) as found:
        report = found.report
        assert report.gap.kl < report.naive.kl / 2
        assert report.fitted.kl < report.naive.kl
    assert_same(before, snapshot(model))


def test_gains_join_the_optimizer_and_leave_it(
    llama: nn.Module, batches: list[Tensor]
) -> None:
    model = copy.deepcopy(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = snapshot(model, optimizer)
    with retrofit(
        model,
        "qk_norm",
        batches[:1],
        optimizer=optimizer,
        config=RetrofitConfig(iterations=1),
    ):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert id(model.get_parameter("model.layers.0.self_attn.q_norm.weight")) in held
    assert_same(before, snapshot(model, optimizer))


def test_what_is_normed_already_or_has_nothing_to_fit_is_refused_and_left_alone(
    llama: nn.Module, batches: list[Tensor]
) -> None:
    before = snapshot(llama)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "head_dim": 4,
    }
    config = transformers.Qwen3Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2
    )
    with pytest.raises(RefusedError, match="already normed"):
        retrofit(transformers.Qwen3ForCausalLM(config), "qk_norm", batches)
    handle = qkeel.apply(model := copy.deepcopy(llama), "qk_norm", batch=batches[0])
    with handle, pytest.raises(QkeelError, match="already"):
        retrofit(model, "qk_norm", batches)
    for named, message in (
        ("qk_norm:gain=none", "no gain"),
        ("qk_norm:kind=l2", "no gain"),
        ("lalr", "expected 'qk_norm'"),
    ):
        with pytest.raises(RefusedError, match=message):
            retrofit(llama, named, batches)
    for given in ([], "batch", None):
        with pytest.raises(InvalidTypeError, match="list of one or more batches"):
            retrofit(llama, "qk_norm", given)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidTypeError, match="the arguments of one batch or several batches"
    ):
        retrofit(llama, "qk_norm", (batches[0], torch.ones_like(batches[0])))
    with pytest.raises(InvalidTypeError, match=r"torch\.nn\.Module"):
        retrofit("llama", "qk_norm", batches)  # type: ignore[arg-type]
    for options in (
        {"distil": -1},
        {"iterations": 1.5},
        {"lr": 0.0},
        {"eps": -1.0},
    ):
        with pytest.raises(InvalidValueError, match="expected"):
            RetrofitConfig(**options)  # type: ignore[arg-type]
    assert_same(before, snapshot(llama))


def test_a_retrofit_that_fails_half_way_leaves_the_model_as_it_was(
    llama: nn.Module, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(llama)
    calls: list[int] = []

    def broken(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return model(*batch[0]).logits

    monkeypatch.setattr("qkeel.remedies.retrofit.insert.predictions", broken)
    with pytest.raises(KeyboardInterrupt):
        retrofit(
            llama, "qk_norm", batches[:1], config=RetrofitConfig(iterations=0, distil=5)
        )
    assert_same(before, snapshot(llama))
    assert all(p.requires_grad and p.grad is None for p in llama.parameters())


def test_an_export_is_what_the_model_computes_or_is_refused(
    llama: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    model = copy.deepcopy(llama)
    with pytest.raises(RefusedError, match="q and k are not normed yet"):
        qkeel.export(model, "qwen3", tmp_path / "a")
    retrofit(
        model,
        "qk_norm:gain=one_plus_dim",
        batches[:1],
        config=RetrofitConfig(iterations=1, eps=1e-3),
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        qkeel.export(model, "qwen3", tmp_path / "b")
    )
    logits = model(batches[0]).logits
    assert (
        loaded.eval()(batches[0]).logits - logits
    ).abs().max() <= 1e-6 * logits.abs().max()
    handle = qkeel.apply(model, "final_softcap:module=lm_head", batch=batches[0])
    with handle, pytest.raises(RefusedError, match="final_softcap is active"):
        qkeel.export(model, "qwen3", tmp_path / "c")
    with pytest.raises(RefusedError, match="over all heads"):
        qkeel.export(model, "olmo2", tmp_path / "c")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["b"]


def test_a_model_whose_head_is_its_embedding_without_a_word_in_the_config_is_exported(
    batches: list[Tensor], tmp_path: Path
) -> None:
    model = trained(0)
    model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    retrofit(model, "qk_norm", batches[:1], config=RetrofitConfig(iterations=0))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        qkeel.export(model, "qwen3", tmp_path / "out")
    )
    assert (
        loaded.eval()(batches[0]).logits - model(batches[0]).logits
    ).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "names",
    [("attention_mask", "position_ids", "input_ids"), ("input_ids", "attention_mask")],
)
def test_the_loss_is_that_of_the_tokens_in_whatever_order_arguments_come(
    names: tuple[str, ...], llama: nn.Module, batches: list[Tensor]
) -> None:
    tokens = batches[0]
    known = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    known["position_ids"] = torch.arange(LENGTH).expand_as(tokens)
    batch = {name: known[name] for name in names}
    with torch.no_grad():
        logits = llama(**batch).logits.double()
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    loss = losses[
        len(tokens) - len(tokens) // 5 :
    ].mean()  # of the rows that are not fitted
    assert retrofit(
        copy.deepcopy(llama), "qk_norm", batch, config=RetrofitConfig(iterations=0)
    ).report.old_loss == (pytest.approx(float(loss), rel=1e-5))


def padded(rows: int, pad: int, *, labels: bool) -> dict[str, Tensor]:
    """A batch whose first row starts with padding; labels leave out the first tokens of every row too."""
    tokens = text(rows, torch.Generator().manual_seed(rows))
    mask = torch.ones_like(tokens)
    mask[0, :pad] = 0
    chosen = tokens.masked_fill(mask == 0, -100)
    chosen[:, :5] = -100
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        **({"labels": chosen} if labels else {}),
    }


@pytest.mark.parametrize("labels", [False, True])
def test_the_gap_is_that_of_all_tokens_however_they_are_batched(
    labels: bool, llama: nn.Module
) -> None:
    several = [
        padded(6, 0, labels=labels),
        padded(1, 18, labels=labels),
    ]  # held out: a fifth of ten
    fitted = [padded(2, 0, labels=labels)] * 8
    model = copy.deepcopy(llama)
    config = RetrofitConfig(iterations=1, balance=False)
    report = retrofit(model, "qk_norm", [*fitted, *several], config=config).report
    assert "2 of 10 batches" in str(report)
    kl, before, after = [], [], []
    with torch.no_grad():
        for batch in several:
            known = {name: batch[name] for name in ("input_ids", "attention_mask")}
            p, q = (m(**known).logits.double().log_softmax(-1) for m in (llama, model))
            kl.append((p.exp() * (p - q)).sum(-1)[batch["attention_mask"] == 1])
            counted = (
                (batch["labels"][:, 1:] != -100)
                if labels
                else (batch["attention_mask"][:, 1:] == 1)
            )
            for z, into in ((p, before), (q, after)):
                into.append(
                    -z[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0][
                        counted
                    ]
                )
    old, new = (float(torch.cat(losses).mean()) for losses in (before, after))
    assert report.old_loss == pytest.approx(old, rel=1e-5)
    assert report.gap.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert report.gap.loss == pytest.approx(new - old, rel=1e-3, abs=1e-5)
    assert abs(float(sum(one.mean() for one in kl)) / 2 / report.gap.kl - 1) > 0.02, (
        "the batches do not differ enough"
    )


def test_a_llama_reordered_and_normed_over_all_heads_is_an_olmo_2(
    batches: list[Tensor], tmp_path: Path
) -> None:
    model = trained(0)  # norms after the branches of a trained one blow rounding up
    qkeel.apply(model, "swin_norm+qk_norm:over=layer,gain=head_dim", batch=batches[0])
    for module in model.modules():
        if isinstance(module, HeadNorm):
            module.norm = dataclasses.replace(
                module.norm, eps=1e-5
            )  # the model's own, so no weight is rescaled
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.uniform_(0.5, 1.5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        qkeel.export(model, "olmo2", tmp_path / "olmo2")
    )
    assert type(loaded).__name__ == "Olmo2ForCausalLM"
    logits = model(batches[0]).logits
    assert (
        loaded.eval()(batches[0]).logits - logits
    ).abs().max() <= 1e-6 * logits.abs().max()


class Regressor(nn.Module):
    """Attention whose outputs are numbers: one a sample, or channels of every token."""

    def __init__(self, outputs: int, pooled: bool) -> None:
        super().__init__()
        self.read, self.pooled = nn.Linear(3, 16), pooled
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.write = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        q, k, v = (
            f(h).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        h = h + nn.functional.scaled_dot_product_attention(q, k, v).transpose(
            1, 2
        ).flatten(2)
        y = self.write(h)
        return y.mean(1) if self.pooled else y


@pytest.mark.parametrize(("outputs", "pooled"), [(1, True), (1, False), (3, False)])
def test_numbers_are_fitted_by_their_squared_error_on_rows_that_were_not_fitted(
    outputs: int, pooled: bool
) -> None:
    torch.manual_seed(outputs)
    model = Regressor(outputs, pooled)
    with torch.no_grad():
        model.q.weight.mul_(6)
    x = torch.randn(40, 6, 3)
    held = x[32:]
    with torch.no_grad():
        old = model(held)
    report = retrofit(model, "qk_norm", x).report
    with torch.no_grad():
        error = float((model(held) - old).square().mean() / old.var(correction=0))
    assert "8 of 40" in str(report)
    assert report.gap.error == pytest.approx(error, rel=1e-3)
    assert report.naive.error is not None
    assert report.gap.error < 0.95 * report.naive.error


def test_a_single_row_is_measured_itself_and_the_report_says_so(
    llama: nn.Module, batches: list[Tensor]
) -> None:
    model = copy.deepcopy(llama)
    report = retrofit(
        model, "qk_norm", batches[0][:1], config=RetrofitConfig(iterations=0)
    ).report
    assert not report.held_out
    assert "that was fitted" in str(report)
