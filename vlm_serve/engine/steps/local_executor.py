"""Executor in this process, on one device: encode, copy, forward, sample."""

from __future__ import annotations

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from vlm_serve.cache.experts import Rows
from vlm_serve.cache.tiers.entry import Arriving, Content
from vlm_serve.cache.tiers.transfer import Transfer
from vlm_serve.engine.core.executor import ExecutorLostError, RowsAfter, StepError
from vlm_serve.engine.features.drafts.measuring import measure_passes, measure_plain, measure_rows
from vlm_serve.engine.requests.plan import (
    DecodeRows,
    Encode,
    SampledToken,
    SampleTask,
    SequenceInfo,
    Slice,
    StepOutput,
    StepPlan,
)
from vlm_serve.engine.steps.batching import KnownSequence, make_batch
from vlm_serve.engine.steps.draft_graphs import DraftGraphs
from vlm_serve.engine.steps.mtp_runner import MtpRunner
from vlm_serve.engine.steps.prompt_rows import logprob_rows
from vlm_serve.engine.steps.row_columns import RowColumns
from vlm_serve.engine.steps.row_sampling import Chosen, prepare
from vlm_serve.engine.steps.sampler import SequenceSampler, best_rows, sample
from vlm_serve.engine.steps.step_graphs import StepGraphs
from vlm_serve.engine.steps.tier_transfer import TensorTransfer
from vlm_serve.engine.steps.token_counts import FEWEST_SLOTS, TokenCounts, to_device
from vlm_serve.engine.steps.tower_graphs import TowerGraphs
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.kv_write import copy_kv_rows
from vlm_serve.kernels.large_pages import release
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.sampling.reference import UNSOUND
from vlm_serve.kernels.state_copy import copy_rows
from vlm_serve.models import Model
from vlm_serve.models.adapters import Adapter
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.system.host_memory import release_freed_memory

_T = TypeVar("_T")


def _detached(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows that share their storage: all that was encoded together would stay alive with
    them."""
    return rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()


@contextmanager
def _launching(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(), launching_on(device):
        yield


class LocalExecutor:
    """An `Executor` over one model and its pools.

    Args:
        model: the language model with its vision tower.
        caches: KV and state pools.
        block_size: tokens per KV block.
        deterministic: see `ForwardBatch.deterministic`.
        graphs: run the steps that they accept, instead of the model's forward.
        draft_graphs: likewise for passes of the MTP layer.
        tower_graphs: likewise for the vision tower.
        ahead: a step may be queued before the output of the one before it is read.
        max_num_seqs: sequences of a step at most.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        *,
        block_size: int,
        deterministic: bool = False,
        graphs: tuple[StepGraphs, ...] = (),
        draft_graphs: DraftGraphs | None = None,
        tower_graphs: TowerGraphs | None = None,
        ahead: bool = False,
        max_num_seqs: int = FEWEST_SLOTS,
    ) -> None:
        self.steps_ahead = int(ahead)
        self._transfer = TensorTransfer(caches)
        self.pages: Transfer = self._transfer
        self._pixels = self._transfer.pixels(model.dtype) if model.ranks.size == 1 else None
        self.model_seconds = 0.0
        self._model = model
        self._caches = caches
        self._block_size = block_size
        self._deterministic = deterministic
        self._graphs, self._tower_graphs = graphs, tower_graphs
        self._on_host = caches.device.type == "cpu"
        self._known: dict[int, KnownSequence] = {}
        self._rows: RowsAfter = "whole"
        self._mtp = MtpRunner(model, caches, block_size, draft_graphs) if model.drafts else None
        self._embeddings: dict[int, torch.Tensor] = {}
        self._adapters: dict[int, AdapterChanges] = {}
        self._under_way = deque[tuple[Callable[[], StepOutput] | Exception, RowsAfter]]()
        self._columns: RowColumns | None = None
        self._counts = TokenCounts(max_num_seqs, caches.device)
        self._ids = torch.zeros(0, dtype=torch.int64, device=caches.device)
        self._sampled: tuple[int, ...] = ()
        """The tokens that the last step samples, on the device, and their sequences."""
        self._fed: torch.Tensor | None = None
        """Those of them that the step under way begins with; None: the host knows them."""

    def register(self, info: SequenceInfo) -> None:
        self._known[info.sequence] = KnownSequence(info)

    def forget(self, sequence: int) -> None:
        del self._known[sequence]
        self._counts.forget(sequence)

    def hold_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """Put an adapter into a slot, between steps; None: empty it."""
        self.hold_changes(slot, None if adapter is None else adapter.changes)

    def hold_changes(self, slot: int, changes: AdapterChanges | None) -> None:
        """Put an adapter's changes into a slot, between steps; None: empty it."""
        if changes is None:
            self._adapters.pop(slot, None)
        else:
            self._adapters[slot] = changes
        for graphs in self._graphs:
            graphs.hold_changes(slot, changes)

    def watch(self, lost: Callable[[ExecutorLostError], None]) -> None:
        """Do nothing: nothing can be lost."""

    def embedding(self, slot: int) -> torch.Tensor | None:
        return self._embeddings.get(slot)

    @property
    def takes_codes(self) -> bool:
        """True if pixels may come as they are, with a table of values."""
        return self._pixels is not None

    def read_rows(self, rows: torch.Tensor) -> Content | Arriving:
        """Return the content of a tensor that no step overwrites, for lower cache tiers."""
        return self._transfer.read_rows(rows)

    def release_pools(self) -> None:
        """Give the memory of a CPU's pools back, between steps: nothing in them is needed."""
        for pool in self._caches.tensors.values():
            release(pool)
        gc.collect()
        release_freed_memory()

    def close(self) -> None:
        self._known.clear()

    def run(self, plan: StepPlan) -> StepOutput:
        """Run a step, see `Executor.run`."""
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Begin a step, see `Executor.submit`."""
        self._rows, read = "whole", None
        try:
            with self._guard():
                read = self._begin(plan)
        except Exception as error:
            self._under_way.append((error, self._rows))
        else:
            self._under_way.append((read, self._rows))

    def collect(self) -> StepOutput:
        """Return the output of the oldest step, see `Executor.collect`."""
        begun, rows = self._under_way.popleft()
        try:
            if isinstance(begun, Exception):
                raise begun
            with self._guard():
                return begun()
        except Exception as error:
            self._counts.clear()
            if lost := after_failure(error, self._caches.device):
                raise ExecutorLostError(lost) from error
            raise StepError(error, rows) from error

    def _begin(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Queue a step, or run it. Return a function that waits for its output."""
        self._transfer.wait_for(plan)
        if plan.rows is not None:
            return self._begin_rows(plan.rows)
        computed = self._compute(plan)
        if computed is None:
            empty = StepOutput({}, awaited=self._on_host)
            return lambda: empty
        output, packed, rows = computed
        tasks = [task for item in packed for task in item.samples]
        if tasks and self._queues(packed, output):
            sequences = tuple([task.sequence for task in tasks])
            samplers = {number: self._known[number].sampler for number in sequences}
            wait = self._begin_sampling(output.logits, sequences, tasks, samplers, rows)
            return lambda: _sampled_output(sequences, wait())
        self._sampled = ()  # nothing of it stays on the device for the next step
        result = self._output(plan, *computed)
        return lambda: result

    def _queues(self, packed: Sequence[Slice], output: ForwardOutput) -> bool:
        """Return True if all that the host wants of a step is sampled without a wait."""
        return bool(
            self.steps_ahead
            and self._mtp is None
            and self._model.pooled is None
            and output.experts is None
            and all(
                item.kind != "verify"
                and item.reported_end <= item.reported_start
                and all(task.forced is None for task in item.samples)
                for item in packed
            )
        )

    def _compute_rows(self, rows: DecodeRows) -> tuple[ForwardOutput, RowColumns]:
        """Run the forward of a step that only extends the one before."""
        self.model_seconds, columns = 0.0, self._columns
        if columns is None or columns.numbers != rows.sequences:
            columns = self._columns = RowColumns(rows, self._known, self._block_size)
        batch = columns.batch(rows, self._adapters)
        self._fed = None
        if rows.tokens is None:
            self._fed = self._sampled_before(rows.sequences)
            batch = replace(batch, sampled=self._fed)
        if self._deterministic:
            batch = replace(batch, deterministic=True)
        begin = time.perf_counter()
        self._rows = "mixed"
        output = self._forward(batch)
        self._rows = "folded"
        self.model_seconds += time.perf_counter() - begin
        return output, columns

    def _begin_rows(self, rows: DecodeRows) -> Callable[[], StepOutput]:
        """Begin a step that only extends the one before."""
        output, columns = self._compute_rows(rows)
        columns.note(rows)
        sequences, places = rows.sequences, range(len(rows))
        plain = columns.is_plain and not rows.masks
        if self.steps_ahead:
            tasks, samplers = [] if plain else rows.tasks(), columns.samplers
            wait = self._begin_sampling(
                output.logits, sequences, tasks, samplers, places, self._fed
            )
            return lambda: _sampled_output(sequences, wait(), rows=True)
        if plain:
            tokens = best_rows(output.logits, output.best)
            result = StepOutput({}, tokens=tokens, unsound=_unsound_ids(sequences, tokens))
        else:
            sampled = sample(
                output.logits, rows.tasks(), columns.samplers, places, output.best, self._counts
            )
            result = StepOutput(sampled, unsound=_unsound(sampled))
        return lambda: result

    def _sampled_before(self, sequences: tuple[int, ...]) -> torch.Tensor:
        """Return the tokens that the step before samples for some of its sequences, on the
        device."""
        if sequences is self._sampled or sequences == self._sampled:
            return self._ids[: len(sequences)]
        place = {number: index for index, number in enumerate(self._sampled)}
        sources = torch.tensor([place[number] for number in sequences])
        sources = to_device(sources, self._caches.device)
        ids, target = self._ids, torch.empty_like(sources)
        self._later(lambda: torch.index_select(ids, 0, sources, out=target))
        return target

    def _begin_sampling(
        self,
        logits: torch.Tensor,
        sequences: tuple[int, ...],
        tasks: Sequence[SampleTask],
        samplers: Mapping[int, SequenceSampler],
        rows: Sequence[int],
        before: torch.Tensor | None = None,
    ) -> Callable[[], Chosen]:
        """Queue the sampling of tasks, one for each sequence, or of the likeliest tokens if there
        are none. The next step may begin with these tokens. Return a function that waits for
        them."""
        count = len(sequences)
        if len(self._ids) < count:
            self._ids = torch.zeros(count, dtype=torch.int64, device=self._caches.device)
        following, self._sampled = self._ids, sequences
        choose = prepare(
            logits, tasks, samplers, rows, self._counts, before=before, following=following
        )
        wait = self._later(lambda: choose().mapped(_to_host))
        penalised = [
            (place, task)
            for place, task in enumerate(tasks)
            if samplers[task.sequence].is_penalised
        ]

        def noted() -> Chosen:
            chosen = wait()
            for place, task in penalised:
                samplers[task.sequence].note(task.position, chosen.token(place))
            return chosen

        return noted if penalised else wait

    def _later(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Queue work on the device. Return a function that waits until it is done and returns its
        result."""
        result = work()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> _T:
            done.synchronize()
            return result

        return wait

    def follow(self, plan: StepPlan) -> None:
        """Compute a step whose tokens another rank samples. Raise whatever the model raises."""
        with self._guard():
            self._transfer.wait_for(plan)
            if plan.rows is None:
                self._compute(plan)
            else:
                self._compute_rows(plan.rows)

    def measure(
        self, *, most_sequences: int, most_tokens: int
    ) -> tuple[list[tuple[int, float]], float]:
        """Measure the cost of rows, see `measure_rows`; before the first step."""
        with self._guard():
            return measure_rows(
                self._forward, self._caches, most_sequences=most_sequences, most_tokens=most_tokens
            )

    def measure_plain(self, *, most_sequences: int) -> list[tuple[int, float]]:
        """Measure steps without drafts, if they run from graphs; before the first step. Return
        (sequences, seconds)."""
        if not self._graphs:
            return []
        with self._guard():
            return measure_plain(self._forward, self._caches, most_sequences=most_sequences)

    def measure_passes(self, *, most_sequences: int) -> list[tuple[int, float]] | None:
        """Measure passes of the MTP layer, see `measure_passes`; return None without one."""
        if self._mtp is None:
            return None
        shape = self._model.spec.hidden_size, self._model.dtype
        with self._guard():
            return measure_passes(
                self._mtp.forward, self._caches, *shape, most_sequences=most_sequences
            )

    def _guard(self) -> AbstractContextManager[object]:
        """Return the context of a step: launches go to the device, without gradients. On the host,
        compiled steps launch nothing, and steps by ops have their own guard."""
        return nullcontext() if self._on_host else _launching(self._caches.device)

    def _compute(self, plan: StepPlan) -> tuple[ForwardOutput, list[Slice], list[int]] | None:
        """Run the forward. Return its output, the slices in packed order, and the rows of the
        tasks' logits; None for a plan without slices."""
        self.model_seconds, self._columns = 0.0, None
        for item in plan.slices:
            self._known[item.sequence].take(item)
        for slot in plan.dropped_slots:
            self._embeddings.pop(slot, None)
        self._fold(plan)
        self._copy(plan)
        for recalled in plan.recalled:
            self._embeddings[recalled.slot] = recalled.rows.to(self._caches.device)
        self._encode(plan.encodes)
        if not plan.slices:
            return None
        packed = sorted(plan.slices, key=lambda item: item.kind)  # decode, prefill, verify
        batch, rows = make_batch(
            packed, self._known, self._embeddings, self._block_size, self._adapters
        )
        if self._deterministic:
            batch = replace(batch, deterministic=True)
        begin = time.perf_counter()
        self._rows = "mixed"
        output = self._forward(batch)
        self._rows = "folded"
        self.model_seconds += time.perf_counter() - begin
        return output, packed, rows

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        for graphs in self._graphs:
            output = graphs.run(batch)
            if output is not None:
                return output
        return self._model.forward(batch.to(self._caches.device), self._caches)

    def poison_freed(self, blocks: Iterable[int], rows: Iterable[int]) -> None:
        """Fill freed blocks and rows with NaN, so that a stale read shows in every result."""
        caches, blocks, rows = self._caches, list(blocks), list(rows)
        self._transfer.wait_for_freed(blocks, rows)
        for pools, freed in ((caches.of_unit("block"), blocks), (caches.of_unit("row"), rows)):
            for pool in pools:
                if freed and pool.dtype.is_floating_point:
                    pool[freed] = float("nan")

    def _fold(self, plan: StepPlan) -> None:
        if plan.partial_folds:
            sources, destinations, firsts, counts = zip(*plan.partial_folds, strict=True)
            copy_rows(self._caches.of_unit("row"), sources, destinations)
            folds = tuple(zip(destinations, firsts, counts, strict=True))
            self._model.fold(self._caches, folds)
        if plan.folds:
            self._model.fold(self._caches, plan.folds)

    def _copy(self, plan: StepPlan) -> None:
        if plan.row_copies:
            sources, destinations = zip(*plan.row_copies, strict=True)
            copy_rows(self._caches.of_unit("row"), sources, destinations)
        if plan.copies:
            copy_kv_rows(self._caches["kv"], self._caches.tensors.get("kv_scales"), plan.copies)

    def _encode(self, encodes: tuple[Encode, ...]) -> None:
        """Run this rank's share of the spans through the tower and exchange the embeddings with the
        other ranks."""
        if not encodes:
            return
        begin, ranks = time.perf_counter(), self._model.ranks
        owners = _owners(encodes, ranks.size)
        local = [span for span, owner in zip(encodes, owners, strict=True) if owner == ranks.rank]
        embeddings = iter(self._embedded(local))
        for encode, owner in zip(encodes, owners, strict=True):
            mine = _detached(next(embeddings)) if owner == ranks.rank else None
            like = self._model.embedding_like(encode.grid, encode.merge_size)
            self._embeddings[encode.slot] = ranks.broadcast(mine, owner, like)
        self.model_seconds += time.perf_counter() - begin

    def _embedded(self, encodes: Sequence[Encode]) -> list[torch.Tensor]:
        """Return the embeddings of spans, each with its adapter's tower."""
        embedded: dict[int, torch.Tensor] = {}
        pixels = {encode.slot: self._sent(encode) for encode in encodes}
        for slot in dict.fromkeys(encode.adapter for encode in encodes):
            spans = [encode for encode in encodes if encode.adapter == slot]
            patches = torch.cat([pixels[encode.slot]() for encode in spans])
            rows = self._tower(patches, spans, self._adapters.get(slot))
            embedded.update(zip((encode.slot for encode in spans), rows, strict=True))
        return [embedded[encode.slot] for encode in encodes]

    def _sent(self, encode: Encode) -> Callable[[], torch.Tensor]:
        """Send a span's pixels. Return a function that returns them when they are needed."""
        if self._pixels is None:
            return lambda: encode.pixels
        return self._pixels.send(encode.pixels, encode.table)

    def _tower(
        self, pixels: torch.Tensor, spans: Sequence[Encode], changes: AdapterChanges | None
    ) -> list[torch.Tensor]:
        """Run the tower, from a graph if one fits."""
        grids = [encode.grid for encode in spans]
        if self._tower_graphs is not None:
            rows = self._tower_graphs.run(pixels, grids, changes)
            if rows is not None:
                # The next run overwrites them.
                return [embedding.clone() for embedding in rows]
        return self._model.encode_media(
            pixels,
            grids,
            [encode.merge_size for encode in spans],
            deterministic=self._deterministic,
            changes=changes,
        )

    def _output(
        self, plan: StepPlan, output: ForwardOutput, packed: list[Slice], rows: list[int]
    ) -> StepOutput:
        """Sample from the logits of the tasks and compute the requested reports."""
        tasks = [task for item in packed for task in item.samples]
        if self._model.pooled is not None:
            vectors = _vectors(output.logits, tasks, rows)
            return StepOutput(vectors, unsound=_unsound(vectors))
        samplers = {task.sequence: self._known[task.sequence].sampler for task in tasks}
        sampled = sample(output.logits, tasks, samplers, rows, output.best, self._counts)
        unsound = _unsound(sampled)
        sampled |= dict.fromkeys(unsound, (SampledToken(0, {}),))
        reports, row = {}, 0
        for item in packed:
            count = max(0, item.reported_end - item.reported_start)
            if count:
                info = self._known[item.sequence].info
                following = info.token_ids[item.reported_start + 1 : item.reported_end + 1]
                logits, rivals = output.logits[row : row + count], info.params.prompt_logprobs
                reports[item.sequence] = logprob_rows(logits, following, rivals or 0)
                if not np.isfinite(reports[item.sequence]["logprob"]).all():
                    unsound |= {item.sequence}
            row += count + (len({task.position for task in item.samples}) or item.kind == "decode")
        experts, drafts = _experts_by_sequence(output.experts, packed), {}
        if self._mtp is not None and plan.skip_mtp:
            self._mtp.skip(packed, self._known)
        elif self._mtp is not None and output.hidden is not None:
            begin = time.perf_counter()
            drafts = self._mtp.run(packed, self._known, self._embeddings, output.hidden, sampled)
            self.model_seconds += time.perf_counter() - begin
        awaited = self._on_host or bool(tasks or reports or experts)
        return StepOutput(sampled, experts, reports, drafts, awaited, unsound)


def _vectors(
    logits: torch.Tensor, tasks: Sequence[SampleTask], rows: Sequence[int]
) -> dict[int, tuple[SampledToken, ...]]:
    """Return the row of each task as its vector."""
    host = logits.float().cpu().numpy()
    return {
        task.sequence: (SampledToken(0, {}, vector=host[row].copy()),)
        for task, row in zip(tasks, rows, strict=True)
    }


def _sampled_output(
    sequences: tuple[int, ...], chosen: Chosen, *, rows: bool = False
) -> StepOutput:
    """Return the output of a step that has only sampled a token for each of these sequences."""
    if rows and not chosen.told:
        tokens = chosen.tokens()
        return StepOutput({}, tokens=tokens, unsound=_unsound_ids(sequences, tokens))
    found = zip(sequences, chosen.read(), strict=True)
    sampled: dict[int, tuple[SampledToken, ...]] = {
        number: (SampledToken(*one),) for number, one in found
    }
    unsound = _unsound(sampled)
    return StepOutput(sampled | dict.fromkeys(unsound, (SampledToken(0, {}),)), unsound=unsound)


def _to_host(found: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host, which nobody reads before it has waited."""
    if found.device.type == "cpu":
        return found.clone()
    host = torch.empty_like(found, device="cpu", pin_memory=True)
    return host.copy_(found, non_blocking=True)


def _unsound_ids(sequences: Sequence[int], tokens: Sequence[int]) -> frozenset[int]:
    """Return the sequences of which no token can be sampled."""
    if UNSOUND not in tokens:
        return frozenset()
    pairs = zip(sequences, tokens, strict=True)
    return frozenset(number for number, token in pairs if token == UNSOUND)


def _unsound(sampled: Mapping[int, Sequence[SampledToken]]) -> frozenset[int]:
    """Return the sequences of which a token cannot be sampled, or a vector holds no numbers."""
    return frozenset(
        number
        for number, (*_, last) in sampled.items()
        if last.token_id == UNSOUND or not (last.vector is None or np.isfinite(last.vector).all())
    )


def _owners(encodes: Sequence[Encode], ranks: int) -> list[int]:
    """Choose the rank that encodes each span: largest first, each to the rank with the least
    load."""
    loads, owners = [0] * ranks, [0] * len(encodes)
    for index in sorted(range(len(encodes)), key=lambda i: -len(encodes[i].pixels)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += len(encodes[index].pixels)
    return owners


def _experts_by_sequence(experts: torch.Tensor | None, packed: Iterable[Slice]) -> dict[int, Rows]:
    """Split the rows of a step's packed tokens by sequence, with a single copy to the host."""
    if experts is None:
        return {}
    rows: Rows = experts.cpu().numpy()
    if rows.dtype == np.int16:
        rows = rows.view(np.uint16)
    split, first = {}, 0
    for item in packed:
        last = first + item.end - item.start
        split[item.sequence] = rows[first:last]
        first = last
    return split


def after_failure(error: BaseException, device: torch.device) -> str | None:
    """Make a GPU ready for the next step behind a failed one.

    CUDA keeps some errors for good (an illegal address, a failed assertion, a card that fell off
    the bus): every later call of the process reports them again. Which ones is no list: the device
    is asked. Memory that ran out is given back, since torch keeps freed blocks in sizes that a
    smaller step may not fit into.

    Args:
        error: what the step raised; the frames of its traceback are cleared.
        device: of the model.

    Returns:
        A sentence if no step can follow, else None.
    """
    if device.type != "cuda":
        return None
    # The tensors of the failed step live as long as its frames.
    traceback.clear_frames(error.__traceback__)
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except Exception as problem:
        return f"{device} can compute nothing more: {_first_line(problem)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
