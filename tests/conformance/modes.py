"""Which remedy holds under which way to run a model: the numbers must be those of plain eager execution.

`python -m tests.conformance.modes > docs/compatibility.md` writes the whole page, the matrix and this.
"""

import copy
import functools

import torch
import torch._dynamo
import torch.nn.functional as F
from tests.remedies.foreign import example, hf, out
from tests.training import adamw

from qkeel.errors import QkeelError
from qkeel.nn import Decoder, DecoderConfig
from qkeel.remedies import REMEDIES, apply

from .matrix import joined, matrix, table

ROUNDING = 2e-6  # of losses and logits near 1 in float32


class Differs(QkeelError, AssertionError):
    """The numbers of a mode are not those of eager execution."""


def _decoder():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=40, d_model=32, n_layers=1))


def _llama(impl="sdpa"):
    return hf("llama", impl, num_hidden_layers=1)


def _loss(model, x):
    return F.cross_entropy(out(model, x).flatten(0, 1), x.flatten())


def _trained(model, x, optimizer):
    """Losses of three steps."""
    model.train()
    found = []
    for _ in range(3):
        loss = _loss(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def _compiled(model, x, optimizer):
    torch._dynamo.reset()
    return _trained(torch.compile(model, backend="aot_eager"), x, optimizer)


def _checkpointed(model, x, optimizer):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return _trained(model, x, optimizer)


def _micro_batches(model, x, optimizer):
    """The same three steps, each row's gradient on its own."""
    model.train()
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [_loss(model, row) / len(x) for row in x.split(1)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        found.append(torch.stack(losses).sum().detach())
    return found


def _whole(model, x, _):
    """Logits of the last position without a cache."""
    with torch.no_grad():
        return [out(model.eval(), x)[:, -1]]


def _cached(model, x, _):
    with torch.no_grad():
        first = model.eval()(x[:, :-2], use_cache=True)
        for i in (-2, -1):
            first = model(
                x[:, i:][:, :1], past_key_values=first.past_key_values, use_cache=True
            )
        return [first.logits[:, -1]]


def _copied(model, x, optimizer):
    return _whole(copy.deepcopy(model), x, optimizer)


# mode: (the model it is about, the way to run it, the plain way with the same numbers)
MODES = {
    "qkeel's decoder, compiled": (_decoder, _compiled, _trained),
    "Llama, compiled": (_llama, _compiled, _trained),
    "Llama, checkpointed": (_llama, _checkpointed, _trained),
    "Llama, micro-batches": (_llama, _micro_batches, _trained),
    "Llama, cache": (_llama, _cached, _whole),
    "Llama, deepcopy": (_llama, _copied, _whole),
    "Llama, flex_attention": (lambda: _llama("flex_attention"), _whole, _whole),
}


@functools.cache
def mode_refusal(name, mode):
    """Why a remedy does not hold in a mode; empty if it does."""
    make, run, plain = MODES[mode]
    try:
        found, expected = _ran(name, make(), run), _ran(name, make(), plain)
        off = max(float((a - b).abs().max()) for a, b in zip(found, expected))
        if off > ROUNDING * max(1.0, max(float(x.abs().max()) for x in expected)):
            raise Differs(f"{name} differs from eager execution")
    except QkeelError as error:
        return str(error)
    return ""


def _ran(name, model, run):
    optimizer, x = adamw(model, 0.01), example("llama")
    given = {} if isinstance(model, Decoder) else {"example": x}
    with apply(model, name, optimizer, train_length=8, **given):
        return run(model, x, optimizer)


def ways():
    """The last sections of the page."""
    why = reasons()
    parts = [
        "\n## Remedies and ways to run\n",
        "Each cell is a comparison with plain eager execution: for compiled models (backend aot_eager), "
        "checkpointing and\n"
        "micro-batches of one, the losses of three steps of AdamW; for a cache and a `deepcopy`, the logits of the\n"
        "last token. flex_attention is compared in evaluation only, because on a CPU it does not train.\n"
        "`sigma_reparam` takes one power iteration per forward pass, so micro-batches give it a different σ;\n"
        "`dropout` draws different masks for them.\n"
        "`pytest -m slow tests/conformance` repeats these checks.\n",
        table("remedy", list(MODES), rows()) + "\n",
        *why,
    ]
    return "\n".join(parts) + "\n"


def rows():
    """The table of all remedies."""
    return {
        name: ["" if mode_refusal(name, mode) else "✓" for mode in MODES]
        for name in REMEDIES
    }


def reasons():
    """Each reason once, in the words of the first."""
    found = {}
    for name in REMEDIES:
        for mode in MODES:
            text = mode_refusal(name, mode)
            if text:
                plain = text.removeprefix(f"{name} at ").replace(name, "it")
                found.setdefault(plain, {}).setdefault(name, []).append(mode)
    return [f"- {joined(names, 'in')}: {text}" for text, names in found.items()]


if __name__ == "__main__":
    print(matrix() + ways(), end="")
