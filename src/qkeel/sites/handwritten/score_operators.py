"""The torch functions whose output is scores where their input is, by name, and those that only read scores."""

from __future__ import annotations

# Elementwise: what comes out is the same scores, scaled or cast.
ELEMENTWISE = frozenset(
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

# Views and indices, which masks go through too.
VIEWS = frozenset(
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

# What comes out is something else; the scores are still followed.
READS = frozenset(
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
