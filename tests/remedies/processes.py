"""What several processes do that apply remedies, compared with one process on the global batch; see spawn."""

from functools import partial

import pytest
import torch
from tests.contract.processes import wrapped
from tests.contract.processes.context import Context, hidden, split
from tests.contract.processes.pipelines import INTERLEAVED, pipelined
from tests.contract.processes.setups import SETUPS
from tests.contract.processes.watching import Collectives, context_step, made, passes
from torch import distributed, nn
from torch.func import functional_call
from torch.nn import functional as F

import qkeel
from qkeel import distributed as dist
from qkeel.errors import QkeelError, RefusedError
from qkeel.nn import Decoder, DecoderConfig

STEPS = 10
CASTS = "one_casts"  # one process on the global batch that computes in float32
# How each remedy of a setup's table is applied: thresholds low enough that about half of the heads pass them.
CALLS = {
    "none": "none",
    "lalr": "lalr:tau=0.3",
    "qk_lr": "qk_lr:factor=0.3",
    "qk_weight_decay": "qk_weight_decay:decay=1",
    "qk_clip": "qk_clip:threshold=0.02",
    "qk_clip by group": "qk_clip:threshold=0.02,groups=group",
    "qk_clip with matched steps": "qk_clip:threshold=0.02,steps=matched",
    "three at once": "lalr:tau=0.3+qk_weight_decay:decay=1+qk_clip:threshold=0.03",
    "spectral_cap": "spectral_cap:cap=0.1",
    "softcap": "softcap:cap=0.05",
    "z_loss": "z_loss:coefficient=0.1",
    "qk_norm before": "qk_norm",
    "qk_norm after": "qk_norm",
    "sigma_reparam before": "sigma_reparam:init=one",
}
BY_EXAMPLE = ("softcap", "z_loss", "qk_norm after")


def data(setup):
    """The setup that one process with the same batches has."""
    if setup.startswith("context"):
        return "context"
    return setup if setup in ("ddp_no_sync", "ddp_padding", INTERLEAVED) else "one"


def adamw(model):
    # With an eps of 1e-8, where a gradient is nearly 0, a change of the last bit grows to 6.6e-9, in one process too.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-5)


def weights(model):
    return {
        n.removeprefix("module.").removeprefix("_orig_mod."): dist.whole(p)
        .detach()
        .clone()
        for n, p in model.named_parameters()
    }


def step(model, optimizer, setup, number):
    if setup.startswith("context"):
        context_step(partial(context_part, setup))(model, optimizer, number)
        return
    run = InFloat32(model) if setup == CASTS else model
    passes(setup, wrapped.batch if alone(setup) else partial(wrapped.part, setup))(
        run, optimizer, number
    )


def context_part(setup, number):
    """The hidden states of this process: all of them, or its part of each sequence."""
    return (
        hidden(number)
        if alone(setup)
        else hidden(number).chunk(dist.world(), 1)[dist.rank()]
    )


class InFloat32(nn.Module):
    """A model whose weights are cast for its passes, as MixedPrecisionPolicy(param_dtype=float32) does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        cast = {name: p.float() for name, p in self.model.named_parameters()}
        return functional_call(self.model, cast, (), inputs)


def alone(setup):
    """One process has the global batch."""
    return setup in ("one", CASTS) or not distributed.is_initialized()


def started(name, setup):
    """A model under a remedy: one on steps is given the sites that were found before the model was wrapped."""
    context, before = setup.startswith("context"), name.endswith(" before")
    model = Context() if context else made(setup)
    example = hidden(0) if context else wrapped.batch(0)[:2]
    sites = qkeel.find_sites(model, example)
    early = qkeel.apply(model, CALLS[name], batch=example) if before else None
    if not alone(setup):
        model = (
            split(model, setup)
            if isinstance(model, Context)
            else wrapped.wrapped(model, setup)
        )
        example = context_part(setup, 0) if context else example
    optimizer = adamw(model)
    if early is not None:
        return model, optimizer, early
    by_example = name in BY_EXAMPLE or setup == "fsdp2_found"
    shown = {"batch": example} if by_example else {"sites": sites}
    return model, optimizer, qkeel.apply(model, CALLS[name], optimizer, **shown)


def trained(name, setup):
    """The weights after ten steps under a remedy."""
    if setup.startswith("pipeline") and not alone(setup):
        return trained_stage(name, setup)
    model, optimizer, handle = started(name, setup)
    for number in range(STEPS):
        step(model, optimizer, setup, number)
    if (
        name == "sigma_reparam before"
        and setup != "one"
        and dist.wrapped_by(model) == "fully_shard"
    ):
        with pytest.raises(
            RefusedError, match="Remove the remedy before the model is split"
        ):
            handle.remove()
    elif not name.endswith(" before"):
        handle.remove()
    return weights(model)


def trained_stage(name, setup):
    """The same of this process's stage of a pipeline, by the names of the whole model."""
    stage, run = pipelined(setup)
    optimizer = adamw(stage)
    parts = dict(
        zip(
            range(dist.rank(), 9, 2),
            stage.children() if setup == INTERLEAVED else [stage],
        )
    )
    hidden = torch.rand(2, wrapped.TOKENS, wrapped.WIDTH, dtype=torch.float64)
    examples = [hidden if i else wrapped.batch(0)[:2] for i in parts]
    handles = [
        qkeel.apply(
            part if setup == INTERLEAVED else stage, CALLS[name], optimizer, batch=x
        )
        for part, x in zip(parts.values(), examples, strict=True)
    ]
    for number in range(STEPS):
        run(stage, optimizer, number)
    for handle in handles:
        handle.remove()
    return {
        n.replace("layers.0", f"model.layers.{i}"): p.detach()
        for i, part in parts.items()
        for n, p in part.named_parameters()
    }


def farthest(a, b, least=6):
    """The largest difference of weights of the same name, of which there are some."""
    both = a.keys() & b.keys()
    assert len(both) >= least
    return max(float((a[name] - b[name]).abs().max()) for name in both)


def matrices(setup):
    """How many weights of a setup's model are compared at least; with context parallel it is attention alone."""
    return 3 if setup.startswith("context") else 6


def outcome(name, setup, one, noise):
    """What comes of a remedy in a setup, in the words of the table.

    `noise`: where it computes in a narrower format, how far one process that does so under the same remedy is from one
    that does not.
    """
    try:
        difference = farthest(trained(name, setup), one, matrices(setup))
    except RefusedError as error:
        return f"refused: {error}"
    print(f"{setup} {name}: {difference:.1e}, {noise:.1e}", flush=True)
    words = "equal in float32" if noise else "equal"
    return (
        words
        if difference < max(4 * noise, 1e-12)
        else f"differs by {difference:.1e}, of {noise:.1e} in one process"
    )


def by_one_process(setups, path):
    """Stores the weights that one process has after the remedies of these setups' tables."""
    needed = {
        (data(setup), name)
        for setup in setups
        for name, found in SETUPS[setup].remedies.items()
        if found.startswith("equal")
    }
    if "fsdp2_mixed" in setups:
        mixed = SETUPS["fsdp2_mixed"].remedies
        needed |= {(CASTS, n) for n, found in mixed.items() if found[:5] == "equal"}
    one = {(setup, name): trained(name, setup) for setup, name in sorted(needed)}
    for setup in {setup for setup, _ in needed}:
        one[setup, "none"] = trained("none", setup)
    for setup, name in needed:
        moved = farthest(one[setup, name], one[setup, "none"], matrices(setup))
        assert moved > 1e-5, f"{name} does nothing here"
    torch.save(one, path)


def compare(setup, path):
    """Every remedy of the setup's table does what that says."""
    one = torch.load(path)
    for name, expected in SETUPS[setup].remedies.items():
        plain = one.get((data(setup), name), {})
        noise = (
            farthest(one[CASTS, name], plain)
            if setup == "fsdp2_mixed" and (CASTS, name) in one
            else 0.0
        )
        found = outcome(name, setup, plain, noise)
        assert all(part in found for part in expected.split(": ")), (
            f"{setup} {name}: {found}"
        )


def collectives():
    """qk_clip adds one collective to a step, lalr one where weights are split and none where they are whole, others
    none."""
    expected = {
        **{(name, "ddp"): 0 for name in ("lalr", "qk_lr", "qk_weight_decay")},
        **{(name, "fsdp2"): 0 for name in ("qk_lr", "qk_weight_decay")},
        ("lalr", "fsdp2"): 1,
        ("qk_clip", "ddp"): 1,
        ("qk_clip", "fsdp2"): 1,
        ("three at once", "fsdp2"): 2,
    }
    for (name, setup), most in expected.items():
        model, optimizer, handle = started(name, setup)
        counts = []
        for number in range(
            4
        ):  # DistributedDataParallel sorts its buckets in the second
            if number == 3:
                handle.remove()
            with Collectives() as counted:
                step(model, optimizer, setup, number)
            counts.append(counted.n)
        assert counts[2] - counts[3] == most, (name, setup, counts)


CUT = (
    "qk_clip:threshold=0.02",
    "qk_clip:threshold=0.02,groups=group",
    "lalr:tau=0.3+qk_clip:threshold=0.02",
)


def with_cut_heads(remedy, one):
    """The weights of three heads after six steps; under fully_shard on two processes, one of them is cut."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=wrapped.VOCAB, d_model=24, n_layers=2, n_heads=3)
    model = Decoder(config).double()
    sites = qkeel.find_sites(model, wrapped.batch(0))
    if not one:
        model = wrapped.wrapped(model, "fsdp2", layers="blocks")
        rows = len(dist.local(model.get_parameter("blocks.0.attention.q_proj.weight")))
        assert rows % 8, f"{rows} rows are whole heads"
    optimizer = adamw(model)
    handle = qkeel.apply(model, remedy, optimizer, sites=sites)
    for number in range(6):
        tokens = wrapped.batch(number) if one else wrapped.part("fsdp2", number)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return weights(model)


def heads_that_fully_shard_cuts(path):
    """A head of which each process stores a part is clipped as by one process: every process computes all of it."""
    alone = torch.load(path)
    for remedy in CUT:
        found = with_cut_heads(remedy, one=False)
        assert farthest(found, alone[remedy]) < 1e-12, remedy
        assert farthest(found, alone["none"]) > 1e-4, f"{remedy} does nothing here"


def thresholds_differ(model, optimizer, on):
    qkeel.apply(model, "qk_clip", optimizer, threshold=0.1 + (dist.rank() == on))


def weights_are_not_finite(model, optimizer, on):
    query = next(p for n, p in model.named_parameters() if "q_proj" in n)
    kept = dist.local(query).detach().clone()
    if dist.rank() == on:
        dist.local(query).detach().fill_(torch.nan)
    try:
        qkeel.apply(model, "lalr", optimizer)
    finally:
        dist.local(query).detach().copy_(kept)


def own(setup):
    """A decoder of qkeel's own modules, which needs no example."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=wrapped.VOCAB, d_model=16, n_layers=2, n_heads=4)
    model = wrapped.wrapped(Decoder(config).double(), setup, layers="blocks")
    return model, adamw(model)


def own_step(model, optimizer):
    tokens = wrapped.batch(dist.rank())
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def misuse(setup, act, on):
    """Every process gets an error, nothing of the remedy is left, and training goes on alike."""
    model, optimizer = own(setup)
    hooks = [
        len(h)
        for h in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
    ]
    try:
        act(model, optimizer, on)
        error = None
    except (QkeelError, ValueError) as caught:
        error = caught
    optimizer.zero_grad()
    assert error is not None, act
    for _ in range(2):
        own_step(model, optimizer)
    assert hooks == [
        len(h)
        for h in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
    ]
    alike(weights(model), f"{setup} {act}")


def alike(found, what):
    """The processes hold the same weights."""
    flat = torch.cat([x.flatten() for x in found.values()])
    everyones = [torch.empty_like(flat) for _ in range(dist.world())]
    distributed.all_gather(everyones, flat)
    assert all(torch.equal(x, flat) for x in everyones), what


def some_misuses():
    """Two of them on sharded weights, for the quick suite."""
    for act in (thresholds_differ, weights_are_not_finite):
        misuse("fsdp2", act, on=1)


def refused_before_anything():
    """What cannot be made right is one error on every process: flat parameters, gains of a wrapped model."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (False, True):
        model, _ = own("one")
        flat = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=original
        )
        for part in (flat, model):
            with pytest.raises(
                RefusedError, match="wrapped in FullyShardedDataParallel"
            ):
                qkeel.apply(part, "softcap", adamw(flat))
    for setup, wrapper in {
        "ddp": "DistributedDataParallel",
        "fsdp2": "fully_shard",
    }.items():
        model, optimizer = own(setup)
        with pytest.raises(
            RefusedError, match=f"adds parameters .*{wrapper} has already spread"
        ):
            qkeel.apply(
                model.get_submodule("module") if setup == "ddp" else model,
                "qk_norm",
                optimizer,
            )
