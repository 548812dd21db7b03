"""A small model on two devices, one of which works behind the host, in simulated traffic.

The simulation's plans go to both, with numbers in place of symbols: positions that count, and no
media. Tokens still come from the symbolic executor. What both read back must be the same, and so
must all that is in their pools: bit by bit, since both compute the same batches by the same ops.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import make_checkpoint
from queued_device import QueuedExecutor, TorchDevice
from simulation import Simulation
from step_graphs import SPECS
from symbolic import SymbolicExecutor

from vlm_serve.cache.tiers.entry import Arriving, Content, Entry, EntryId, Kind, here
from vlm_serve.engine.requests.plan import SequenceInfo, StepOutput, StepPlan
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.step_sizes import TOKENS, decode_sizes, prefill_sizes, verify_sizes
from vlm_serve.models import load_model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import Content as PoolContent

COMPARE_EVERY = 25
"""Steps between two comparisons of all pools."""
TYPES: tuple[PoolContent, ...] = ("kv", "state", "inputs", "activations", "exact")


class CountedGraphs(StepGraphs):
    """Count the steps with drafts that a graph has computed.

    Attributes:
        steps: their number.
    """

    steps = 0

    def run(self, batch: ForwardBatch) -> ForwardOutput | None:
        output = super().run(batch)
        self.steps += output is not None
        return output


class TorchTwins(SymbolicExecutor):
    """The simulation's second executor, and beside it the model's two.

    Args:
        checkpoint: of the model.
        seed: see `FakeDevice`.
        max_model_len, max_num_seqs, drafts: limits of the simulated engine.
        num_blocks, num_rows, block_size, rng, options: see `SymbolicExecutor`.

    Attributes:
        steps: steps that both have computed.
        ahead: those that read nothing back.
        verifying: graphs of steps with drafts; None in traffic without any.
    """

    def __init__(
        self,
        checkpoint: Path,
        seed: int,
        num_blocks: int,
        num_rows: int,
        block_size: int,
        rng: random.Random,
        *,
        max_model_len: int,
        max_num_seqs: int,
        drafts: int,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, num_rows, block_size, rng, **options)
        self.steps = self.ahead = 0
        self._saved: dict[tuple[bytes, ...], list[Content | Arriving]] = {}
        models = [load_model(checkpoint, torch.float32, "cpu") for _ in range(2)]
        # The last row of the queued one's is for padding.
        self._pools = [
            each.spec.cache_layout(1, mtp=False).allocate(
                num_blocks,
                num_rows + extra,
                block_size,
                dict.fromkeys(TYPES, torch.float32),
                num_updates=len(self.updates),
            )
            for each, extra in zip(models, (0, 1), strict=True)
        ]
        self._at_once = LocalExecutor(models[0], self._pools[0], block_size=block_size)
        self.device = TorchDevice(models[1], block_size, seed)
        limits: dict[str, Any] = {
            "block_size": block_size,
            "max_model_len": max_model_len,
            "device": self.device,
        }
        model, pools = models[1], self._pools[1]
        graphs: tuple[StepGraphs, ...] = (
            StepGraphs(model, pools, prefill_sizes(max_num_seqs, TOKENS[-1]), **limits),
            StepGraphs(model, pools, decode_sizes(max_num_seqs), **limits),
        )
        self.verifying: CountedGraphs | None = None
        if drafts:
            sizes = verify_sizes(max_num_seqs, drafts)
            self.verifying = CountedGraphs(model, pools, sizes, **limits)
            graphs += (self.verifying,)
        self._queued = QueuedExecutor(
            models[1],
            self._pools[1],
            device=self.device.device,
            block_size=block_size,
            graphs=graphs,
        )

    @property
    def both(self) -> tuple[LocalExecutor, LocalExecutor]:
        return self._at_once, self._queued

    def register(self, info: SequenceInfo) -> None:
        super().register(info)
        positions = torch.arange(len(info.token_ids)).expand(3, -1)
        for each in self.both:
            each.register(replace(info, positions=positions, rope_delta=0))

    def forget(self, sequence: int) -> None:
        super().forget(sequence)
        for each in self.both:
            each.forget(sequence)

    def poison(self, blocks: Iterable[int] = (), rows: Iterable[int] = ()) -> None:
        super().poison(blocks, rows)
        for each in self.both:
            each.poison_freed(blocks, rows)

    def read_kv(self, block: int, num_tokens: int) -> list[bytes]:
        digests = super().read_kv(block, num_tokens)
        self._saved[b"kv", *digests] = [each.pages.read_kv(block, num_tokens) for each in self.both]
        return digests

    def read_state(self, row: int) -> bytes:
        digest = super().read_state(row)
        self._saved[b"row", digest] = [each.pages.read_state(row) for each in self.both]
        return digest

    def write_kv(self, block: int, digests: list[bytes]) -> None:
        super().write_kv(block, digests)
        payload = self._arrived(b"kv", *digests)
        for each in self.both:
            each.pages.write_kv(block, _staged(each, Kind.KV, len(digests), payload))

    def write_state(self, row: int, digest: bytes) -> None:
        super().write_state(row, digest)
        payload = self._arrived(b"row", digest)
        for each in self.both:
            each.pages.write_state(row, _staged(each, Kind.STATE, 1, payload))

    def _arrived(self, *name: bytes) -> bytes:
        """Wait for what both devices have read there, and compare it."""
        (payload,) = {bytes(here(content)) for content in self._saved[name]}
        return payload

    def run(self, plan: StepPlan) -> StepOutput:
        """Run a plan on both devices, whatever the symbolic one does with it: a step that fails
        leaves undefined what it was to write, and all of it is."""
        plain = replace(
            plan,
            slices=tuple(replace(item, embeddings=()) for item in plan.slices),
            encodes=(),
            dropped_slots=(),
            recalled=(),
        )
        expected, found = (each.run(plain) for each in self.both)
        assert _comparable(found) == _comparable(expected)
        self.steps += 1
        self.ahead += not found.awaited
        if self.steps % COMPARE_EVERY == 0:
            self.compare()
        return super().run(plan)

    def compare(self) -> None:
        """Compare all pools, but for the row of padding."""
        self.device.synchronize()
        here, there = self._pools
        for unit in ("block", "row"):
            for mine, other in zip(here.of_unit(unit), there.of_unit(unit), strict=True):
                same = mine.view(torch.int32) == other[: len(mine)].view(torch.int32)
                assert same.all(), f"{unit}s differ: {set((~same).nonzero()[:, 0].tolist())}"


def _comparable(output: StepOutput) -> tuple[str, ...]:
    """What was read back, exactly, not-a-numbers included."""
    arrays = {**output.prompt_logprobs}, {**output.experts}
    parts = [{number: each.tobytes() for number, each in own.items()} for own in arrays]
    return tuple(map(repr, (output.sampled, *parts)))


def _staged(executor: LocalExecutor, kind: Kind, num_tokens: int, payload: bytes) -> Any:
    pages = executor.pages
    layout = pages.layout(kind, num_tokens)
    staged = pages.stage(Entry(EntryId(kind, bytes(32)), num_tokens, True, layout, payload))
    assert staged is not None
    return staged


class TorchSimulation(Simulation):
    """Random traffic whose plans a small model computes too, on both devices.

    Args:
        seed: see `Simulation`.
        folder: for the models' checkpoints, by whether they have states; made if they are missing.
        speculative: see `Simulation`.
    """

    twin: TorchTwins

    def __init__(self, seed: int, folder: Path, *, speculative: bool = False) -> None:
        self._folder = folder
        super().__init__(seed, compare_every=COMPARE_EVERY, speculative=speculative)

    def _second(
        self, seed: int, sizes: tuple[int, int, int], options: dict[str, Any], *, queued: bool
    ) -> TorchTwins:
        name = "dense" if options["has_state"] else "attention alone"
        checkpoint = self._folder / name
        if not checkpoint.exists():
            make_checkpoint(checkpoint, SPECS[name])
        return TorchTwins(
            checkpoint,
            seed,
            *sizes,
            random.Random(f"twin {seed}"),
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            drafts=self.config.speculative_tokens,
            **options,
        )

    def run(self, steps: int) -> Counter[str]:
        counts = super().run(steps)
        self.twin.compare()
        counts["steps ahead"] = self.twin.ahead
        counts["captured"] = self.twin.device.calls
        if self.twin.verifying is not None:
            counts["captured with drafts"] = self.twin.verifying.steps
        return counts
