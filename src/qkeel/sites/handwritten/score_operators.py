"""The torch functions whose output is scores where their input is, by name, and those that only read scores."""

from __future__ import annotations

# Elementwise: what comes out is the same scores, scaled or cast.
ELEMENTWISE = frozenset(
    {
        *("div", "divide", "mul", "multiply", "neg", "rmul", "true_divide"),  # by a constant
        *("clamp", "clamp_max", "clamp_min", "clip", "maximum", "minimum", "nan_to_num", "softcap"),  # within bounds
        *("bfloat16", "double", "float", "half", "to", "type", "type_as"),  # as numbers of another kind
        *("alias", "clone", "contiguous", "cpu", "cuda", "detach", "positive", "requires_grad"),  # as they are
        *("alpha_dropout", "dropout"),
    }
)

# Views and indices, which masks go through too.
VIEWS = frozenset(
    {
        *("flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"),  # other sizes
        *("moveaxis", "movedim", "permute", "swapaxes", "swapdims", "t", "transpose"),  # another order of dimensions
        *("as_strided", "getitem", "narrow", "select", "slice"),  # a part, as a view
        *("gather", "index_select", "take_along_dim"),  # some, by their numbers
        *("expand", "expand_as", "pad", "repeat"),  # more
        *("flip", "roll"),  # in another order
    }
)

# What comes out is something else; the scores are still followed.
READS = frozenset(
    {
        *("dim", "get", "numel", "size", "stride"),
        *("all", "any", "eq", "ge", "gt", "isinf", "isnan", "le", "lt", "ne"),
        *("amax", "amin", "max", "mean", "min", "sum"),
    }
)
