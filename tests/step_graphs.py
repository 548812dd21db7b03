"""What tests of captured steps share. The Triton kernels run in their interpreter; real graphs are
captured by `benchmarks/engine_gpu.py` on a GPU. Instead of a graph there is a log of what the model
asked for on the very batch that would be captured (`fake_graphs`), whose host values are no step's:
whatever a step read from anywhere but its tensors would be wrong.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from fake_graphs import refuse
from model_driver import Driver, Sequence_, text_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from triton_case import kernels

from vlm_serve.engine.start import build as building
from vlm_serve.engine.steps import step_paths, step_sizes
from vlm_serve.engine.steps.step_tables import Step
from vlm_serve.models.cache_layout import CacheTensors, Unit

SPECS = {
    "dense": CheckpointSpec(
        num_layers=2,
        full_attention_interval=2,
        gdn_key_heads=1,
        gdn_value_heads=2,
        vision_depth=0,
    ),
    "moe": CheckpointSpec(
        num_layers=2, full_attention_interval=2, num_experts=4, vision_depth=0, kv_heads=1
    ),
    "attention alone": CheckpointSpec(num_layers=2, full_attention_interval=1, vision_depth=0),
    "states alone": CheckpointSpec(
        num_layers=2,
        full_attention_interval=3,
        gdn_key_heads=1,
        gdn_value_heads=2,
        vision_depth=0,
    ),
}
"""A small model for each layout of the caches; the interpreter takes time for every head."""
SERVED = [name for name in SPECS if name != "states alone"]
"""Of them those that engines take: KV blocks are what they schedule by."""


def with_kernels(step: Step) -> None:
    """Calls a step's function on the Triton kernels."""
    # Padding may be computed from memory that nobody wrote, of which numpy would warn.
    with kernels(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step()


def started(driver: Driver, lengths: Sequence[int]) -> list[Sequence_]:
    """Sequences whose prompts are in the caches and whose first token is chosen."""
    draw = random.Random(1)
    prompts = [text_sequence(draw.choices(range(400), k=length)) for length in lengths]
    for one in prompts:
        logits = driver.step(prefills=[(one, 0, len(one.tokens))], all_logits=False).logits
        one.tokens.append(int(logits[0].argmax()))
    return prompts


def bits(caches: CacheTensors) -> list[torch.Tensor]:
    """Copies of all pools that compare equal where the bits do, NaNs included."""
    return [*_bits(caches, "block"), *_bits(caches, "row")]


def _bits(caches: CacheTensors, unit: Unit) -> list[torch.Tensor]:
    return [pool.view(torch.int32).clone() for pool in caches.of_unit(unit)]


class Written:
    """Finds what steps write into pools.

    Args:
        caches: the pools; the last state row, if there are any, is made NaN.
    """

    def __init__(self, caches: CacheTensors) -> None:
        self._caches = caches
        for pool in caches.of_unit("row"):
            pool[-1] = float("nan")
        self._blocks, self._rows = _bits(caches, "block"), _bits(caches, "row")

    def slots(self) -> set[int]:
        """Return the slots whose K or V have changed."""
        found: set[int] = set()
        for old, new in zip(self._blocks, _bits(self._caches, "block"), strict=True):
            places = (old != new).any(dim=(1, 2, 4, 5)).nonzero().tolist()
            found.update(block * self._caches.block_size + offset for block, offset in places)
        return found

    def rows(self) -> list[set[int]]:
        """Return the rows that have changed, for each pool of states."""
        pools = zip(self._rows, _bits(self._caches, "row"), strict=True)
        return [
            set((old != new).flatten(1).any(1).nonzero().flatten().tolist()) for old, new in pools
        ]


class HostFree(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a stream under capture cannot do: wait for a value, take one from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(func, args)
        return func(*args, **(kwargs or {}))


def with_graphs(monkeypatch: pytest.MonkeyPatch, device: Callable[[torch.device], object]) -> None:
    """Has engines built on the CPU as they are on a GPU, with another kind of device, and one size
    of prefills, since the interpreter takes its time."""
    monkeypatch.setattr(step_sizes, "TOKENS", (32,))
    monkeypatch.setattr(building, "graphs_wanted", lambda option, device, ranks: True)
    monkeypatch.setattr(step_paths, "CudaGraphs", device)
