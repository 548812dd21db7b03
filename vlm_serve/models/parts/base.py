"""What token mixers and feed-forward parts have in common: as data, and with their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models.cache_layout import Pool
from vlm_serve.models.program import Program, View


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm; `centred`: a weight of 0 means a factor of 1."""

    eps: float
    centred: bool = True


@dataclass(frozen=True, slots=True)
class Routing:
    """Routed experts, and how many of them a token goes through."""

    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward shares. The packed tokens are those of decode steps, of
    prefills and of drafts, in this order. A sequence's keys begin with slot `first_key` of its
    table; other than 0 with prefills only."""

    decode: DecodeMeta | None
    prefill: PrefillMeta | None
    verify: VerifyMeta | None
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    deterministic: bool
    first_key: int = 0

    def parts(self) -> Iterator[tuple[DecodeMeta | PrefillMeta | VerifyMeta, slice]]:
        """Each kind of tokens that there is, and where they are among the packed ones."""
        first = 0
        for meta in (self.decode, self.prefill, self.verify):
            if meta is not None:
                last = first + (len(meta) if isinstance(meta, DecodeMeta) else meta.num_tokens)
                yield meta, slice(first, last)
                first = last


class Loader(Protocol):
    """Where a part's weights come from; `Weights` reads a checkpoint. Raises CheckpointError.

    A part takes what its rank holds; `ranks` may be alone.
    """

    device: torch.device
    ranks: Ranks

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor, as the checkpoint has it; None if it has none."""
        ...

    def linear(
        self, *parts: Part, bias: list[Part] | None = None, shard: Shard | None = None
    ) -> Linear:
        """Rows of several tensors below each other, as one projection; or what a shard has."""
        ...

    def tensor(self, name: str, shape: Sequence[int], rows: Sequence[range] = ()) -> torch.Tensor:
        """In the type of activations; if rows are named, those alone, one below the other."""
        ...

    def stacked(
        self, parts: Sequence[Part], count: int, shard: Shard | None = None
    ) -> torch.Tensor | Stored:
        """`[count, rows, K]` in the type of projections, or as many rows of codes; or what a shard
        has."""
        ...

    def embedding(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A lookup table in the type of projections."""
        ...


def load_norm(source: Loader, name: str, size: int, norm: Norm) -> torch.Tensor:
    """`[size]`, as the kernels take it: a weight of 0 means a factor of 1."""
    weight = source.tensor(f"{name}.weight", (size,))
    # In float32: one less than a bfloat16 is none.
    return weight if norm.centred else weight.float() - 1.0


def rows_of(items: range, width: int) -> tuple[range, ...]:
    """Rows of items next to each other, of so many rows each."""
    return (range(items.start * width, items.stop * width),)


def shard_of_inputs(source: Loader) -> Shard | None:
    """The columns of a weight whose inputs are shared out."""
    ranks = source.ranks
    return Shard(ranks.rank, ranks.size, 1) if ranks.shared else None


@dataclass(frozen=True, slots=True)
class Output:
    """The projection that ends a mixer or a feed-forward. Each rank has its part of the inputs;
    what all of them make of theirs is added before the residual is."""

    weight: Linear
    ranks: Ranks

    @classmethod
    def load(cls, source: Loader, part: Part, bias: Part | None = None) -> Output:
        """A bias is the first rank's."""
        biases = [] if bias is None or source.ranks.rank else [bias]
        shard = shard_of_inputs(source)
        return cls(source.linear(part, bias=biases or None, shard=shard), source.ranks)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, *, deterministic: bool
    ) -> torch.Tensor:
        """`[T, hidden]` in the dtype of the residual, which has been added."""
        if not self.ranks.shared:
            return self.weight(x, plus=residual, deterministic=deterministic)
        part = self.weight.partial(x, deterministic=deterministic)
        return added(self.ranks, part, residual)

    def lower(self, program: Program, x: View) -> None:
        """Adds it to the residual of a compiled step."""
        program.add(self.weight, x)


def added(ranks: Ranks, part: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The residual and the float32 parts of all ranks."""
    return (residual.float() + ranks.sum(part)).to(residual.dtype)


class LoadedMixer(ABC):
    """A token mixer with its weights. `cache` is what `bind` has made of the layer's pools."""

    @abstractmethod
    def bind(self, pools: Mapping[str, torch.Tensor]) -> Any:
        """The layer's part of the pools, as `apply` takes it."""

    @abstractmethod
    def apply(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cache: Any,
        step: Step,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Mixes tokens by ops; what the layer keeps between steps is updated in place.

        Args:
            x: `[T, hidden]` normed input.
            residual: `[T, hidden]`, added to the output.
            cache: from `bind`.
            step: this forward.
            keep: rows whose output is wanted, None for all.

        Returns:
            `[T or len(keep), hidden]`.
        """

    def fold(self, cache: Any, folds: Sequence[tuple[int, int, int]]) -> None:
        """Folds what drafted tokens have left into the state rows, by ops: (row, first update,
        count) each. Nothing to do without state."""
        del cache, folds

    @abstractmethod
    def lower(self, program: Program, cache: Any, *, last: bool) -> None:
        """Adds the operations of a compiled step: from `program.normed` to the residual.

        Args:
            program: the step.
            cache: from `bind`.
            last: in the last layer; only the rows with wanted logits matter from the output
                projection on.

        Raises:
            UnsupportedError: compiled code does not know such a mixer, or such pools.
        """


class Mixer(ABC):
    """A token mixer as data; frozen, so that layers can share one."""

    @abstractmethod
    def pools(self) -> tuple[Pool, ...]:
        """What a layer keeps between steps."""

    @abstractmethod
    def heads_to_split(self) -> Mapping[str, int]:
        """What tensor parallelism shares out: names for messages, and numbers."""

    def heads_to_repeat(self) -> Mapping[str, int]:
        """Likewise, but where there are fewer of them than ranks, several ranks have the same."""
        return {}

    @abstractmethod
    def load(self, source: Loader, layer: str, hidden: int, norm: Norm) -> LoadedMixer:
        """With the weights of the layer whose tensors' names start with `layer`."""


class LoadedFeedForward(ABC):
    """A feed-forward part with its weights."""

    @abstractmethod
    def apply(
        self, x: torch.Tensor, residual: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """By ops: (`[T, hidden]` with the residual added, int64 `[T, top_k]` ids of routed experts
        or None)."""

    @abstractmethod
    def lower(self, program: Program) -> None:
        """Adds the operations of a compiled step: from `program.normed` to the residual."""


class FeedForward(ABC):
    """A feed-forward part as data."""

    @property
    def routing(self) -> Routing | None:
        """Of routed experts, if it has some."""
        return None

    @abstractmethod
    def columns_to_split(self) -> Mapping[str, int]:
        """What tensor parallelism shares out: names for messages, and numbers."""

    @abstractmethod
    def load(self, source: Loader, layer: str, hidden: int) -> LoadedFeedForward:
        """With the weights of the layer whose tensors' names start with `layer`."""
