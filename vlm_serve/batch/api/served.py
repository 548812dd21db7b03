"""The files and batches of one server."""

from __future__ import annotations

import asyncio

from fastapi import Request

from vlm_serve.batch.batches import Batches
from vlm_serve.batch.file_store import FileStore
from vlm_serve.batch.run import Surroundings
from vlm_serve.preprocess.reading.conversation import StoredUpload
from vlm_serve.server.http.auth import Owner, owner_of
from vlm_serve.server.http.errors import NotFoundError
from vlm_serve.server.service import Service

BATCH_SHARE = 0.75
"""Largest part of the places and prompt tokens of a step's sequences that batches may take."""


class ServedBatches:
    """A server's files and batches; without the options `batch_store` and `media_files` it has
    none.

    Args:
        service: the server.

    Attributes:
        kept: the batches and their files; None: the server has none.
        media: files of pictures, videos and documents; None: the server keeps none.

    Raises:
        ConfigError: there is no usable folder for files.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        size = service.config.batch_store
        assert not isinstance(size, str)
        self.kept = None if size is None else Batches(_surroundings(service, size))
        space = service.config.media_files
        assert not isinstance(space, str)
        self.media = None if space is None else FileStore(space, "--media-files")
        service.state.stored_media = self._medium

    def _medium(self, owner: Owner, file_id: str) -> StoredUpload | None:
        """See `StoredMedia`."""
        file = None if self.media is None else self.media.get(owner, file_id)
        return None if file is None else StoredUpload(file.path, file.num_bytes)

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
        """The files of batches; it raises as `batches` does."""
        return self.batches.store

    @property
    def stores(self) -> list[FileStore]:
        """Return the stores of all files; raise as `batches` does if there is none."""
        media = [] if self.media is None else [self.media]
        return media if media and self.kept is None else [self.store, *media]

    def store_of(self, owner: Owner, file_id: str) -> FileStore:
        """Return the store that has a file; one without it if none has."""
        stores = self.stores
        return next((each for each in stores if each.get(owner, file_id)), stores[0])


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
