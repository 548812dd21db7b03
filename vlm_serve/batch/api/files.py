"""GET /v1/files, GET and DELETE /v1/files/{id}, GET /v1/files/{id}/content."""

from __future__ import annotations

from functools import partial
from io import FileIO
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_serve.batch.api.file_bodies import FileDeleted, file_body
from vlm_serve.batch.api.served import ServedBatches, owner_of_files
from vlm_serve.batch.file_store import StoredFile
from vlm_serve.batch.settled import in_thread
from vlm_serve.server.api.listing import page_of
from vlm_serve.server.http.streaming import sent_until_disconnected

FILES_PATH = "/v1/files"
MAX_LISTED = 10_000
FILE_CONTENT: dict[str, Any] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
}
_PIECE_BYTES = 1 << 18


def _file(served: ServedBatches, request: Request) -> StoredFile:
    return served.store.find(owner_of_files(request), request.path_params["file_id"], "file_id")


async def list_files(served: ServedBatches, request: Request) -> Response:
    """Return a page of the client's files.

    Raises:
        InvalidRequestError: a parameter is invalid, or there is no store.
    """
    query = request.query_params
    files = served.store.files(owner_of_files(request))
    if "purpose" in query:
        files = [file for file in files if file.purpose == query["purpose"]]
    return page_of(files, query, file_body, default=MAX_LISTED, most=MAX_LISTED)


async def get_file(served: ServedBatches, request: Request) -> Response:
    """Describe a file.

    Raises:
        InvalidRequestError: there is no such file, or no store.
    """
    return JSONResponse(file_body(_file(served, request)).model_dump())


async def delete_file(served: ServedBatches, request: Request) -> Response:
    """Delete a file.

    Raises:
        InvalidRequestError: a batch needs it, there is no such file, or no store.
    """
    file = _file(served, request)
    served.store.delete(file)
    return JSONResponse(FileDeleted(id=file.id).model_dump())


async def get_file_content(served: ServedBatches, request: Request) -> Response:
    """Return the bytes of a file. They stay readable if it is deleted meanwhile.

    Raises:
        InvalidRequestError: there is no such file, or no store.
    """
    return _Content(_file(served, request))


class _Content(Response):
    """Sends a file in pieces. Browsers must not show it, since a client wrote it."""

    media_type = "application/octet-stream"

    def __init__(self, file: StoredFile) -> None:
        super().__init__(
            headers={
                "Content-Disposition": "attachment",
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
            }
        )
        self.headers["content-length"] = str(file.num_bytes)
        self._left = file.num_bytes
        self._file = FileIO(file.path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._send(send, head=bool(scope.get("is_head")))
        try:
            await sent_until_disconnected(work, receive)
        finally:
            self._file.close()

    async def _send(self, send: Send, *, head: bool) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        while self._left and not head:
            piece = await in_thread(partial(self._file.read, _PIECE_BYTES))
            if not piece:
                raise OSError("a stored file became shorter")
            self._left -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
