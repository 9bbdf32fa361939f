"""Tensors that are nearly right: of another shape, or of another kind."""


def other_shapes(x):
    """Yields x with an axis one shorter, without its first axis, and with one more, each with its name."""
    for axis in range(-x.ndim, 0):
        if x.shape[axis] > 1:
            yield f"axis {axis}", x.narrow(axis, 0, x.shape[axis] - 1)
    yield "no first axis", x[0]
    yield "one more axis", x[None]


def other_kinds(x, kinds):
    """Yields x in each of the dtypes that it does not have, with its name."""
    for kind in kinds:
        if kind != x.dtype:
            yield str(kind).removeprefix("torch."), x.to(kind)
