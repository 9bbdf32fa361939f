"""What works with what, asked of the code itself, as Markdown.

`python -m tests.conformance.matrix > docs/compatibility.md` writes the page.
"""

import functools
import re
from unittest.mock import patch

import torch
from tests.contract.conformance.kinds import KINDS, model_of, refusal_of
from tests.remedies.foreign import Hand, encoder, example, hf, out
from tests.training import adamw

from qkeel.errors import QkeelError
from qkeel.ops import KERNELS
from qkeel.remedies import REMEDIES, apply
from qkeel.spec import PRESETS, preset
from qkeel.spec.call import make_call

# Attention that knows nothing of qkeel: how its heads are made, and how it is computed.
FOREIGN = {
    "linear layers, written out": ("linear", "eager"),
    "linear layers, SDPA": ("linear", "sdpa"),
    "fused q, k, v": ("fused", "sdpa"),
    "interleaved": ("interleaved", "eager"),
    "in groups": ("groups", "sdpa"),
    "columns": ("conv", "eager"),
    "`nn.MultiheadAttention`": ("torch", ""),
    "DeepSeek-V3, eager": ("deepseek", "eager"),
    "DeepSeek-V3, SDPA": ("deepseek", "sdpa"),
}
# Muon gets the matrices; what is no matrix then stands still.
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "SGD, momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.01, momentum=0.9, weight_decay=0.1
    ),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps),
    "NAdam": lambda ps: torch.optim.NAdam(ps),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "ASGD": lambda ps: torch.optim.ASGD(ps),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps),
}
HEADER = """# What works with what

Tests check every cell against the code. An empty cell means that the combination is not supported; the error says
why, and what to do instead.

Every remedy computes the same under `torch.compile` (compiled before or after it is applied), with gradient
checkpointing, with a cache, and in a `deepcopy` as in plain eager execution. In a model that calls flex_attention, those
that change the call (softcap, log_n, attention_temperature, sigmoid, softpick, sink) refuse, and say so.

## Devices

| device | status |
|---|---|
| CPU | tested; compiled kernels on x86-64 (AVX2, AVX-512), PyTorch elsewhere; ARM64 compiles but has not been run |
| CUDA GPU | PyTorch's operators, and the Triton kernels that one H200 was seen to run right |
| AMD GPU | PyTorch's operators; nothing of qkeel's has been run there |
| several processes | gloo is tested; NCCL is not ([processes](guides/watch.md#under-torchrun)) |

On the H200 these were seen to be right: norm and rotation, largest and smallest logits, and all statistics of causal, full
and key-masked attention. All statistics of masks that differ by query, of sliding windows and of packed sequences are
computed by PyTorch on every GPU. `make gpu` checks and times everything in five minutes; [GPU](internals/gpu.md) lists
what was seen at which commit.
"""


@functools.cache
def optimizer_refusal(name, optimizer):
    """Why a remedy cannot be applied with that optimizer; empty if it can, and trains."""
    model, tokens = model_of("MHA"), torch.arange(6)[None]
    held = OPTIMIZERS[optimizer](list(model.parameters()))

    def loss():
        held.zero_grad()
        value = model(tokens).square().mean()
        value.backward()
        return value

    try:
        with apply(
            model,
            "z_loss:weight=mean" if name == "z_loss" else name,
            held,
            train_length=16,
        ):
            loss()
            held.step(loss)  # LBFGS makes its gradients itself
    except QkeelError as error:
        return str(error)
    return ""


@functools.cache
def foreign_refusal(name, kind):
    """Why a remedy cannot be applied to that attention of somebody else's; empty if it can, and trains."""
    layout, how = FOREIGN[kind]
    if layout == "deepseek":
        model, x = hf("deepseek", how), example("deepseek")
    elif layout == "torch":
        model, x = encoder(), example("encoder")
    else:
        model, x = Hand(layout, how), torch.randn(2, 6, 16)
    optimizer = adamw(model)
    try:
        # The loss below is no cross-entropy, by whose gradient z_loss would weigh tokens.
        term = "z_loss:weight=mean" if name == "z_loss" else name
        with apply(model, term, optimizer, batch=x, train_length=16):
            out(model, x).square().mean().backward()
            optimizer.step()
    except QkeelError as error:
        return str(error)
    return ""


def _once(found):
    """Each reason of (remedy, kind, reason) once, in the words of the first without its place, with all it concerns."""
    reasons = {}
    for name, kind, text in found:
        if text:
            plain = re.sub(r"^\w+(?: \(\w+\))? at [^:]*: ", "", text)
            reasons.setdefault(plain, {}).setdefault(name, []).append(kind)
    return [f"- {joined(names, 'on')}: {text}" for text, names in reasons.items()]


def joined(names, word):
    """The remedies and what each is refused for, those with the same ones together."""
    alike = {}
    for name, kinds in names.items():
        columns = ", ".join(
            kind if kind.startswith("`") else f"*{kind}*" for kind in kinds
        )
        alike.setdefault(columns, []).append(f"`{name}`")
    return "; ".join(
        f"{', '.join(own)} {word} {columns}" for columns, own in alike.items()
    )


def _of_optimizers():
    """Each reason of a remedy with an optimizer once, in the words of the first."""
    found = {}
    for name in REMEDIES:
        for optimizer in OPTIMIZERS:
            text = optimizer_refusal(name, optimizer)
            kind = (
                text.partition("takes")[0].partition("needs")[2]
                or text.partition(" only")[0]
            )
            kind = kind.replace(name, "").replace(optimizer, "")
            if text:
                found.setdefault(kind, (text, {}))[1].setdefault(name, []).append(
                    optimizer
                )
    return [f"- {joined(names, 'with')}: {text}" for text, names in found.values()]


def _grouped():
    """Each reason of a kernel once, with the presets it concerns."""
    found = {}
    for kernel in KERNELS:
        for name in PRESETS:
            text = kernel_refusal(name, kernel).replace(
                preset(name).position.formula(), "the position of the preset"
            )
            if text:
                found.setdefault(text, [f"`{kernel}`"]).append(f"`{name}`")
    return {
        text: f"{kernel} with every preset"
        if len(names) == len(PRESETS)
        else f"{kernel} with {', '.join(names)}"
        for text, (kernel, *names) in found.items()
    }


def kernel_refusal(name, kernel):
    """Why a kernel cannot compute a preset; empty if it can."""
    spec = preset(name)
    k = torch.zeros(1, 2, 3, 8)
    q = k[:, :, 2:] if kernel == "decode" else k
    # Whether there is a compiler or a GPU here is no matter of the preset; decoding is for calls without a gradient.
    with (
        torch.no_grad(),
        patch("qkeel.kernels.attention.compiled.ready", return_value=True),
        patch("qkeel.kernels.decoding.compiled.ready", return_value=True),
        patch("qkeel.kernels.attention.flex._DEVICE", "cpu"),
    ):
        refusal = KERNELS[kernel].supports(
            make_call(spec, q, k, k, params=spec.init_params(2, 2, 8))
        )
    return str(refusal) if refusal else ""


def table(corner, columns, rows):
    """A Markdown table."""
    lines = [
        f"| {corner} | {' | '.join(columns)} |",
        "| --- |" + " :-: |" * len(columns),
    ]
    return "\n".join(
        [
            *lines,
            *(f"| `{name}` | {' | '.join(cells)} |" for name, cells in rows.items()),
        ]
    )


def of_kernels():
    """Presets and kernels."""
    kernels = {
        name: ["" if kernel_refusal(name, k) else "✓" for k in KERNELS]
        for name in PRESETS
    }
    return table("preset", [f"`{k}`" for k in KERNELS], kernels)


def of_kinds():
    """Remedies and kinds of attention."""
    remedies = {
        name: ["" if refusal_of(name, kind) else "✓" for kind in KINDS]
        for name in REMEDIES
    }
    return table("remedy", list(KINDS), remedies)


@functools.cache
def matrix():
    """The whole page."""
    foreign = {
        name: ["" if foreign_refusal(name, kind) else "✓" for kind in FOREIGN]
        for name in REMEDIES
    }
    steps = {
        name: ["" if optimizer_refusal(name, o) else "✓" for o in OPTIMIZERS]
        for name in REMEDIES
    }
    own = [(name, kind, refusal_of(name, kind)) for name in REMEDIES for kind in KINDS]
    others = [
        (name, kind, foreign_refusal(name, kind))
        for name in REMEDIES
        for kind in FOREIGN
    ]
    why = _once([*own, *others])
    why += [f"- {names}: {text}" for text, names in _grouped().items()]
    why += _of_optimizers()
    parts = [
        HEADER,
        "## Presets and kernels\n",
        of_kernels() + "\n",
        "## Remedies and kinds of attention\n",
        of_kinds() + "\n",
        "## Remedies and attention in models from other libraries\n",
        "Each remedy is applied with an example, to a model in training.\n",
        table("remedy", list(FOREIGN), foreign) + "\n",
        "## Remedies and optimizers\n",
        "Optimizers have torch's default options; the model uses multi-head attention.\n",
        table("remedy", list(OPTIMIZERS), steps) + "\n",
        "## Why cells are empty\n",
        "\n".join(why) if why else "Nothing is refused.",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(matrix(), end="")
