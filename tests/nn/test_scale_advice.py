"""A module whose scale was made for heads of another size says so once."""

import pytest

from qkeel import preset
from qkeel.nn import Attention, attention


def test_a_scale_made_for_other_heads_is_warned_of_once_with_the_better_one():
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("qkeel.nn.attention.caution", said.append)
        attention._advise.cache_clear()
        Attention(128, 1, spec=preset("cosa"))  # head_dim 128
        Attention(64, 1, spec=preset("cosa", train_length=64))  # 13.86, best 11.76
        Attention(64, 1, spec=preset("cosa", gradient=True))
        Attention(64, 1, spec=preset("kna"))
        assert said == []
        for _ in range(2):
            Attention(64, 1, spec=preset("cosa"))
        Attention(64, 2, spec=preset("cosa_logn", train_length=64))
    assert len(said) == 2
    assert "head_dim 64, most gradient passes at 16.64" in said[0]
    assert "cosa:gradient=true" in said[1]
