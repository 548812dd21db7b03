"""The files and batches of one server."""

from __future__ import annotations

import asyncio

from fastapi import Request

from vlm_serve.batch.batches import Batches
from vlm_serve.batch.file_store import FileStore
from vlm_serve.batch.run import Surroundings
from vlm_serve.server.http.auth import Owner, owner_of
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.server.service import Service

BATCH_SHARE = 0.75
"""Largest part of the places and prompt tokens of a step's sequences that batches may take."""


class ServedBatches:
    """A server's files and batches; without the option `batch_store` it has none.

    Args:
        service: the server.

    Attributes:
        kept: the files and batches; None: the server has none.

    Raises:
        ConfigError: there is no usable folder for files.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        size = service.config.batch_store
        assert not isinstance(size, str)
        self.kept = None if size is None else Batches(_surroundings(service, size))

    @property
    def batches(self) -> Batches:
        """The files and batches.

        Raises:
            NotFoundError: the server has none.
        """
        if self.kept is None:
            raise NotFoundError(
                "files and batches need a server that runs with --batch-store",
                code="no_batch_store",
            )
        return self.kept

    @property
    def store(self) -> FileStore:
        """The files; it raises as `batches` does."""
        return self.batches.store


def _surroundings(service: Service, size: int) -> Surroundings:
    admission, config = service.admission, service.config
    width = max(1, int(BATCH_SHARE * service.engine.config.max_num_seqs))
    return Surroundings(
        FileStore(size),
        admission.memory,
        service.workers.parse,
        lambda: admission.open_tokens < BATCH_SHARE * config.max_queued_tokens,
        width,
        config.max_body_bytes,
        asyncio.Lock(),
        asyncio.Semaphore(width),
    )


def owner_of_files(request: Request) -> Owner:
    """Return the owner of the files and batches of a request: its API key."""
    return owner_of(request.scope, None)
