"""Kinds of processes and files, drawn by a seed: ranks that train other models, conversions that are stopped. Each is
compared with numbers that are computed in float64 without qkeel."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.attention import Attention
from tests.forked import spawn
from tests.training import warned
from torch import distributed, nn

import qkeel
from qkeel.cli.app import main
from qkeel.errors import QkeelWarning

WIDTH = 16


class Model(Attention):
    """One layer of attention, with larger logits than at its start."""

    def __init__(self, draw):
        super().__init__(m=WIDTH, heads=draw.choice([1, 2, 4]))
        with torch.no_grad():
            self.q.weight.mul_(draw.choice([1.0, 3.0, 9.0]))


def _of_rank(seed, rank, groups):
    """The model of a rank, which its group shares, and its data."""
    (number,) = (i for i, members in enumerate(groups) if rank in members)
    draw = random.Random(f"model {seed} {number}")
    torch.manual_seed(draw.randrange(1 << 30))
    model = Model(draw)
    generator = torch.Generator().manual_seed(7 * seed + rank)
    return model, torch.randn(2, 5, WIDTH, generator=generator), groups[number]


def rank_of_group(folder, seed, groups, threshold):
    """What a rank has recorded, and what it has been told; see spawn."""
    rank = distributed.get_rank()
    # Every process of a group makes all subgroups.
    subgroups = [distributed.new_group(list(members)) for members in groups]
    model, x, members = _of_rank(seed, rank, groups)
    call: nn.Module = model
    if len(members) > 1:
        group = subgroups[groups.index(members)]
        call = nn.parallel.DistributedDataParallel(model, process_group=group)
    # The weights are changed by the clip alone.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warned(QkeelWarning) as said:
        monitor = qkeel.watch(call, optimizer, rules=[])
        if threshold is not None:
            remedy = f"qk_clip:threshold={threshold}"
            qkeel.apply(call, remedy, optimizer, batch=x)
        call(x).square().mean().backward()
        optimizer.step()
        recorded = monitor.history.heads["max_logit"][0]
        monitor.close()
    torch.save(
        {
            "recorded": torch.as_tensor(recorded).double().flatten(),
            "weight": model.q.weight.detach().double(),
            "said": said,
        },
        folder / str(rank),
    )


def wrong_about_ranks(seed):
    """Ranks of one process group that train models of their own, alone or in groups of DDP."""
    draw = random.Random(f"ranks {seed}")
    groups = draw.choice(
        [((0,), (1,)), ((0,), (1,), (2,)), ((0, 1), (2,)), ((0, 1), (2, 3))]
    )
    threshold = draw.choice([None, 0.3, 1.0])
    world = sum(map(len, groups))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spawn(world, functools.partial(rank_of_group, folder, seed, groups, threshold))
        results = [torch.load(folder / str(rank)) for rank in range(world)]
    for rank, result in enumerate(results):
        model, _, members = _of_rank(seed, rank, groups)
        data = [_of_rank(seed, member, groups)[1] for member in members]
        largest = torch.stack([model.largest(x) for x in data]).amax(0)
        title = f"{seed}: {groups} threshold {threshold}, rank {rank}, told {result['said']}"
        recorded = result["recorded"]
        recorded = recorded[~recorded.isnan()]
        is_right = recorded.shape == largest.shape and torch.allclose(
            recorded, largest, rtol=1e-5
        )
        if not is_right and not result["said"]:
            return f"{title}: recorded {recorded.tolist()} for {largest.tolist()}"
        factors = torch.ones_like(largest)
        if threshold is not None:
            factors = (threshold / largest).sqrt().where(largest > threshold, 1.0)
        weight = model.q.weight.detach().double()
        expected = weight * factors.repeat_interleave(model.d)[:, None]
        if not torch.allclose(result["weight"], expected, rtol=1e-5):
            return f"{title}: clipped by {(result['weight'] / weight).amax(1).tolist()}"
    return ""


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": False,
}


def _checkpoint(folder, draw):
    """A Llama with norms of queries and keys, in one file or several."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    n_layers, vocabulary = draw.choice([1, 2, 4]), draw.choice([23, 2000])
    shapes = {
        "model.embed_tokens.weight": (vocabulary, 16),
        "lm_head.weight": (vocabulary, 16),
        "model.norm.weight": (16,),
    }
    for i in range(n_layers):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                **dict.fromkeys(["self_attn.q_proj", "self_attn.o_proj"], (16, 16)),
                **dict.fromkeys(["self_attn.k_proj", "self_attn.v_proj"], (8, 16)),
                **dict.fromkeys(["self_attn.q_norm", "self_attn.k_norm"], (4,)),
                **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (24, 16)),
                "mlp.down_proj": (16, 24),
                **dict.fromkeys(["input_layernorm", "post_attention_layernorm"], (16,)),
            }.items()
        }
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    n_shards = draw.choice([1, 1, 3])
    files = {name: f"part-{i % n_shards}.safetensors" for i, name in enumerate(tensors)}
    folder.mkdir()
    for file in set(files.values()):
        part = {name: x for name, x in tensors.items() if files[name] == file}
        save_file(part, folder / file)
    if n_shards > 1:
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {"num_hidden_layers": n_layers, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
    return folder, tensors


def _converted(source, out, log, before=lambda: None):
    """The exit code of `qkeel convert` in a process of its own, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            with (
                log.open("w") as said,
                contextlib.redirect_stderr(said),
                contextlib.redirect_stdout(said),
            ):
                before()
                options = ["--to", "qwen3", "--out", str(out), "--norm-eps", "1e-5"]
                code = main(["convert", str(source), *options])
        except BaseException as error:
            # A user would see a traceback.
            log.write_text(f"{log.read_text()} Traceback {error!r}")
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _full(most):
    """Ends each file of this process after so many bytes, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _counting(folder, act):
    """Calls `act` with the number of each event that changes files of a folder."""
    count = 0

    def hook(event, args):
        nonlocal count
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE
        )
        if changes and str(folder) in str(args[0]):
            count += 1
            act(count)

    sys.addaudithook(hook)


def _kill_at(last, number):
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)


def _weights(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: x.tolist() for name, x in tensors.items()}


def wrong_about_conversions(seed):
    """A conversion onto a full disk, or one that is killed, and the next one."""
    draw = random.Random(f"convert {seed}")
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name, "folder"), Path(name, "log")
        events = Path(name, "events")
        folder.mkdir()
        source, tensors = _checkpoint(folder / "in", draw)
        out = folder / "out"
        counted = functools.partial(
            _counting, folder, lambda n: events.write_text(str(n))
        )
        if _converted(source, Path(name, "folder", "whole"), log, counted) != 0:
            return f"{seed}: {log.read_text()}"
        whole = folder / "whole"
        right = _weights(whole)
        # What is converted are the same numbers under the same names.
        if right != {name: x.tolist() for name, x in tensors.items()}:
            return f"{seed}: other weights"
        is_full = draw.random() < 0.5
        if is_full:
            # The error must have room for itself.
            most = draw.randrange(500, max(f.stat().st_size for f in whole.iterdir()))
            fault, title = functools.partial(_full, most), f"{seed}: full after {most}"
        else:
            last = draw.randint(1, int(events.read_text()))
            kill = functools.partial(_kill_at, last)
            fault = functools.partial(_counting, folder, kill)
            title = f"{seed}: killed at {last}"
        code = _converted(source, out, log, fault)
        said = log.read_text()
        if code != (2 if is_full else -signal.SIGKILL):
            return f"{title}: exit {code}: {said}"
        if is_full and (
            "Traceback" in said
            or said.count("\nerror:") + said.startswith("error:") != 1
        ):
            return f"{title}: {said}"
        names = {path.name for path in folder.iterdir()}
        if is_full and names != {"in", "whole"}:
            return f"{title}: left {names}"
        # A process that was killed after the last step has converted all.
        if not out.exists() and _converted(source, out, log) != 0:
            return f"{title}: the next one: {log.read_text()}"
        names = {path.name for path in folder.iterdir()}
        if names != {"in", "whole", "out"} or _weights(out) != right:
            return f"{title}: in the end {names}"
    return ""


@pytest.mark.parametrize(
    ("wrong", "seed"),
    [(wrong_about_ranks, 0), *[(wrong_about_conversions, seed) for seed in range(2)]],
)
def test_processes_and_files_are_right_or_told(wrong, seed):
    assert not wrong(seed)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [wrong_about_ranks, wrong_about_conversions])
@pytest.mark.parametrize("seed", [101, 102, 103])
def test_more_processes_and_files_are_right_or_told(wrong, seed):
    failures = [wrong(1000 * seed + i) for i in range(8)]
    assert not [x for x in failures if x]
