"""Launches of a captured step, counted without a GPU, layer by layer.

A step's time on a GPU is at least that of its launches. Triton's are recorded. Of torch's
operations all count that would launch something: those whose results share no argument's memory, or
that write some, but not memory that is only allocated. By their schema `.to()`, `.contiguous()` and
`reshape` are views, and so the same is asked of them: a conversion is a launch. cuBLAS may take two
launches for a product, which nobody sees here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlm_serve.engine.steps.adapter_table import AdapterTable, SlotSizes
from vlm_serve.engine.steps.step_graphs import StepGraphs, StepLimits
from vlm_serve.engine.steps.step_sizes import StepSize
from vlm_serve.engine.steps.step_tables import Step
from vlm_serve.kernels.triton_support import Launch, Target, record_launches
from vlm_serve.models import Model
from vlm_serve.models.cache_layout import CacheTensors, Content
from vlm_serve.models.parts.attention import LoadedAttention
from vlm_serve.models.parts.feed_forward import LoadedExperts, LoadedMlp, LoadedUngatedMlp
from vlm_serve.models.parts.gated_delta import LoadedGatedDelta
from vlm_serve.models.parts.mamba2 import LoadedMamba2
from vlm_serve.models.parts.short_conv import LoadedShortConv

Kind = Literal["decode", "drafts", "prefill"]
PARTS: dict[str, type] = {
    "Gated DeltaNet": LoadedGatedDelta,
    "short convolution": LoadedShortConv,
    "Mamba2": LoadedMamba2,
    "attention": LoadedAttention,
    "MLP": LoadedMlp,
    "MLP without a gate": LoadedUngatedMlp,
    "experts": LoadedExperts,
}
BLOCK, LONGEST, DRAFTED = 16, 8192, 4
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}


@dataclass
class Launches:
    """Launches by name; those of Triton have the names of kernels."""

    triton: Counter[str] = field(default_factory=Counter)
    torch: Counter[str] = field(default_factory=Counter)

    @property
    def numbers(self) -> list[int]:
        """Launches of Triton, and of torch."""
        return [self.triton.total(), self.torch.total()]

    def minus(self, other: Launches) -> Launches:
        return Launches(self.triton - other.triton, self.torch - other.torch)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that launch something.

    Attributes:
        counts: launches by name.
        hidden: those among them that are views by their schema.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.hidden: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in NO_LAUNCH or not (func._schema.is_mutable or _is_new(result, (args, kwargs))):
            return result
        self.counts[name] += 1
        self.hidden[name] += func.is_view
        return result


def _is_new(result: Any, arguments: Any) -> bool:
    """Return True if a result has memory that no argument has."""
    known, made = (
        {each.untyped_storage()._cdata for each in tree_leaves(values) if torch.is_tensor(each)}
        for values in (arguments, result)
    )
    return not made <= known


def count(
    model: Model,
    kind: Kind,
    decodes: int = 4,
    *,
    adapters: bool = False,
    deterministic: bool = False,
) -> dict[str, list[Launches]]:
    """Return the launches of a captured step: one entry under "step", and those of every layer's
    parts under the names of `PARTS`.

    Args:
        model: on the device "meta", where all that is asked for a GPU is done and nothing computed.
        kind: of the step's tokens; beside a prefill some sequences decode. With drafts, one
            sequence has three.
        decodes: sequences of a decode step.
        adapters: count a decode step of the set with adapters.
        deterministic: see `ForwardBatch`.
    """
    caches, table = _pools(model, decodes), None
    device = _Counting()
    if adapters:
        sizes = SlotSizes.of(model.modules, slots=8, max_rank=64)
        table = AdapterTable(sizes, device, caches.device)
    size = {
        "decode": StepSize(decodes),
        "drafts": StepSize(0, 1, DRAFTED),
        "prefill": StepSize(2, prompts=2, tokens=64),
    }[kind]
    limits: StepLimits = {
        "block_size": BLOCK,
        "max_model_len": LONGEST,
        "device": device,
        "deterministic": deterministic,
    }
    with record_launches(Target("cuda", 90)) as device.recorded:
        StepGraphs(model, caches, (size,), **limits, adapters=table)
    return {name: launches for name, launches in device.found.items() if launches}


class _Counting:
    """A device that counts what the last capture launches, and runs no step.

    Attributes:
        recorded: launches of Triton.
        found: what `count` returns.
    """

    def __init__(self) -> None:
        self.recorded: list[Launch] = []
        self.found: dict[str, list[Launches]] = {}

    def warm_up(self, step: Step) -> None:
        step()

    def capture(self, step: Step) -> Step:
        step()  # what belongs to the weights is derived once
        self.found = {}
        with Operations() as operations, ExitStack() as patches:
            for name, part in PARTS.items():
                inner: Any = part.__dict__["apply"]
                own = self.found.setdefault(name, [])
                counted = _counted(inner, own, self.recorded, operations)
                patches.enter_context(patch.object(part, "apply", counted))
            with _difference(self.found.setdefault("step", []), self.recorded, operations):
                step()
        return step

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        return lambda: None


def _pools(model: Model, decodes: int) -> CacheTensors:
    layout = model.spec.cache_layout(1, mtp=False)
    types: dict[Content, torch.dtype] = {
        "kv": model.dtype,
        "inputs": model.dtype,
        "activations": model.dtype,
        "state": torch.float32,
        "exact": torch.float32,
    }
    return layout.allocate(8, decodes + 4, BLOCK, types, model.device, num_updates=DRAFTED)


def _counted(
    inner: Callable[..., Any],
    own: list[Launches],
    recorded: list[Launch],
    operations: Operations,
) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        with _difference(own, recorded, operations):
            return inner(*args, **kwargs)

    return apply


@contextmanager
def _difference(
    own: list[Launches], recorded: list[Launch], operations: Operations
) -> Iterator[None]:
    """Append what the block launches."""
    before = Launches(_names(recorded), Counter(operations.counts))
    yield
    own.append(Launches(_names(recorded), Counter(operations.counts)).minus(before))


def _names(recorded: list[Launch]) -> Counter[str]:
    return Counter(launch.kernel.__name__ for launch in recorded)
