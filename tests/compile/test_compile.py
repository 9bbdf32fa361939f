"""torch.compile: one graph, the numbers of eager. Cases run in processes of their own, the quick ones in one."""

import shutil
from pathlib import Path

import pytest
from tests import forked

CASES = Path(__file__).with_name("cases.py")


def gaps(*cases):
    result = forked.python([str(CASES), *cases], CASES.parent)
    assert result.returncode == 0, result.stderr[-4000:]
    return [float(line) for line in result.stdout.split()]


def gap(kind, preset, impl, backend):
    (found,) = gaps(kind, preset, impl, backend)
    return found


def test_attention_is_one_graph_forward_and_backward_and_the_choice_of_a_kernel_a_constant_of_it():
    chosen, tangents, one_graph = gaps(
        *("fullgraph", "qwen3", "auto", "eager"),
        *("tangents", "qwen3", "auto", "eager"),
        *("fullgraph", "qwen3", "sdpa", "aot_eager"),
    )
    assert chosen < 1e-5
    assert tangents < 1e-5
    assert one_graph < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="the default backend of torch.compile needs g++ on CPU",
)
@pytest.mark.parametrize(
    ("preset", "impl"),
    [
        ("qwen3", "sdpa"),
        ("cosa_logn", "sdpa"),
        ("olmo2", "sdpa"),
        ("qwen3", "chunked"),
        ("gemma2", "chunked"),
    ],
)
def test_compiled_attention_equals_eager(preset, impl):
    assert gap("fullgraph", preset, impl, "inductor") < 1e-5
