"""The arguments of F.scaled_dot_product_attention by name, whether they were given by place or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BY_PLACE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a call, with torch's defaults for those that it leaves out.

    >>> sdpa_arguments((1, 2, 3), {"is_causal": True})["is_causal"]
    True
    """
    return {**_DEFAULTS, **dict(zip(_BY_PLACE, args)), **kwargs}
