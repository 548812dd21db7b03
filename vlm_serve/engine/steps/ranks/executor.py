"""Executor over several ranks: runs the first rank's part here and the others in their
processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from vlm_serve.cache.tiers.entry import Entry, Kind, here
from vlm_serve.cache.tiers.transfer import Transfer
from vlm_serve.engine.core.executor import ExecutorLostError, StepError
from vlm_serve.engine.requests.plan import SequenceInfo, StepOutput, StepPlan
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.engine.steps.ranks.task import Pools
from vlm_serve.kernels.native_library import RanksApartError
from vlm_serve.kernels.ranks import SharedRanks
from vlm_serve.models import Model
from vlm_serve.models.adapters import Adapter, to_send
from vlm_serve.models.cache_layout import CacheTensors
from vlm_serve.system.wire import ConnectionLostError, ReplyTimeoutError

Staged = tuple[Any, list[Entry]]
_T = TypeVar("_T")
_GRACE_SECONDS = 1.0
"""Time for ranks to report why they have left a step."""


class RanksTransfer:
    """A transfer over all ranks, see `cache.tiers.transfer`. An entry holds every rank's part,
    concatenated.

    Args:
        own: transfer of the first rank.
        processes: the other ranks.
        limit: timeout of a reply, in seconds.
    """

    def __init__(self, local: Transfer, processes: RankProcesses, limit: float) -> None:
        self._local, self._limit = local, limit
        self._processes = processes
        self._size = 1 + sum(1 for _ in processes)

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        others = self._read("read_kv", block, num_tokens)
        return b"".join([here(self._local.read_kv(block, num_tokens)), *others])

    def read_state(self, row: int) -> bytes:
        others = self._read("read_state", row)
        return b"".join([here(self._local.read_state(row)), *others])

    def layout(self, kind: Kind, num_tokens: int) -> str:
        return f"{self._size} ranks: {self._local.layout(kind, num_tokens)}"

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        share = self._local.num_bytes(kind, num_tokens)
        return None if share is None else share * self._size

    def stage(self, entry: Entry) -> Staged | None:
        if entry.layout != self.layout(entry.id.kind, entry.num_tokens):
            return None
        layout, payload = self._local.layout(entry.id.kind, entry.num_tokens), entry.payload
        share, rest = divmod(len(payload), self._size)
        if rest:
            return None
        first, *others = (
            replace(entry, layout=layout, source=payload[rank * share : (rank + 1) * share])
            for rank in range(self._size)
        )
        staged = self._local.stage(first)
        return None if staged is None else (staged, others)

    def write_kv(self, block: int, staged: Staged) -> None:
        self._local.write_kv(block, staged[0])
        self._write("write_kv", block, staged[1])

    def write_state(self, row: int, staged: Staged) -> None:
        self._local.write_state(row, staged[0])
        self._write("write_state", row, staged[1])

    def _write(self, name: str, place: int, entries: list[Entry]) -> None:
        try:
            for process, entry in zip(self._processes, entries, strict=True):
                process.send(name, place, entry)
            self._processes.receive(self._limit)
        except ConnectionLostError as error:
            raise _lost(error) from None

    def _read(self, name: str, *arguments: object) -> list[bytes]:
        try:
            return self._processes.ask(name, *arguments, seconds=self._limit)
        except ConnectionLostError as error:
            raise _lost(error) from None


def _lost(error: ConnectionLostError) -> ExecutorLostError:
    silent = isinstance(error, ReplyTimeoutError)
    return ExecutorLostError(f"{error} does not answer" if silent else str(error))


class ShardedExecutor(LocalExecutor):
    """An `Executor` over all ranks. Plans go to every rank; only the first one samples tokens.

    Args:
        model, caches: model and pools of the first rank.
        pools: sizes of the pools of every rank.
        processes: the other ranks, with their part of the model loaded.
        limit: seconds that ranks wait for each other.
        owned: if True, closing the executor ends the processes.
    """

    def __init__(
        self,
        model: Model,
        caches: CacheTensors,
        pools: Pools,
        processes: RankProcesses,
        *,
        limit: float,
        owned: bool = True,
    ) -> None:
        super().__init__(
            model, caches, block_size=pools.block_size, deterministic=pools.deterministic
        )
        self.pages = RanksTransfer(self.pages, processes, limit)
        self._processes = processes
        self._limit = limit
        self._owned = owned
        self._numbers = itertools.count(1)
        self._ended = ""
        self._report_loss: Callable[[ExecutorLostError], None] = lambda error: None
        processes.watch(self._lost)
        processes.ask("pools", pools)

    def watch(self, lost: Callable[[ExecutorLostError], None]) -> None:
        self._report_loss = lost
        if self._ended:
            lost(ExecutorLostError(self._ended))

    def register(self, info: SequenceInfo) -> None:
        super().register(info)
        with suppress(ConnectionLostError):  # the next step reports it
            self._processes.send("register", info)

    def forget(self, sequence: int) -> None:
        super().forget(sequence)
        with suppress(ConnectionLostError):
            self._processes.send("forget", sequence)

    def hold_adapter(self, slot: int, adapter: Adapter | None) -> None:
        super().hold_adapter(slot, adapter)
        modules = None if adapter is None else to_send(adapter.modules)
        with suppress(ConnectionLostError):
            self._processes.send("adapter", slot, modules)

    def run(self, plan: StepPlan) -> StepOutput:
        """Run a step, see `Executor.run`. After a failed step, the content of state rows differs
        between ranks, so it is always "unknown"."""
        run = super().run

        def local_part() -> StepOutput:
            try:
                return run(plan)
            except StepError as error:
                raise error.cause from None

        try:
            return self._run_on_all_ranks(local_part, "run", plan)
        except ExecutorLostError:
            raise
        except Exception as error:
            raise StepError(error, "unknown") from error

    def measure(
        self, *, most_sequences: int, most_tokens: int
    ) -> tuple[list[tuple[int, float]], float]:
        measure = super().measure
        return self._run_on_all_ranks(
            lambda: measure(most_sequences=most_sequences, most_tokens=most_tokens),
            "measure",
            most_sequences,
            most_tokens,
        )

    def poison_freed(self, blocks: Iterable[int], rows: Iterable[int]) -> None:
        blocks, rows = tuple(blocks), tuple(rows)
        super().poison_freed(blocks, rows)
        with suppress(ConnectionLostError):
            self._processes.send("poison", blocks, rows)

    def close(self) -> None:
        super().close()
        if self._owned:
            self._processes.close()
        else:
            self._processes.watch(lambda sentence: None)
            self._processes.ask("unload")
        self._model.ranks.close()

    def _run_on_all_ranks(self, local_part: Callable[[], _T], name: str, *arguments: object) -> _T:
        """Run this rank's part of a step while the others run theirs. Raise ExecutorLostError if
        it fails and the ranks cannot begin another one."""
        try:
            return self._run_together(local_part, name, *arguments)
        except ExecutorLostError:
            raise
        except Exception as error:
            if self._model.ranks.begins_again:
                raise
            raise ExecutorLostError(
                f"a step failed, and ranks without shared memory cannot begin again: {error}"
            ) from error

    def _run_together(self, local_part: Callable[[], _T], name: str, *arguments: object) -> _T:
        ranks, number = self._model.ranks, next(self._numbers)
        try:
            self._processes.send(name, number, *arguments)
            ranks.begin(number)
            result, problem = None, None
            try:
                result = local_part()
            except RanksApartError as error:
                problem = error
            except BaseException:
                ranks.abort()
                # Others may wait for this rank inside a collective that it has left.
                if ranks.begins_again:
                    self._processes.receive(self._limit)
                raise
            self._processes.receive(self._limit if problem is None else _GRACE_SECONDS)
        except ReplyTimeoutError as error:
            silent = f"{error} has not answered for {self._limit:g} s"
            raise ExecutorLostError(self._ended or silent) from None
        except ConnectionLostError as error:
            raise ExecutorLostError(str(error)) from None
        if problem is not None:
            raise problem
        return cast(_T, result)

    def _lost(self, sentence: str) -> None:
        """Handle the loss of a rank, on the watcher's thread: wake this rank if it waits for the
        lost one."""
        self._ended = sentence
        if isinstance(self._model.ranks, SharedRanks):
            self._model.ranks.end()
        self._report_loss(ExecutorLostError(sentence))
