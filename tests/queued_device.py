"""Engines' steps on a device that works behind the host (`fake_device`): captured ones, those by
ops, and what cache tiers read and write. And the faults that only such a device shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import pytest
import torch
from captured_batches import plain_batch
from fake_device import Event, FakeDevice, FakeTorch, Pinned, Stream
from step_graphs import with_graphs, with_kernels
from triton_case import kernels

from vlm_serve.engine.requests.plan import DecodeRows, Slice, StepOutput, StepPlan
from vlm_serve.engine.start import build as building
from vlm_serve.engine.steps import step_tables, tier_copies
from vlm_serve.engine.steps.draft_graphs import DraftGraphs
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.pixel_copies import PixelCopies
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_tables import CudaGraphs, HostRing, Step
from vlm_serve.engine.steps.tier_copies import Arrivals, CopyStream, SaveRing
from vlm_serve.engine.steps.tier_transfer import TensorTransfer
from vlm_serve.engine.steps.tower_graphs import TowerGraphs
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors

P = ParamSpec("P")
R = TypeVar("R")


_FIRST = torch.device("cpu")
"""Where the engine's tensors are. It is the name of the only fake device."""


class QueuedDevice(CudaGraphs):
    """The real `CudaGraphs` over a fake device, whose captures are logged and whose replays run the
    log. `torch.cuda` is the device's where `CudaGraphs` asks for it.

    Args:
        seed: see `FakeDevice`.

    Attributes:
        device: the device.
    """

    def __init__(self, seed: int = 0) -> None:
        self.device = FakeDevice(seed)
        self._torch = FakeTorch(self.device)
        with self._used():
            super().__init__(_FIRST)

    @property
    def calls(self) -> int:
        """Captured steps that have run."""
        return self.device.replays

    def warm_up(self, step: Step) -> None:
        with self._used():
            super().warm_up(partial(self._asked, step))
        self.device.synchronize()

    def capture(self, step: Step) -> Step:
        # The interpreter computes every size once.
        fewer = patch.object(step_tables, "_WARM_UP", min(1, step_tables._WARM_UP))
        with self._used(), fewer:
            replay = super().capture(partial(self._asked, step))
        made: Any = self.device.captures[-1]
        assert made.stream is self._stream
        assert made.pool is self._pool, "graphs share their memory"
        assert made.errors == "thread_local", "another engine may allocate meanwhile"
        return replay

    def compute(self, step: Step) -> None:
        """Call a step's function on Triton's kernels: in their interpreter, or to be logged."""
        if self.device.capturing is not None:
            with kernels():
                step()
            return
        with self.device.in_memory():
            with_kernels(step)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        with self._used():
            memory = super().host_memory(num_bytes)
        assert isinstance(memory, Pinned), "a copy out of other memory is waited for"
        return memory

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        with self._used():
            return super().send(target, source)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def moved() -> None:
            with torch.inference_mode():
                CudaGraphs.move(self, target, source)

        self.device.queue(moved)

    def synchronize(self) -> None:
        """Run all that is queued."""
        self.device.synchronize()

    def _asked(self, step: Step) -> None:
        """Ask the device for a step: it is part of a capture, or of what is queued."""
        if self.device.capturing is not None:
            self.compute(step)
        elif self.device.working:
            step()
        else:
            current: Any = self.device.current
            assert current is self._stream, "warm-ups run where captures do"
            self.device.queue(partial(self.compute, step))

    @contextmanager
    def _used(self) -> Iterator[None]:
        with patch.object(step_tables, "torch", self._torch):
            yield


class TorchDevice(QueuedDevice):
    """The same, with torch's ops in place of Triton's interpreter, see `captured_batches`. They
    take values from the host, so that a capture logs the step as one launch.

    Args:
        model: computes captured steps.
        block_size: tokens per KV block.
        seed: see `FakeDevice`.
    """

    def __init__(self, model: Model, block_size: int, seed: int = 0) -> None:
        super().__init__(seed)
        self._model, self._block_size = model, block_size
        self._forward = model.forward

    def compute(self, step: Step) -> None:
        capture = self.device.capturing
        if capture is not None:
            capture.graph.log.append(partial(self._by_ops, step))
        else:
            self._by_ops(step)

    def _by_ops(self, step: Step) -> None:
        with patch.object(self._model, "forward", self._of_tables):
            step()

    def _of_tables(self, batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        found = plain_batch(batch, self._block_size)
        if found is None:
            return ForwardOutput(torch.zeros(1, self._model.spec.vocab_size))
        return self._forward(found, caches)


class QueuedCopies(CopyStream):
    """The real `CopyStream` over a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._torch = device, FakeTorch(device)
        with self._used():
            super().__init__(_FIRST)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        with self._used():
            return super().host_memory(num_bytes)

    def gather(self, target: torch.Tensor, parts: Iterable[torch.Tensor]) -> None:
        self._device.queue(partial(CopyStream.gather, self, target, parts))

    def save(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        with self._used():
            return super().save(target, source)

    def load(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Step:
        with self._used():
            wait = super().load(targets, sources)

        def used() -> None:
            with self._used():
                wait()

        return used

    @contextmanager
    def _used(self) -> Iterator[None]:
        # The tiers' thread makes host memory too: only one at a time may put it back.
        with self._device.lock, patch.object(tier_copies, "torch", self._torch):
            yield


class QueuedPixels(PixelCopies):
    """The real `PixelCopies`: values are looked up when all that a step waits for has come."""

    def __init__(self, stream: QueuedCopies, device: FakeDevice, dtype: torch.dtype) -> None:
        super().__init__(stream, _FIRST, dtype)
        self._fake = device

    def _values(self, pixels: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        self._fake.current.synchronize()
        return super()._values(pixels, table)


class QueuedExecutor(LocalExecutor):
    """An executor over a fake device: all that writes on the device is queued, and what is read
    back waits for it. As on a GPU that is the work of steps, and of copies what these wait for."""

    def __init__(
        self, model: Model, caches: CacheTensors, *, device: FakeDevice, **options: Any
    ) -> None:
        super().__init__(model, caches, **options)
        self.device = device
        drafts: DraftGraphs | None = options.get("draft_graphs")
        if drafts is not None:
            # What a pass returns is read at once, by operations that do not queue.
            vars(drafts)["run"] = self._awaited(drafts.run)
            vars(drafts)["run_later"] = self._awaited(drafts.run_later)
        tower: TowerGraphs | None = options.get("tower_graphs")
        if tower is not None:
            vars(tower)["run"] = self._awaited(tower.run)
        self._transfer = TensorTransfer(caches, (QueuedCopies(device), QueuedCopies(device)))
        self.pages = self._transfer
        self._pixels = QueuedPixels(QueuedCopies(device), device, model.dtype)

    def submit(self, plan: StepPlan) -> None:
        # The device has no kernel for folds that queues.
        if plan.folds or plan.partial_folds:
            self.device.current.synchronize()
        super().submit(plan)

    def collect(self) -> StepOutput:
        output = super().collect()
        read = output.sampled or output.tokens
        return replace(output, awaited=bool(read) or not self.device.current.queued)

    def embedding(self, slot: int) -> torch.Tensor | None:
        self.device.current.synchronize()
        return super().embedding(slot)

    def measure(self, **limits: int) -> Any:
        self.device.current.synchronize()
        # Captured steps would take the interpreter a minute, and say nothing of a GPU.
        with patch.object(self, "_graphs", ()):
            return super().measure(**limits)

    def measure_passes(self, **limits: int) -> Any:
        self.device.current.synchronize()
        if self._mtp is None:
            return None
        with patch.object(self._mtp, "_graphs", None):
            return super().measure_passes(**limits)

    def poison_freed(self, blocks: Iterable[int], rows: Iterable[int]) -> None:
        freed = list(blocks), list(rows)
        self._transfer.wait_for_freed(*freed)
        self._queue(partial(super().poison_freed, *freed))

    def _copy(self, plan: StepPlan) -> None:
        if plan.copies or plan.row_copies:
            self._queue(partial(super()._copy, plan))

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        for graphs in self._graphs:
            output = graphs.run(batch)
            if output is not None:
                return output
        if batch.verify is not None or batch.capture_experts or self._model.drafts:
            self.device.current.synchronize()
            return self._model.forward(batch, self._caches)
        own = _sent(batch)
        device = self._caches.device
        logits = torch.full((len(batch.logit_rows), self._model.columns), float("nan"))

        def forward() -> None:
            logits.copy_(self._model.forward(own.to(device), self._caches).logits)

        self._queue(forward)
        return ForwardOutput(logits)

    def _output(
        self, plan: StepPlan, output: ForwardOutput, packed: list[Slice], rows: list[int]
    ) -> StepOutput:
        # Without tasks and reports nothing is read back, and the host goes on. What surrounds the
        # passes of an MTP layer does not queue.
        if rows or len(output.logits) or output.experts is not None or self._mtp is not None:
            self.device.current.synchronize()
        return super()._output(plan, output, packed, rows)

    def _compute_rows(self, rows: DecodeRows) -> Any:
        computed = super()._compute_rows(rows)
        if not self.steps_ahead:
            self.device.current.synchronize()
        return computed

    def _later(self, work: Callable[[], R]) -> Callable[[], R]:
        done, event = list[R](), Event(self.device)
        self._queue(lambda: done.append(work()))
        event.record()

        def wait() -> R:
            event.synchronize()
            return done[0]

        return wait

    def _awaited(self, run: Callable[P, R]) -> Callable[P, R]:
        def awaited(*args: P.args, **kwargs: P.kwargs) -> R:
            output = run(*args, **kwargs)
            self.device.current.synchronize()
            return output

        return awaited

    def _queue(self, work: Step) -> None:
        def guarded() -> None:
            with torch.inference_mode():
                work()

        self.device.queue(guarded)


def _sent(batch: ForwardBatch) -> ForwardBatch:
    """Return a batch as launches take it along: later changes on the host do not reach it."""

    def tables(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in rows)

    decode, prefill = batch.decode, batch.prefill
    return replace(
        batch,
        token_ids=batch.token_ids.clone(),
        positions=batch.positions.clone(),
        decode=decode and replace(decode, block_tables=tables(decode.block_tables)),
        prefill=prefill and replace(prefill, block_tables=tables(prefill.block_tables)),
    )


def running(graphs: StepGraphs) -> Callable[..., ForwardOutput]:
    """In place of a model's forward: the graphs', which must be able to compute every step, and
    whose logits are read back."""

    def forward(batch: ForwardBatch, caches: CacheTensors) -> ForwardOutput:
        output, device = graphs.run(batch), graphs._device
        assert output is not None, "no graph computes it"
        assert isinstance(device, QueuedDevice)
        device.synchronize()
        return output

    return forward


def with_queue(monkeypatch: pytest.MonkeyPatch, device: QueuedDevice) -> None:
    """Has engines run captured steps and all others on this device."""
    with_graphs(monkeypatch, lambda place: device)
    monkeypatch.setattr(building, "LocalExecutor", partial(QueuedExecutor, device=device.device))


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Put a fault of `FAULTS` into the copies of captured steps' tables, inside the block."""
    owner, name, instead = FAULTS[fault]
    with patch.object(owner, name, instead):
        yield


def _no_wait(ring: HostRing, place: int) -> None:
    """Fill a buffer whose copy may still be queued: a step without samples waits for nothing."""


def _without_event(graphs: CudaGraphs, target: torch.Tensor, source: torch.Tensor) -> Step:
    """Send without recording the event waited for."""
    target.copy_(source, non_blocking=True)
    return lambda: None


def _on_a_stream_of_its_own(graphs: CudaGraphs, target: torch.Tensor, source: torch.Tensor) -> Step:
    """Send beside the steps: none of them waits for its tables."""
    cuda = vars(step_tables)["torch"].cuda
    with cuda.stream(cuda.Stream()):
        return _SEND(graphs, target, source)


def _one_memory(graphs: CudaGraphs, num_bytes: int) -> torch.Tensor:
    """Return the same memory for every buffer of a ring."""
    kept: torch.Tensor | None = graphs.__dict__.get("one_memory")
    if kept is None or kept.numel() < num_bytes:
        graphs.__dict__["one_memory"] = kept = _HOST_MEMORY(graphs, num_bytes)
    return kept[:num_bytes]


_SEND, _HOST_MEMORY = CudaGraphs.send, CudaGraphs.host_memory
FAULTS: dict[str, tuple[type, str, Any]] = {
    "filled too early": (HostRing, "_wait", _no_wait),
    "an event left out": (CudaGraphs, "send", _without_event),
    "a stream not waited for": (CudaGraphs, "send", _on_a_stream_of_its_own),
    "a table shared by two steps": (CudaGraphs, "host_memory", _one_memory),
}
"""Faults that only a device behind the host shows: what is replaced, and by what."""


def _unread(ring: SaveRing, first: int, last: int) -> None:
    """Take memory whose copy may still be queued."""
    ring._taken.clear()


def _before(stream: CopyStream, targets: Sequence[Any], sources: Sequence[Any]) -> Any:
    """Record the event before the copies."""
    torch_ = stream._torch  # type: ignore[attr-defined]
    stream._stream.wait_stream(torch_.cuda.current_stream())
    done = torch_.cuda.Event()
    with torch_.cuda.stream(stream._stream):
        done.record()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return done


COPY_FAULTS: dict[str, tuple[type, str, Any]] = {
    "memory used again before its copy": (SaveRing, "_free", _unread),
    "a step that does not wait for what it reads": (Arrivals, "wait_for", lambda *_: None),
    "copies that do not wait for steps": (Stream, "wait_stream", lambda *_: None),
    "an event before its copy": (CopyStream, "_copied", _before),
}
"""Likewise for what is copied beside steps."""
