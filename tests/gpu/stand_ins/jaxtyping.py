"""Stands in for jaxtyping where `make gpu` finds none: its annotations, which nothing there checks."""


class _Array:
    def __class_getitem__(cls, shape):
        return shape[0]


Bool = Float = Int = _Array
