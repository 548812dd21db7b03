"""Launches of a captured step, counted without a GPU, layer by layer.

A step's time on a GPU is at least that of its launches. Triton's are recorded. Of torch's
operations all count that would launch something: not views, and no memory that is only allocated.
cuBLAS may take two launches for a product, which nobody sees here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from queued_device import QueuedDevice
from torch.utils._python_dispatch import TorchDispatchMode

from vlm_serve.engine.steps.adapter_table import AdapterTable, SlotSizes
from vlm_serve.engine.steps.step_buffers import StepBuffers
from vlm_serve.engine.steps.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.steps.step_tables import HostRing
from vlm_serve.kernels.triton_support import Launch, Target, record_launches
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.models.parts.attention import LoadedAttention
from vlm_serve.models.parts.feed_forward import LoadedExperts, LoadedMlp
from vlm_serve.models.parts.gated_delta import LoadedGatedDelta

Kind = Literal["decode", "drafts", "prefill"]
PARTS: dict[str, type] = {
    "Gated DeltaNet": LoadedGatedDelta,
    "attention": LoadedAttention,
    "MLP": LoadedMlp,
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


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that launch something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCH:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count(
    model: Model, kind: Kind, decodes: int = 4, *, adapters: bool = False
) -> dict[str, list[Launches]]:
    """Return the launches of a captured step: one entry under "step", and those of every layer's
    parts under the names of `PARTS`.

    Args:
        model: on the device "meta", where all that is asked for a GPU is done and nothing computed.
        kind: of the step's tokens; beside a prefill some sequences decode. With drafts, one
            sequence has three.
        decodes: sequences of a decode step.
        adapters: count a decode step of the set with adapters.
    """
    caches = _pools(model, decodes)
    batch = _captured(caches, kind, decodes, model if adapters else None)
    found: dict[str, list[Launches]] = {}
    with record_launches(Target("cuda", 90)) as recorded:
        model.forward(batch, caches)  # what belongs to the weights is derived once
        with _Operations() as operations, ExitStack() as patches:
            for name, part in PARTS.items():
                own = found.setdefault(name, [])
                inner: Any = part.__dict__["apply"]
                counted = _counted(inner, own, recorded, operations)
                patches.enter_context(patch.object(part, "apply", counted))
            with _difference(found.setdefault("step", []), recorded, operations):
                model.forward(batch, caches)
    return {name: launches for name, launches in found.items() if launches}


def _pools(model: Model, decodes: int) -> CacheTensors:
    layout = model.spec.cache_layout(1, mtp=False)
    types = {
        **dict.fromkeys(("kv", "conv", "hidden"), model.dtype),
        "recurrent": torch.float32,
        **dict.fromkeys(("update_keys", "update_changes", "update_decays"), torch.float32),
        "update_inputs": model.dtype,
    }
    return layout.allocate(8, decodes + 4, BLOCK, types, model.device, num_updates=DRAFTED)


def _captured(
    caches: CacheTensors, kind: Kind, decodes: int, changed: Model | None
) -> ForwardBatch:
    limits = SequenceLimits(BLOCK, LONGEST // BLOCK, max(caches.num_rows - 1, 0))
    device = QueuedDevice()
    ring, table = HostRing(device), None
    if changed is not None:
        sizes = SlotSizes.of(changed.modules, slots=8, max_rank=64)
        table = AdapterTable(sizes, device, caches.device)
    size = {
        "decode": StepSize(decodes),
        "drafts": StepSize(0, 1, DRAFTED),
        "prefill": StepSize(2, prompts=2, tokens=64),
    }[kind]
    return StepBuffers(size, limits, ring, caches.device, adapters=table).batch


def _counted(
    inner: Callable[..., Any],
    own: list[Launches],
    recorded: list[Launch],
    operations: _Operations,
) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        with _difference(own, recorded, operations):
            return inner(*args, **kwargs)

    return apply


@contextmanager
def _difference(
    own: list[Launches], recorded: list[Launch], operations: _Operations
) -> Iterator[None]:
    """Append what the block launches."""
    before = Launches(_names(recorded), Counter(operations.counts))
    yield
    own.append(Launches(_names(recorded), Counter(operations.counts)).minus(before))


def _names(recorded: list[Launch]) -> Counter[str]:
    return Counter(launch.kernel.__name__ for launch in recorded)
