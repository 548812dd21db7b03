"""Interfaces of token mixers and feed-forward parts: as data, and with their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.low_rank import RowChanges
from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.norms import Normed
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models.cache_layout import Pool
from vlm_serve.models.program import Program, View
from vlm_serve.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm; `centred`: a weight of 0 means a factor of 1."""

    eps: float
    centred: bool = True


@dataclass(frozen=True, slots=True)
class Routing:
    """The number of routed experts, and of those that each token uses. `sigmoids`: they are chosen
    by sigmoids instead of a softmax; (whether the checkpoint has biases of that choice, the sum of
    the weights, what is added to their divisor)."""

    num_experts: int
    top_k: int
    sigmoids: tuple[bool, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The data shared by all layers of one forward. The packed tokens are those of decode steps, of
    prefills and of drafts, in this order. A sequence's keys begin with slot `first_key` of its
    table; other than 0 without drafts only. `changes`: the adapters of the rows, if any."""

    decode: DecodeMeta | None
    prefill: PrefillMeta | None
    verify: VerifyMeta | None
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    deterministic: bool
    first_key: int = 0
    changes: RowChanges | None = None

    def kept(self, rows: torch.Tensor | None) -> Step:
        """Return the step of what follows when only some rows are left; None: all of them."""
        if rows is None or self.changes is None:
            return self
        return replace(self, changes=self.changes.kept(rows))

    def parts(self) -> Iterator[tuple[AnyMeta, slice]]:
        """Yield each kind of tokens in the step with its slice of the packed tokens."""
        first = 0
        for meta in (self.decode, self.prefill, self.verify):
            if meta is not None:
                yield meta, slice(first, first + meta.num_tokens)
                first += meta.num_tokens


def load_norm(
    source: Weights, name: str, size: int, norm: Norm, divisor: float = 1.0
) -> torch.Tensor:
    """Load a norm's `[size]` weights in the kernels' convention: a weight of 0 means a factor of
    1. `divisor`: of its results."""
    weight = source.tensor(f"{name}.weight", (size,))
    if norm.centred and divisor == 1.0:
        return weight
    # In float32, because a bfloat16 minus one may not be a bfloat16.
    return (weight.float() + float(norm.centred)) / divisor - 1.0


def rows_of(items: range, width: int) -> tuple[range, ...]:
    """Return the row ranges of adjacent items of `width` rows each."""
    return (range(items.start * width, items.stop * width),)


def shard_of_inputs(source: Weights) -> Shard | None:
    """Return the columns of a weight whose inputs are split among ranks."""
    ranks = source.ranks
    return Shard(ranks.rank, ranks.size, 1) if ranks.shared else None


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """The projection at the end of a mixer or a feed-forward. Each rank holds a part of the inputs;
    the ranks' results are summed before the residual is added."""

    weight: Linear
    ranks: Ranks

    @classmethod
    def load(cls, source: Weights, part: Part, bias: Part | None = None) -> OutputProjection:
        """Load the projection. The first rank adds the bias."""
        biases = [] if bias is None or source.ranks.rank else [bias]
        shard = shard_of_inputs(source)
        return cls(source.linear(part, bias=biases or None, shard=shard), source.ranks)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor:
        """Return `[T, hidden]` in the dtype of the residual, with the residual added.

        The result may take the residual's place.
        """
        if not self.ranks.shared:
            return self.weight(
                x,
                plus=residual,
                overwrite=True,
                deterministic=step.deterministic,
                changes=step.changes,
            )
        part = self.weight.partial(x, deterministic=step.deterministic, changes=step.changes)
        return added(self.ranks, part, residual)

    def lower(self, program: Program, x: View) -> None:
        """Append its sum with the residual to a compiled step."""
        program.add(self.weight, x)


def added(ranks: Ranks, part: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return the sum of the residual and the float32 parts of all ranks."""
    return (residual.float() + ranks.sum(part)).to(residual.dtype)


class LoadedMixer(ABC):
    """A token mixer with its weights. `cache` is the result of `bind` for the layer's pools."""

    @abstractmethod
    def bind(self, pools: Mapping[str, torch.Tensor]) -> Any:
        """Return the layer's part of the pools, in the form of `apply`'s argument."""

    @abstractmethod
    def apply(
        self,
        x: Normed,
        residual: torch.Tensor,
        cache: Any,
        step: Step,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Mix tokens by ops, updating the layer's memory between steps in place.

        Args:
            x: `[T, hidden]`, the input.
            residual: `[T, hidden]`, added to the output, which may take its place.
            cache: from `bind`.
            step: this forward.
            keep: rows of the output to compute, None for all.

        Returns:
            `[T or len(keep), hidden]`.
        """

    def fold(self, cache: Any, folds: Sequence[tuple[int, int, int]]) -> None:
        """Fold the updates of drafted tokens into the state rows, by ops: (row, first update,
        count) each. Without state it does nothing."""
        del cache, folds

    @abstractmethod
    def lower(self, program: Program, cache: Any, *, last: bool) -> None:
        """Append the operations of a compiled step: from `program.normed` to the residual.

        Args:
            program: the step.
            cache: from `bind`.
            last: the last layer: from the output projection on, only rows with requested logits are
                computed.

        Raises:
            UnsupportedError: compiled code does not support such a mixer, or such pools.
        """


class Mixer(ABC):
    """A token mixer as data; frozen, so that layers can share one."""

    @abstractmethod
    def pools(self) -> tuple[Pool, ...]:
        """Return the pools of a layer's memory between steps."""

    def sums_bytes(self, tokens: int, slices: int, keys: int) -> int:
        """Return the most bytes that a step's partial sums take on a GPU beside its activations.

        Args:
            tokens: decode tokens, or those of prompts.
            slices: of prompts; each may end in a tile of padding.
            keys: tokens of the longest sequence.
        """
        return 0

    @abstractmethod
    def heads_to_split(self) -> Mapping[str, int]:
        """Return the numbers that tensor parallelism splits, by names for messages."""

    def heads_to_repeat(self) -> Mapping[str, int]:
        """Return the numbers that are split too, but repeated if there are fewer than ranks."""
        return {}

    @abstractmethod
    def load(self, source: Weights, layer: str, hidden: int, norm: Norm) -> LoadedMixer:
        """Load the weights of the layer whose tensors' names start with `layer`."""


class LoadedFeedForward(ABC):
    """A feed-forward part with its weights."""

    @abstractmethod
    def apply(
        self, x: Normed, residual: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute by ops: (`[T, hidden]` with the residual added, int64 `[T, top_k]` ids of routed
        experts or None)."""

    @abstractmethod
    def lower(self, program: Program) -> None:
        """Append the operations of a compiled step: from `program.normed` to the residual."""


class FeedForward(ABC):
    """A feed-forward part as data."""

    @property
    def routing(self) -> Routing | None:
        """Routing of its experts, if it has any."""
        return None

    @abstractmethod
    def columns_to_split(self) -> Mapping[str, int]:
        """Return the numbers that tensor parallelism splits, by names for messages."""

    @abstractmethod
    def load(self, source: Weights, layer: str, hidden: int) -> LoadedFeedForward:
        """Load the weights of the layer whose tensors' names start with `layer`."""
