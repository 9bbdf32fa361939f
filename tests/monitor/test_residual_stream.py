"""The residual stream of a watched model: against numbers made from the model's own modules in float64."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from qkeel.errors import QkeelWarning
from qkeel.records import BLOCK_FIELDS


class Mixer(nn.Module):
    """Attention of one head, written out."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(m, m) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (p(x)[:, None] for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]), None


class Block(nn.Module):
    """A pre-norm block; subclasses say how it adds."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.after = nn.LayerNorm(m), nn.LayerNorm(m), nn.LayerNorm(m)
        self.mixer, self.drop = Mixer(m), nn.Dropout(0.3)
        self.mlp = nn.Sequential(nn.Linear(m, 2 * m), nn.GELU(), nn.Linear(2 * m, m))
        self.more = nn.Linear(m, m)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))[0]
        return x + self.mlp(self.norm_2(x))


class Parallel(Block):
    """Both branches read the same input, and the sum of both is added."""

    def forward(self, x: Tensor) -> Tensor:
        attended, hidden = self.mixer(self.norm_1(x))[0], self.mlp(self.norm_1(x))
        hidden += attended
        return hidden + x


class Scaled(Block):
    """Branches have factors, and dropout that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.25 * F.dropout(self.mixer(self.norm_1(x))[0], 0.2, self.training)
        return x + 0.25 * self.drop(self.mlp(self.norm_2(x)))


class Sandwich(Block):
    """A norm stands behind attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.mixer(self.norm_1(x))[0])
        return x + self.drop(self.mlp(self.norm_2(x)))


class InPlace(Block):
    """The stream is one tensor that is changed in place; a third branch comes last."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.mixer(self.norm_1(x))[0]
        x += self.mlp(self.norm_2(x))
        x += self.more(self.after(x))
        return x


class PostNorm(Block):
    """A norm follows the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.mixer(x)[0])


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, kind: Callable[[int], Block], depth: int = 3, m: int = 12) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(5, m),
            nn.ModuleList(kind(m) for _ in range(depth)),
            nn.Linear(m, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(kind: Callable[[int], Block], seed: int = 0) -> Stack:
    """A stack with weights of unlike size, so that no two numbers agree by chance."""
    torch.manual_seed(seed)
    model = Stack(kind)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(1 + 0.3 * math.sin(i)).add_(0.05 * torch.randn_like(p))
        model.embed.weight[3] *= 400.0  # a massive channel
    return model


Given = dict[str, list[np.ndarray]]


def by_hand(block: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What attention and what all else adds, and the output, from the block's modules alone."""
    if isinstance(block, Parallel):
        a, b = block.mixer(block.norm_1(x))[0], block.mlp(block.norm_1(x))
    elif isinstance(block, Sandwich):
        a = block.after(block.mixer(block.norm_1(x))[0])
        b = block.mlp(block.norm_2(x + a))
    else:
        factor = 0.25 if isinstance(block, Scaled) else 1.0
        a = factor * block.mixer(block.norm_1(x))[0]
        b = factor * block.mlp(block.norm_2(x + a))
        if isinstance(block, InPlace):
            b = b + block.more(block.after(x + a + b))
    return a, b, x + a + b


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def expected(model: Stack, passes: list[Tensor]) -> dict[str, list[float]]:
    """Every field of every block, from float64, in numpy: over the tokens of all passes, ratios pass by pass."""
    exact = copy.deepcopy(model).double().eval()
    found: dict[str, list[float]] = {name: [] for name in BLOCK_FIELDS}
    streams = [exact.embed(x.double()) for x in passes]
    tokens = [x.shape[0] * x.shape[1] for x in passes]
    for block in exact.blocks:
        given, a, b, out = (
            [x.detach().numpy() for x in of]
            for of in zip(*((x, *by_hand(block, x)) for x in streams))  # type: ignore[arg-type]
        )
        for place, states in (("input", given), ("output", out)):
            peaks = [np.abs(x).max((0, 1)) for x in states]
            size = math.sqrt(np.average([rms(x) ** 2 for x in states], weights=tokens))
            found[f"block_{place}_rms"].append(size)
            found[f"block_{place}_max"].append(max(float(x.max()) for x in peaks))
            found[f"block_{place}_channel_ratio"].append(max(float(x.max() / np.median(x)) for x in peaks))
            if place == "output":
                found["block_output_massive_share"].append(
                    float(np.average([(x > 100 * np.median(x)).mean() for x in peaks], weights=tokens))
                )

        def share(of: list[np.ndarray], given: list[np.ndarray] = given) -> float:
            return float(np.average([rms(x) / rms(y) for x, y in zip(of, given)], weights=tokens))

        found["block_update_ratio"].append(share([x - y for x, y in zip(out, given)]))
        found["attention_share"].append(share(a))
        found["mlp_share"].append(share(b))
        streams = [torch.from_numpy(x) for x in out]
    return found


def watched(model: Stack, passes: list[Tensor]) -> dict[str, list[float]]:
    """Every field of every block as one measured step records it; in training mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with qkeel.watch(model, optimizer, stats="max+residual", rules=()) as monitor:
        for x in passes:
            with torch.set_grad_enabled(not isinstance(model.blocks[0], InPlace)):  # autograd refuses that block
                loss = model(x).sum()
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
        sample = monitor.sample
        assert sample is not None
    return {name: sample.by_layer(name).tolist() for name in BLOCK_FIELDS}


BATCHES = [torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(s)) * (1 + s) for s in range(2)]


@pytest.mark.parametrize("kind", [Block, Parallel, Sandwich, InPlace, Scaled])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_number_of_every_block_is_that_of_float64(kind: type[Block], seed: int) -> None:
    model = made(kind, seed)
    batches = [*BATCHES, BATCHES[0][:1, :3] * 0.5]
    dropped = kind in (Scaled, Sandwich)
    if dropped:  # what dropout changes in the stream is real; without it the oracle is exact
        for block in model.blocks:
            assert isinstance(block, Block)
            block.drop.p = 0.0
        model.train()
        real, F.dropout = F.dropout, lambda x, *a, **k: x  # type: ignore[assignment]
        try:
            found = watched(model, batches)
        finally:
            F.dropout = real
    else:
        found = watched(model, batches)
    for name, values in expected(model, batches).items():
        np.testing.assert_allclose(found[name], values, rtol=3e-5, err_msg=name)


def test_dropout_outside_of_the_branch_does_not_hide_it() -> None:
    torch.manual_seed(0)
    found = watched(made(Scaled), BATCHES)
    assert np.isfinite(found["attention_share"]).all()
    assert np.isfinite(found["mlp_share"]).all()


def test_a_block_with_a_norm_behind_the_sum_has_no_shares_and_says_so_once() -> None:
    with pytest.warns(
        UserWarning, match=r"attention_share is not measured for blocks\.0\.mixer, .*a norm follows"
    ) as told:
        found = watched(made(PostNorm), BATCHES)
    assert sum("attention_share" in str(one.message) for one in told) == 1
    assert np.isnan(found["attention_share"]).all()
    assert np.isnan(found["mlp_share"]).all()
    assert np.isfinite(found["block_output_channel_ratio"]).all()
    assert np.isfinite(found["block_update_ratio"]).all()


def test_a_model_without_a_list_of_blocks_is_told_what_was_expected() -> None:
    model = Mixer(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = qkeel.watch(model, optimizer, stats="max+residual")

    def step() -> None:
        model(torch.randn(1, 4, 8))[0].sum().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="residual stream is not measured: expected blocks in an nn.ModuleList"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        assert not any(name.partition("/")[0] in BLOCK_FIELDS for name in monitor.history.values)
    monitor.remove()


def test_branches_that_begin_at_zero_are_found_when_they_add_something() -> None:
    model = made(Block)
    with torch.no_grad():
        for block in model.blocks:
            assert isinstance(block, Block)
            for p in (*block.mixer.out.parameters(), *block.mlp[2].parameters()):
                p.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(), qkeel.watch(model, optimizer, stats="max+residual") as monitor:
        warnings.simplefilter("error")
        for _ in range(3):
            model(BATCHES[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        shares = monitor.history.by_layer("attention_share")
        mlp = monitor.history.by_layer("mlp_share")
    assert shares is not None
    assert mlp is not None
    assert np.isnan(shares[0]).all()
    assert (shares[2] > 0).all()
    assert (mlp[2] > 0).all()


def test_one_block_whose_attention_adds_nothing_has_the_branches_of_the_others() -> None:
    model = made(Block)
    first = model.blocks[0]
    assert isinstance(first, Block)
    with torch.no_grad():
        for p in first.mixer.out.parameters():
            p.zero_()
    found = watched(model, BATCHES)
    assert found["attention_share"][0] == 0
    assert np.isfinite(found["attention_share"]).all()
    assert found["mlp_share"][0] > 0


class Shared(Stack):
    """One block, three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(x)


def test_a_block_that_is_called_again_counts_each_time() -> None:
    torch.manual_seed(3)
    shared = Shared(Block, depth=1)
    apart = Stack(Block, depth=3)
    for block in apart.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    apart.embed.load_state_dict(shared.embed.state_dict())
    one, each = watched(shared, BATCHES), expected(apart, BATCHES)
    assert one["block_output_rms"][0] == pytest.approx(rms(np.array(each["block_output_rms"])), rel=1e-5)
    assert one["block_input_max"][0] == pytest.approx(max(each["block_input_max"]), rel=1e-5)
    assert one["attention_share"][0] == pytest.approx(np.mean(each["attention_share"]), rel=1e-5)


def test_nothing_changes_for_the_model() -> None:
    first = made(Scaled)
    second = copy.deepcopy(first)
    for model, stats in ((first, "max+residual"), (second, "max")):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        with qkeel.watch(model, optimizer, stats=stats):
            for x in BATCHES:
                model(x).square().mean().backward()
                optimizer.step()
        assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)


def test_what_checkpointing_computes_again_counts_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    torch.manual_seed(0)
    plain = made(Block)
    again = Recomputed(Block)
    again.load_state_dict(plain.state_dict())
    assert watched(again, BATCHES) == watched(plain, BATCHES)


def test_blocks_without_attention_are_recorded_under_their_own_name() -> None:
    class Dense(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm_2(x))

    model = made(Block)
    model.blocks[1] = Dense(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with qkeel.watch(model, optimizer, stats="max+residual") as monitor:
        model(BATCHES[0]).sum().backward()
        optimizer.step()
        sample = monitor.sample
        assert sample is not None
        frame = monitor.history.frame("layers")
    assert sample.values["mlp_share/blocks.1"] > 0
    assert sample.summaries()["hidden/blocks.1/mlp_share"] == sample.values["mlp_share/blocks.1"]
    assert frame["layer"].tolist() == ["blocks.0.mixer", "blocks.2.mixer", "blocks.1"]
    assert np.isnan(frame["max_logit"][2])
    assert frame["mlp_share"][2] == sample.values["mlp_share/blocks.1"]


class Repeated(nn.Module):
    """One block that is called several times, as in ALBERT, and a second one that some passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norms = nn.ModuleList([Block(8), Block(8)]), list[list[float]]()

    def forward(self, x: Tensor, second: bool = True) -> Tensor:
        self.norms.append([])
        for block in [self.layers[0]] * 3 + [self.layers[1]] * second:
            x = 2 * (out := block(x))
            self.norms[-1].append(out.detach().norm(dim=-1).mean().item())
        return x


def test_the_norms_of_a_block_that_is_called_again_are_the_mean_of_all_calls() -> None:
    torch.manual_seed(0)
    model = Repeated()
    with qkeel.watch(model) as monitor:
        model(torch.randn(2, 5, 8))
        sample = monitor.sample
    assert sample is not None
    *again, last = model.norms[-1]
    assert sample.values["block_output_norm/layers.0.mixer"] == pytest.approx(sum(again) / 3, rel=1e-5)
    assert sample.values["block_output_norm/layers.1.mixer"] == pytest.approx(last, rel=1e-5)


def test_the_norms_of_micro_batches_that_leave_out_a_block_are_means_of_those_that_had_it() -> None:
    torch.manual_seed(0)
    model = Repeated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with qkeel.watch(model, optimizer) as monitor:
        for second in (True, False):
            model(torch.randn(2, 5, 8), second).sum().backward()
        optimizer.step()
        sample = monitor.sample
    assert sample is not None
    (*first, only), second_pass = model.norms[-2:]
    assert sample.values["block_output_norm/layers.0.mixer"] == pytest.approx(sum(first + second_pass) / 6, rel=1e-5)
    assert sample.values["block_output_norm/layers.1.mixer"] == pytest.approx(only, rel=1e-5)


def test_a_model_that_fails_in_the_further_pass_says_that_its_stream_is_not_measured() -> None:
    class Once(Repeated):
        """Runs with gradients only, which the pass that shows the blocks has not."""

        def forward(self, x: Tensor, second: bool = True) -> Tensor:
            if not torch.is_grad_enabled():
                raise RuntimeError("this batch was seen already")
            return super().forward(x, second)

    model, sites = Once(), qkeel.find_sites(Repeated(), torch.randn(2, 5, 8))
    with qkeel.watch(model, stats="all+residual", sites=sites) as monitor:
        with pytest.warns(QkeelWarning, match="failed in the extra pass.*this batch was seen already"):
            nn.Sequential(*[model] * 10)(torch.randn(2, 5, 8))
        assert monitor.sample is not None
        assert not any(name.startswith("block_input") for name in monitor.sample.values)
