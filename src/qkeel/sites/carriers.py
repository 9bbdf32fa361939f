"""Names of the torch functions that hand scores on, and of those that only look at them."""

from __future__ import annotations

# Elementwise: the result stands for the same scores.
CARRIES = frozenset(
    {
        "alias",
        "alpha_dropout",
        "bfloat16",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "div",
        "divide",
        "double",
        "dropout",
        "float",
        "half",
        "maximum",
        "minimum",
        "mul",
        "multiply",
        "nan_to_num",
        "neg",
        "positive",
        "requires_grad",
        "rmul",
        "softcap",
        "to",
        "true_divide",
        "type",
        "type_as",
    }
)

# Views and indices: masks move along.
SHAPES = frozenset(
    {
        "as_strided",
        "expand",
        "expand_as",
        "flatten",
        "flip",
        "gather",
        "getitem",
        "index_select",
        "moveaxis",
        "movedim",
        "narrow",
        "pad",
        "permute",
        "repeat",
        "reshape",
        "reshape_as",
        "roll",
        "select",
        "slice",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "take_along_dim",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)

# Read scores and leave them where they are.
LOOKS = frozenset(
    {
        "all",
        "amax",
        "amin",
        "any",
        "dim",
        "eq",
        "ge",
        "get",
        "gt",
        "isinf",
        "isnan",
        "le",
        "lt",
        "max",
        "mean",
        "min",
        "ne",
        "numel",
        "size",
        "stride",
        "sum",
    }
)
