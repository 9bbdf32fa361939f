"""A checkpoint scanned, a model explained, retrofitted, folded and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkeel
from qkeel.audit import scan

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model(kind: str = "Llama") -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 32, (4, 12), generator=torch.Generator().manual_seed(seed))


def test_a_scan_says_the_norm_of_each_heads_weights_and_finds_the_head_that_is_out_of_line(
    tmp_path: Path,
) -> None:
    llama = model()
    with torch.no_grad():
        llama.model.layers[1].self_attn.q_proj.weight[8:16] *= 50  # type: ignore[index,union-attr]
    llama.save_pretrained(tmp_path)  # type: ignore[operator]
    found = scan(tmp_path)
    assert len(found.sites) == 2
    assert "head 1" in str(qkeel.audit.table(found))


@pytest.mark.parametrize(
    ("kind", "norm", "cap"),
    [("Llama", "none", None), ("Qwen3", "RMS", None), ("Gemma2", "none", 50.0)],
)
def test_the_attention_of_a_model_is_explained(
    kind: str, norm: str, cap: float | None
) -> None:
    found = qkeel.explain(model(kind), tokens())
    assert [site.name for site in found.sites] == [
        f"model.layers.{i}.self_attn" for i in (0, 1)
    ]
    for site in found.sites:
        assert (site.n_heads, site.n_kv_heads, site.head_dim) == (4, 2, 8)
        assert site.query.kind == site.key.kind == norm
        assert site.softcap == cap


def test_a_retrofitted_llama_is_closer_than_with_a_norm_put_in_and_exports_to_qwen3(
    tmp_path: Path,
) -> None:
    llama = model()
    before = llama(tokens()).logits
    with qkeel.retrofit(llama, "qk_norm", [tokens(1), tokens(2)]) as fitted:
        assert fitted.report.gap.kl < fitted.report.naive.kl
        logits = llama(tokens()).logits
        out = qkeel.export(llama, "qwen3", tmp_path / "qwen3")
    assert torch.equal(llama(tokens()).logits, before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert (loaded(tokens()).logits - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_what_a_reparametrisation_computes_is_folded_into_plain_weights() -> None:
    decoder = qkeel.nn.Decoder(qkeel.nn.DecoderConfig(vocab_size=32, d_model=32))
    names = list(decoder.state_dict())
    qkeel.apply(decoder, "sigma_reparam:init=one")
    out = decoder.eval()(tokens())
    qkeel.fold(decoder)
    assert list(decoder.state_dict()) == names
    assert torch.equal(decoder(tokens()), out)


def test_a_pickled_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "model.bin"
    torch.save({"q_proj.weight": torch.zeros(2, 2), "trap": Trap()}, path)
    for look in (scan, qkeel.check):
        with pytest.raises(qkeel.errors.QkeelError):
            look(path)
    assert not (tmp_path / "sprung").exists()
