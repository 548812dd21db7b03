"""The weights of a language model, layer by layer, and what a layer computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.norms import Normed
from vlm_serve.models.classifier import HEAD
from vlm_serve.models.parts.base import LoadedFeedForward, LoadedMixer, Mixer, Step, load_norm
from vlm_serve.models.program import Program
from vlm_serve.models.spec import BranchSpec, LayerSpec, ModelSpec
from vlm_serve.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Branch:
    """A residual branch: its norm, None for that of the branch before it, and its part."""

    norm: torch.Tensor | None
    part: LoadedMixer | LoadedFeedForward


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: residual branches, one after the other, whose norms have an `eps`."""

    branches: tuple[Branch, ...]
    eps: float

    @property
    def mixers(self) -> tuple[LoadedMixer, ...]:
        """Token mixers of all branches, in order."""
        return tuple(each.part for each in self.branches if isinstance(each.part, LoadedMixer))

    def bind(self, pools: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Return its mixers' parts of the pools of its memory."""
        return tuple(mixer.bind(pools) for mixer in self.mixers)

    def apply(
        self, x: torch.Tensor, caches: Sequence[Any], step: Step, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, Step, list[torch.Tensor]]:
        """Compute the layer by ops, updating its memory in place.

        Args:
            x: `[T, hidden]`, the residual; the result may take its place.
            caches: from `bind`.
            step: this forward.
            keep: rows that are needed behind the last mixer, None for all.

        Returns:
            (`[T or len(keep), hidden]`, the step of those rows, int64 `[T, top_k]` ids of each
            feed-forward with routed experts).
        """
        routed, left, normed = list[torch.Tensor](), list(caches), None
        for place, branch in enumerate(self.branches, 1):
            if branch.norm is not None:
                normed = Normed(x, branch.norm, self.eps)
            assert normed is not None, "a layer's first branch has a norm"
            if isinstance(branch.part, LoadedMixer):
                cache = left.pop(0)
                rows = None if left else keep
                x, step = branch.part.apply(normed, x, cache, step, rows), step.kept(rows)
                continue
            # A result may take the place of the residual, whose norm the next branch reads too.
            read = any(next_.norm is None for next_ in self.branches[place : place + 1])
            x, ids = branch.part.apply(normed, x.clone() if read else x, step)
            routed += [] if ids is None else [ids]
        return x, step, routed

    def lower(self, program: Program, caches: Sequence[Any], *, last: bool) -> None:
        """Append the layer's operations to a compiled step; `last`: see `LoadedMixer.lower`."""
        left = list(caches)
        for branch in self.branches:
            if branch.norm is not None:
                program.norm(branch.norm, self.eps)
            if isinstance(branch.part, LoadedMixer):
                cache = left.pop(0)
                branch.part.lower(program, cache, last=last and not left)
            else:
                branch.part.lower(program)

    def fold(self, caches: Sequence[Any], folds: Sequence[tuple[int, int, int]]) -> None:
        """Fold the updates of drafted tokens into state rows, see `LoadedMixer.fold`."""
        for mixer, cache in zip(self.mixers, caches, strict=True):
            mixer.fold(cache, folds)


def load_layer(spec: ModelSpec, layer: LayerSpec, source: Weights, name: str) -> Layer:
    """Load a layer of a model, whose tensors' names start with `name`."""
    return Layer(
        tuple(_load_branch(spec, branch, source, name) for branch in layer.branches),
        spec.residual_eps,
    )


def _load_branch(spec: ModelSpec, branch: BranchSpec, source: Weights, name: str) -> Branch:
    hidden, norm, part = spec.hidden_size, spec.norm, branch.part
    factors = None
    if branch.norm is not None:
        factors = load_norm(source, f"{name}.{branch.norm}", hidden, norm)
    if isinstance(part, Mixer):
        return Branch(factors, part.load(source, name, hidden, norm))
    return Branch(factors, part.load(source, name, hidden))


class Decoder:
    """The weights of a language model.

    Args:
        spec: the model.
        source: of the weights.
        prefix: of their names, except for the head's.
        head: name of the output projection; None: the embeddings are tied.
        pooled: what takes the place of that projection: another one, the ids of its rows that are
            kept, or the number of labels, each of which has a row of the head.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: Weights,
        prefix: str,
        head: str | None,
        pooled: Linear | tuple[int, ...] | int | None = None,
    ) -> None:
        table, shape = f"{prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
        self.embedding = source.embedding(table, shape)
        rows: tuple[range, ...] = (source.ranks.share(spec.vocab_size),)
        if isinstance(pooled, tuple):
            rows = tuple(range(row, row + 1) for row in pooled)
        part = Part(head or table, shape, rows, least_bits=6)
        if isinstance(pooled, int):
            part = Part(HEAD, (pooled, spec.hidden_size), least_bits=16)
        self.head: Linear = pooled if isinstance(pooled, Linear) else source.linear(part)
        self.layers = tuple(
            load_layer(spec, layer, source, f"{prefix}layers.{index}")
            for index, layer in enumerate(spec.layers)
        )
        # Logits are divided in the norm before them, unless others take their place.
        divisor = 1.0 if isinstance(pooled, Linear | int) else spec.scales.logits
        last = f"{prefix}{spec.last_norm}"
        self.norm = load_norm(source, last, spec.hidden_size, spec.norm, divisor)

    @property
    def last_mixing(self) -> Layer:
        """The last layer with a token mixer."""
        return next(layer for layer in reversed(self.layers) if layer.mixers)
