"""The routes of files: POST and GET /v1/files, GET and DELETE /v1/files/{id}, its content.

An uploaded form's file goes to disk as it arrives.
"""

from __future__ import annotations

import mimetypes
import re
from functools import partial
from io import FileIO
from operator import attrgetter
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlm_serve.batch.api.served import ServedBatches, owner_of_files
from vlm_serve.batch.file_store import Draft, StoredFile, in_thread
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.parts import FILE_KINDS
from vlm_serve.server.api.shared.listing import page_of
from vlm_serve.server.http.auth import Owner
from vlm_serve.server.http.body import is_packed
from vlm_serve.server.http.browsers import refuse_foreign_scripts
from vlm_serve.server.http.errors import DrainingError, MediaTypeError
from vlm_serve.server.http.multipart import FormPart, FormReader, boundary_of
from vlm_serve.server.http.streaming import sent_until_disconnected

FILES_PATH = "/v1/files"
MAX_LISTED = 10_000
FILE_CONTENT: dict[str, Any] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
}
_PIECE_BYTES = 1 << 18


def _file(served: ServedBatches, request: Request) -> StoredFile:
    owner, file_id = owner_of_files(request), request.path_params["file_id"]
    return served.store_of(owner, file_id).find(owner, file_id, "file_id")


async def list_files(served: ServedBatches, request: Request) -> Response:
    """Return a page of the client's files.

    Raises:
        InvalidRequestError: a parameter is invalid, or there is no store.
    """
    query = request.query_params
    owner = owner_of_files(request)
    files = [file for store in served.stores for file in store.files(owner)]
    files.sort(key=attrgetter("created_at"))
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
    served.store_of(file.owner, file.id).delete(file)
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


class FileBody(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def file_body(file: StoredFile) -> FileBody:
    """Describe a file to its client."""
    return FileBody(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


UPLOAD_PURPOSE = "batch"
MEDIA_PURPOSES = ("vision", "user_data")
_PREFIXES = {kind: prefix for prefix, kind in FILE_KINDS.items()}
MAX_FILENAME = 255
LEAST_SECONDS, MOST_SECONDS = 3600, 2_592_000
UPLOAD_CONTENT: dict[str, Any] = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {
                "purpose": {"type": "string", "enum": [UPLOAD_PURPOSE, *MEDIA_PURPOSES]},
                "file": {"type": "string", "format": "binary"},
                "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                "expires_after[seconds]": {"type": "integer"},
            },
            "required": ["purpose", "file"],
        }
    }
}
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_VALUE = 1024
_FORM_BYTES = 1 << 16
"""Most bytes of a form beside its file; a declared length within them is not yet too large."""
_WRITE_BYTES = 1 << 18
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


async def create_file(served: ServedBatches, request: Request) -> Response:
    """Store a file.

    Raises:
        MediaTypeError: the body is no form.
        InvalidRequestError: the form is malformed or incomplete, or the file does not fit.
        PermissionDeniedError: the page of another website sent it.
        StorageError: the file system refuses it.
    """
    stores, owner = served.stores, owner_of_files(request)
    refuse_foreign_scripts(request.scope, served.service.config)
    if served.service.requests.draining:
        raise DrainingError("the server is shutting down", code="shutting_down")
    is_packed(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise MediaTypeError(
            "the file must be sent with Content-Type: multipart/form-data; boundary=..."
        )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit():
        store = max(stores, key=lambda each: each.max_bytes - each.num_bytes(owner))
        store.check_fits(owner, max(0, int(declared[:19]) - _FORM_BYTES))
    upload = _Upload(served, owner, FormReader(boundary))
    try:
        async for data in request.stream():
            await upload.feed(data)
        return JSONResponse(file_body(await upload.finish()).model_dump())
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before its form was complete") from None
    finally:
        upload.discard()


class _Upload:
    """A form that is being read.

    Args:
        served, owner: of its file.
        reader: splits the form.
    """

    def __init__(self, served: ServedBatches, owner: Owner, reader: FormReader) -> None:
        self._served = served
        self._owner = owner
        self._reader = reader
        self._draft: Draft | None = None
        self._is_medium = False
        self._filename = ""
        self._name = ""
        self._values: dict[str, bytes] = {}
        self._unwritten = bytearray()

    async def feed(self, data: bytes) -> None:
        """Take the form's next bytes; it raises as `create_file` does."""
        for piece in self._reader.feed(data):
            if isinstance(piece, FormPart):
                self._begin(piece)
            elif self._name == "file":
                self._unwritten += piece
                if len(self._unwritten) >= _WRITE_BYTES:
                    await self._write()
            else:
                self._values[self._name] += piece
                if len(self._values[self._name]) > _MAX_VALUE:
                    raise InvalidRequestError(f"{self._name} is too long", param=self._name)

    async def finish(self) -> Any:
        """Return the stored file; it raises as `create_file` does."""
        if not self._reader.ended:
            raise InvalidRequestError("the form is cut off", code="invalid_form")
        purpose = self._purpose
        if purpose not in (UPLOAD_PURPOSE, *MEDIA_PURPOSES):
            raise InvalidRequestError(
                f"purpose must be {UPLOAD_PURPOSE}, or of media {' or '.join(MEDIA_PURPOSES)}",
                param="purpose",
            )
        if (purpose in MEDIA_PURPOSES) is not self._is_medium:
            raise InvalidRequestError("purpose must come before file", param="purpose")
        seconds = self._seconds()
        if self._draft is None:
            raise InvalidRequestError("the form has no file", param="file")
        await self._write()
        return self._draft.finish(self._filename, purpose, seconds)

    @property
    def _purpose(self) -> str:
        return self._values.get("purpose", b"").decode("utf-8", "replace")

    def _draft_of(self, filename: str) -> Draft:
        """Begin the file in the store of its purpose, by which media have a quota of their own."""
        self._is_medium = self._purpose in MEDIA_PURPOSES
        if not self._purpose and self._served.kept is None:
            raise InvalidRequestError("purpose must come before file", param="purpose")
        if not self._is_medium:
            return self._served.store.draft(self._owner)
        if self._served.media is None:
            raise InvalidRequestError(
                "files of media need a server that runs with --media-files", param="purpose"
            )
        form = mimetypes.guess_type(filename)[0] or ""
        kind = "document" if form == "application/pdf" else form.partition("/")[0]
        if kind not in _PREFIXES:
            raise InvalidRequestError(
                "the name of the file must end as that of a picture, a video or a PDF document",
                param="file",
            )
        return self._served.media.draft(self._owner, _PREFIXES[kind])

    def discard(self) -> None:
        """Drop what is not finished."""
        if self._draft is not None:
            self._draft.discard()

    def _begin(self, part: FormPart) -> None:
        self._name = part.name
        if part.name in self._values or (part.name == "file" and self._draft is not None):
            raise InvalidRequestError(f"{part.name} is given twice", param=part.name)
        if part.name == "file":
            self._draft = self._draft_of(part.filename or "")
            self._filename = _shown_name(part.filename or "")
        elif part.name in _FIELDS:
            self._values[part.name] = b""
        else:
            name = part.name[:64]
            raise InvalidRequestError(f"the form has an unknown field {name!r}", param=name)

    async def _write(self) -> None:
        assert self._draft is not None
        data, self._unwritten = bytes(self._unwritten), bytearray()
        if data:
            await self._draft.write(data)

    def _seconds(self) -> int | None:
        """Return the seconds after which the file is deleted; None: it is kept."""
        anchor, text = (self._values.get(name) for name in _FIELDS[1:])
        if anchor is None and text is None:
            return None
        if anchor != b"created_at":
            raise InvalidRequestError(
                "expires_after[anchor] must be created_at", param="expires_after"
            )
        seconds = 0 if text is None or not text.isdigit() else int(text[:9])
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            raise InvalidRequestError(
                f"expires_after[seconds] must be from {LEAST_SECONDS} to {MOST_SECONDS}",
                param="expires_after",
            )
        return seconds


def _shown_name(filename: str) -> str:
    """Return a file's name for lists: without folders and characters that cannot be seen."""
    name = re.split(r"[/\\]", filename)[-1]
    return _HIDDEN.sub("", name)[:MAX_FILENAME] or "file"
