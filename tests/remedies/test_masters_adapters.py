"""Weights that are not stepped as they are: float32 copies of low-precision weights, frozen bases with adapters."""

import copy

import pytest
import torch
from tests.quick import quick
from tests.training import adamw

import qkeel
from qkeel.errors import RefusedError
from qkeel.remedies import REMEDIES
from qkeel.sites import Tap

from .foreign import example, hf, out
from .models import trained as reached

QUERY = "model.layers.0.self_attn.q_proj.weight"


def batch():
    return example("llama")


def llama(dtype=torch.float64, name="llama"):
    return hf(name, "sdpa").to(dtype).train()


def maxima(model):
    """The largest logit of each head of the first layer, whose input no clip changes."""
    model.eval()
    with Tap(model) as tap, torch.no_grad():
        model(batch())
        stats = next(iter(tap.read().values()))
    model.train()
    return stats.max_logit


class InState(torch.optim.Optimizer):
    """A float32 copy in the state of each low-precision weight: the way of Transformer Engine's FusedAdam."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master_param"], state["momentum"] = (
                        p.detach().float(),
                        torch.zeros_like(p, dtype=torch.float),
                    )
                state["momentum"].mul_(0.9).add_(p.grad.float())
                state["master_param"].sub_(state["momentum"], alpha=group["lr"])
                p.copy_(state["master_param"])


def test_qk_clip_scales_float32_copies_in_the_state_with_the_weights():
    model, x = llama(torch.bfloat16), batch()
    optimizer = InState(model.parameters(), 0.0)
    threshold = float(maxima(model)[0]) / 2
    with qkeel.apply(model, f"qk_clip:threshold={threshold}", optimizer, batch=x):
        for _ in range(3):  # what the first step clipped no later one brings back
            reached(out(model, x))
            optimizer.step()
    largest = float(maxima(model)[0])
    assert largest == pytest.approx(threshold, rel=0.02)  # bfloat16 weights
    p = model.get_parameter(QUERY)
    assert torch.equal(p, optimizer.state[p]["master_param"].bfloat16())


# --- adapters

peft = pytest.importorskip("peft")
# peft asks transformers by a name that is on its way out.
PEFT = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def adapted(family, *targets, r=2, **options):
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    base = hf(family, "sdpa", **(dropout if family == "gpt2" else {})).double()
    config = peft.LoraConfig(
        r=r, target_modules=list(targets), fan_in_fan_out=family == "gpt2", **options
    )
    model = peft.get_peft_model(base, config).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.train()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@PEFT
@pytest.mark.parametrize(
    ("family", "targets", "rank"),
    [
        ("llama", ["q_proj", "k_proj"], 2),
        ("llama", ["q_proj"], 1),
        ("gpt2", ["c_attn"], 2),
        ("neox", ["query_key_value"], 1),
    ],
)
def test_a_clip_of_adapted_weights_is_exact_where_the_base_may_be_scaled(
    family, targets, rank
):
    model, x = adapted(family, *targets, r=rank), batch()
    before, was = copy.deepcopy(model), maxima(model)
    optimizer = torch.optim.SGD(trained(model), lr=0.0)
    threshold = float(was.max()) / 3
    with qkeel.apply(
        model, f"qk_clip:threshold={threshold},frozen=scale", optimizer, batch=x
    ):
        reached(out(model, x))
        optimizer.step()
    assert torch.allclose(maxima(model), was.clamp(max=threshold), rtol=1e-6)
    for name, p in model.named_parameters():
        assert "lora_A" not in name or torch.equal(p, before.get_parameter(name))


@pytest.mark.parametrize("side", ["q", "k"])
def test_the_refusal_names_the_weight_that_is_frozen(side):
    model = llama()
    frozen = QUERY.replace("q_proj", f"{side}_proj")
    model.get_parameter(frozen).requires_grad_(False)
    optimizer = adamw(model)
    with pytest.raises(RefusedError, match=f"scale {frozen}, which is frozen"):
        qkeel.apply(model, "qk_clip:groups=group", optimizer, batch=batch())


@PEFT
@pytest.mark.parametrize(
    "remedy",
    quick(
        [
            name
            for name, remedy in REMEDIES.items()
            if not remedy.on_steps and name not in ("none", "z_loss")
        ],
        {
            "qk_norm",
            "softcap",
            "sigma_reparam",
            "output_gate",
            "peri_norm",
        }.__contains__,
    ),
)
def test_what_changes_the_base_below_adapters_is_refused(remedy):
    """The reference of DPO is the model with its adapters disabled."""
    model, x = adapted("llama", "q_proj", "k_proj"), batch()
    optimizer = torch.optim.AdamW(trained(model))
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(RefusedError, match=r"adapters on it \(.*q_proj\).*merge_and_"):
        qkeel.apply(model, remedy, optimizer, batch=x)
    assert [name for name, _ in model.named_parameters()] == names
    if remedy == "qk_norm":
        # The line that the refusal names.
        with qkeel.apply(model, "lalr:tau=0.1", optimizer, batch=x):
            pass
        merged = model.merge_and_unload()
        optimizer = adamw(merged)
        with qkeel.apply(merged, remedy, optimizer, batch=x):
            pass


@PEFT
def test_gains_that_are_saved_with_the_adapter_are_accepted():
    model = adapted("llama", "up_proj", modules_to_save=["self_attn"])
    optimizer = torch.optim.AdamW(trained(model))

    def reference():
        with torch.no_grad(), model.disable_adapter():
            return out(model, batch())

    before = reference()
    with qkeel.apply(model, "qk_norm", optimizer, batch=batch()):
        saved = peft.get_peft_model_state_dict(model)
        assert sum("q_norm" in name for name in saved) == 2
        assert torch.equal(reference(), before)
    with pytest.raises(RefusedError, match="adapters on it"):
        qkeel.apply(model, "swin_norm", optimizer, batch=batch())


@PEFT
@pytest.mark.parametrize(
    "remedy", ["lalr", "qk_clip:frozen=scale", "frozen_qk", "qk_lr:factor=0"]
)
def test_dora_is_refused(remedy):
    # The biases of the second scale, as a plain product would.
    for family in ("llama", "qwen2"):
        model = adapted(family, "q_proj", use_dora=True)
        optimizer = torch.optim.AdamW(trained(model))
        reason = "self_attn: (the weight on .* computed from another|multiplied by)"
        with pytest.raises(RefusedError, match=reason):
            qkeel.apply(model, remedy, optimizer, batch=batch())
    model = adapted(
        "llama", "v_proj", use_dora=True
    )  # of values: the logit does not know of it
    held = [
        *trained(model),
        *(p for n, p in model.named_parameters() if "q_proj" in n or "k_proj" in n),
    ]
    qkeel.apply(model, remedy, torch.optim.AdamW(held), batch=batch()).remove()
