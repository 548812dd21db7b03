"""What tests of captured steps share. The Triton kernels run in their interpreter; real graphs are
captured by `benchmarks/engine_gpu.py` on a GPU. Instead of a graph the model's forward is called
again on the very batch that would be captured, whose host values are no step's: whatever a step
read from anywhere but its tensors would be wrong.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from model_driver import Driver, Sequence_, text_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from triton_case import kernels

from vlm_serve.engine import build as building
from vlm_serve.engine import prefill_graphs, step_paths
from vlm_serve.engine.decode_graphs import DecodeGraphs, Step
from vlm_serve.engine.prefill_graphs import PrefillGraphs
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

SPECS = {
    "dense": CheckpointSpec(num_layers=2, full_attention_interval=2, vision_depth=0),
    "moe": CheckpointSpec(
        num_layers=2, full_attention_interval=2, num_experts=4, vision_depth=0, kv_heads=1
    ),
}


class Repeating:
    """In place of a capture, which runs a step once: a step that calls the function again. Counts
    the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: Step) -> Step:
        def run() -> None:
            # Padding may be computed from memory that nobody wrote, of which numpy would warn.
            with kernels(), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                step()

        def again() -> None:
            self.calls += 1
            run()

        run()
        return again


def running(graphs: DecodeGraphs | PrefillGraphs) -> Callable[..., ForwardOutput]:
    """In place of a model's forward: the graphs', which must be able to compute every step."""

    def forward(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        output = graphs.run(batch)
        assert output is not None, "no graph computes it"
        return output

    return forward


def started(driver: Driver, lengths: Sequence[int]) -> list[Sequence_]:
    """Sequences whose prompts are in the caches and whose first token is chosen."""
    draw = random.Random(1)
    prompts = [text_sequence(draw.choices(range(400), k=length)) for length in lengths]
    for one in prompts:
        logits = driver.step(prefills=[(one, 0, len(one.tokens))], all_logits=False).logits
        one.tokens.append(int(logits[0].argmax()))
    return prompts


def bits(caches: CacheTensors) -> list[torch.Tensor]:
    """Copies that compare equal where the bits do, NaNs included."""
    return [
        pool.view(torch.int32).clone() for pool in caches.of_unit("block") + caches.of_unit("row")
    ]


class HostFree(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a stream under capture cannot do: wait for a value, take one from the host."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_pin_memory")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if masks or name in self.REFUSED:
            raise AssertionError(f"{func} under capture")
        return func(*args, **(kwargs or {}))


def with_graphs(monkeypatch: pytest.MonkeyPatch, capture: Callable[[], object]) -> None:
    """Has engines built on the CPU as they are on a GPU, with another kind of capture, and one size
    of prefills, since the interpreter takes its time."""
    monkeypatch.setattr(prefill_graphs, "TOKENS", (32,))
    monkeypatch.setattr(building, "graphs_wanted", lambda option, device, ranks: True)
    monkeypatch.setattr(step_paths, "CudaCapture", capture)
