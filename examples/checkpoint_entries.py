"""Weights that parts of many families have."""

from __future__ import annotations

from collections.abc import Iterator

Entry = tuple[str, tuple[int, ...], str]
"""(name, shape, rule of `random_weights.draw`)."""


def projection(name: str, shape: tuple[int, ...], *, bias: bool = True) -> Iterator[Entry]:
    """Yield the weight of a projection, and its bias."""
    yield f"{name}.weight", shape, "linear"
    if bias:
        yield f"{name}.bias", shape[:1], "bias"


def layer_norm(name: str, dim: int, *, bias: bool = True) -> Iterator[Entry]:
    """Yield the weight of a norm, and its bias; a root-mean-square norm has none."""
    yield f"{name}.weight", (dim,), "norm"
    if bias:
        yield f"{name}.bias", (dim,), "bias"
