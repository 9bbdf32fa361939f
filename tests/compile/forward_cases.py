"""Forward remedies under torch.compile, in a process without the shape checks of the tests. Prints the largest gap.

Each case: a compiled model before the remedy, with it, after its removal; and compiled only after it was applied.
"""

import sys

import torch
from tests.remedies.foreign import D, Hand, encoder, example, hf, out

import qkeel

REMEDIES = {
    "linear": ("qk_norm", "softcap:cap=0.5", "log_n:length=3", "sink"),
    "groups": ("qk_norm:over=layer", "sigmoid:length=6"),
    "interleaved": ("cosine:length=9", "softpick"),
    "encoder": ("qk_norm", "softcap:cap=0.5"),
    "llama": ("qk_norm", "softcap:cap=0.5+log_n:length=3", "sink"),
    "gpt2": ("qk_norm", "softcap:cap=0.5"),
}


def gap(a, b):
    return float(((a - b).abs().max() / b.abs().max()).detach())


def check(model, x, remedy, backend):
    """Largest relative gap between compiled and eager over the life of a remedy."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    plain = out(model, x)
    worst = gap(out(compiled, x), plain)
    with torch.no_grad():
        worst = max(worst, gap(out(compiled, x), plain))
    handle = qkeel.apply(model, remedy, batch=x)
    changed = out(model, x)
    assert gap(changed, plain) > 1e-4, f"{remedy} changes nothing"
    worst = max(worst, gap(out(compiled, x), changed))  # compiled before
    out(compiled, x).square().sum().backward()
    torch._dynamo.reset()
    # After.
    worst = max(
        worst,
        gap(out(torch.compile(model, fullgraph=True, backend=backend), x), changed),
    )
    again = torch.compile(model, fullgraph=True, backend=backend)
    worst = max(worst, gap(out(again, x), changed))
    with torch.no_grad():  # where torch's own encoder would take its fast path
        worst = max(worst, gap(out(compiled, x), changed))
    handle.remove()
    return max(worst, gap(out(again, x), plain), gap(out(compiled, x), plain))


def main(where, how, backend):
    """Every remedy of one kind of model."""
    worst = 0.0
    for remedy in REMEDIES[where]:
        if where == "encoder":
            model, x = encoder(), example("encoder")
        elif where in ("llama", "gpt2"):
            model, x = hf(where, how), example(where)
        else:
            model, x = Hand(where, how), torch.randn(2, 6, D // 2)
        worst = max(worst, check(model, x, remedy, backend))
    print(worst)


if __name__ == "__main__":
    main(*sys.argv[1:])
