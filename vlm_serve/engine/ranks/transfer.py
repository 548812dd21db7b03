"""Copies the KV blocks and state rows of all ranks to host bytes and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlm_serve.cache.tiers.entry import Entry, Kind
from vlm_serve.cache.tiers.transfer import Transfer
from vlm_serve.engine.executor import ExecutorLostError
from vlm_serve.engine.ranks.process import RankProcesses
from vlm_serve.engine.ranks.wire import ConnectionLostError, ReplyTimeoutError

Staged = tuple[Any, list[Entry]]


class RanksTransfer:
    """A transfer over all ranks, see `cache.tiers.transfer`. An entry holds every rank's part,
    concatenated.

    Args:
        own: transfer of the first rank.
        processes: the other ranks.
        limit: timeout of a reply, in seconds.
    """

    def __init__(self, own: Transfer, processes: RankProcesses, limit: float) -> None:
        self._own, self._limit = own, limit
        self._processes = processes
        self._size = 1 + sum(1 for _ in processes)

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        others = self._read("read_kv", block, num_tokens)
        return b"".join([self._own.read_kv(block, num_tokens), *others])

    def read_state(self, row: int) -> bytes:
        return b"".join([self._own.read_state(row), *self._read("read_state", row)])

    def layout(self, kind: Kind, num_tokens: int) -> str:
        return f"{self._size} ranks: {self._own.layout(kind, num_tokens)}"

    def num_bytes(self, kind: Kind, num_tokens: int) -> int | None:
        own = self._own.num_bytes(kind, num_tokens)
        return None if own is None else own * self._size

    def stage(self, entry: Entry) -> Staged | None:
        if entry.layout != self.layout(entry.id.kind, entry.num_tokens):
            return None
        own, payload = self._own.layout(entry.id.kind, entry.num_tokens), entry.payload
        share, rest = divmod(len(payload), self._size)
        if rest:
            return None
        first, *others = (
            replace(entry, layout=own, payload=payload[rank * share : (rank + 1) * share])
            for rank in range(self._size)
        )
        staged = self._own.stage(first)
        return None if staged is None else (staged, others)

    def write_kv(self, block: int, staged: Staged) -> None:
        self._own.write_kv(block, staged[0])
        self._write("write_kv", block, staged[1])

    def write_state(self, row: int, staged: Staged) -> None:
        self._own.write_state(row, staged[0])
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
