"""How many passes of the model a search for its attention takes: as many at any depth."""

import pytest

pytest.importorskip("transformers")

from benchmarks.host_time import SEARCHES, Case, passes_of, transformers_model


@pytest.mark.parametrize("layers", [3])
@pytest.mark.parametrize(
    ("search", "most"),
    [
        ("find_sites", 1),
        ('apply("qk_norm")', 2),
        ('apply("qk_clip")', 1),
        ('apply("lalr")', 1),
        ('apply("softcap")', 2),
    ],
)
def test_a_search_takes_few_passes_at_any_depth(search, most, layers):
    case = Case(lambda n: transformers_model("Llama", n), layers, None)
    assert passes_of(SEARCHES[search], case.model, case.optimizer, case.ids) == most
