"""Kinds of processes and files, drawn by a seed: ranks that train other models, conversions that are stopped, checkpoints
of many layers. Each is compared with numbers that are computed in float64 without qkeel."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.forked import spawn
from tests.training import warned
from torch import distributed, nn
from torch.nn import functional as F

import qkeel
from qkeel.audit import scan
from qkeel.cli.app import main
from qkeel.errors import QkeelWarning

WIDTH = 16


class Model(nn.Module):
    """One layer of attention, and its largest logit of each head in float64."""

    def __init__(self, draw):
        super().__init__()
        self.heads = draw.choice([1, 2, 4])
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            self.q.weight.mul_(draw.choice([1.0, 3.0, 9.0]))

    def projected(self, x):
        y = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        return [part.transpose(1, 2) for part in y]

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.projected(x))
        return y.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def largest(self, x):
        q, k, _ = (y.double() for y in self.projected(x))
        return (q @ k.mT * q.shape[-1] ** -0.5).amax((0, 2, 3))


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
        expected = weight * factors.repeat_interleave(WIDTH // model.heads)[:, None]
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


# The names of W_Q and W_K, or of one weight of all, by the type of a config.
NAMES = {
    "llama": "model.layers.{}.self_attn.{}_proj.weight",
    "bert": "bert.encoder.layer.{}.attention.self.{}.weight",
    "gpt2": "h.{}.attn.c_attn.weight",
    "gpt_neox": "gpt_neox.layers.{}.attention.query_key_value.weight",
}


def _layers(folder, kind, n_layers, heads, is_empty, generator):
    """Writes a checkpoint of that many layers; returns the largest singular value of each head's W_Q, in float64."""
    width = 4 * heads
    tensors, norms = {}, []
    for i in range(n_layers):
        q, k, v = (torch.randn(heads, 4, width, generator=generator) for _ in "qkv")
        norms.append(torch.linalg.svdvals(q.double())[:, 0])
        flat = [w.flatten(0, 1) for w in (q, k, v)]
        if kind in ("llama", "bert"):
            words = ("q", "k", "v") if kind == "llama" else ("query", "key", "value")
            tensors |= {NAMES[kind].format(i, x): w for x, w in zip(words, flat)}
        elif kind == "gpt2":
            tensors[NAMES[kind].format(i)] = torch.cat(flat).mT.contiguous()
        else:
            tensors[NAMES[kind].format(i)] = torch.cat([q, k, v], 1).flatten(0, 1)
    if is_empty:
        tensors = {name: torch.zeros(0, 0) for name in tensors}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    heads_key = "n_head" if kind == "gpt2" else "num_attention_heads"
    width_key = "n_embd" if kind == "gpt2" else "hidden_size"
    config = {"model_type": kind, heads_key: heads, width_key: width}
    (folder / "config.json").write_text(json.dumps(config))
    return norms


def _lines(act):
    """The number of lines of Python that a call runs, whatever machine it runs on."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return act(), count
    finally:
        sys.settrace(before)


def wrong_about_layers(seed):
    """A scan of many layers, and of three times as many."""
    draw = random.Random(f"layers {seed}")
    kind, heads = draw.choice([*NAMES]), draw.choice([1, 2, 3])
    is_empty = draw.random() < 0.5
    # What grows with the square shows in many layers; they cost little without numbers.
    n_layers = draw.randint(200, 400) if is_empty else draw.randint(20, 40)
    generator = torch.Generator().manual_seed(seed)
    title = f"{seed}: {n_layers} layers of {kind}{', empty' if is_empty else ''}"
    counts = []
    with tempfile.TemporaryDirectory() as name:
        for n in (n_layers, 3 * n_layers):
            folder = Path(name, str(n))
            norms = _layers(folder, kind, n, heads, is_empty, generator)
            result, count = _lines(functools.partial(_scanned, folder))
            counts.append(count)
            if is_empty or isinstance(result, str):
                if not is_empty:
                    return f"{title}: {result}"
                continue
            if len(result.sites) != n:
                return f"{title}: {len(result.sites)} sites"
            for site in result.sites:
                expected = norms[int(re.findall(r"\d+", site.name)[0])]
                if site.query_spectral != pytest.approx(expected.tolist(), rel=1e-4):
                    return f"{title}: {site.query_spectral} for {expected.tolist()}"
    if counts[1] > 3.2 * counts[0]:
        return f"{title}: {counts} lines"
    return ""


def _scanned(folder):
    try:
        return scan(folder)
    except qkeel.errors.QkeelError as error:
        return str(error)


KINDS = [wrong_about_conversions, wrong_about_layers]


@pytest.mark.parametrize(
    ("wrong", "seed"),
    [(wrong_about_ranks, 0), *[(wrong, seed) for wrong in KINDS for seed in range(2)]],
)
def test_processes_and_files_are_right_or_told(wrong, seed):
    assert not wrong(seed)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [wrong_about_ranks, *KINDS])
@pytest.mark.parametrize("seed", [101, 102, 103])
def test_more_processes_and_files_are_right_or_told(wrong, seed):
    failures = [wrong(1000 * seed + i) for i in range(8)]
    assert not [x for x in failures if x]
