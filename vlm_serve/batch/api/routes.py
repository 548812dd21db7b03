"""The routes of files and batches, as a server mounts them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from vlm_serve.batch.api.batches import (
    BATCHES_PATH,
    BatchBody,
    BatchRequest,
    cancel_batch,
    create_batch,
    get_batch,
    list_batches,
)
from vlm_serve.batch.api.files import (
    FILE_CONTENT,
    FILES_PATH,
    UPLOAD_CONTENT,
    FileBody,
    FileDeleted,
    create_file,
    delete_file,
    get_file,
    get_file_content,
    list_files,
)
from vlm_serve.batch.api.served import ServedBatches
from vlm_serve.server.api.shared.fields import ERRORS
from vlm_serve.server.api.shared.listing import Page
from vlm_serve.server.routes import DescribedApp, add_route

Handler = Callable[[ServedBatches, Request], Awaitable[Response]]


class BatchRoutes(ServedBatches):
    """The files and batches with their routes; see `vlm_serve.server.routes.MountedRoutes`."""

    streamed: tuple[str, ...] = (FILES_PATH,)

    def add_to(self, app: DescribedApp) -> None:
        """Add the routes. Without a store they answer that there is none."""
        described = {"requestBody": {"required": True, "content": UPLOAD_CONTENT}}
        one_file, one_batch = FILES_PATH + "/{file_id}", BATCHES_PATH + "/{batch_id}"
        routes: list[tuple[str, str, Handler, dict[str, Any], dict[str, Any]]] = [
            ("POST", FILES_PATH, create_file, {"model": FileBody}, described),
            ("GET", FILES_PATH, list_files, {"model": Page[FileBody]}, {}),
            ("GET", one_file, get_file, {"model": FileBody}, {}),
            ("DELETE", one_file, delete_file, {"model": FileDeleted}, {}),
            ("GET", f"{one_file}/content", get_file_content, {"content": FILE_CONTENT}, {}),
            ("POST", BATCHES_PATH, create_batch, {"model": BatchBody}, app.body_of(BatchRequest)),
            ("GET", BATCHES_PATH, list_batches, {"model": Page[BatchBody]}, {}),
            ("GET", one_batch, get_batch, {"model": BatchBody}, {}),
            ("POST", f"{one_batch}/cancel", cancel_batch, {"model": BatchBody}, {}),
        ]
        for method, path, handler, answer, settings in routes:
            add_route(
                app,
                self,
                path,
                handler,
                {200: answer, **ERRORS},
                method=method,
                described=settings,
                operation_id=handler.__name__,
            )

    def start(self, app: ASGIApp) -> None:
        """Take the application that answers the requests of batches."""
        if self.kept is not None:
            self.kept.app = app

    def stop(self) -> None:
        """End all batches."""
        if self.kept is not None:
            self.kept.stop()

    async def close(self) -> None:
        """End all batches and delete all files."""
        if self.kept is not None:
            await self.kept.close()
        if self.media is not None:
            await asyncio.to_thread(self.media.close)
