"""POST /v1/files: a form's file goes to disk as it arrives."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from vlm_serve.batch.api.file_bodies import file_body
from vlm_serve.batch.api.served import ServedBatches, owner_of_files
from vlm_serve.batch.file_store import Draft, FileStore
from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.errors import DrainingError, MediaTypeError
from vlm_serve.server.http.multipart import FormReader, Part, boundary_of
from vlm_serve.server.http.tenants import Owner, PermissionDeniedError

UPLOAD_PURPOSE = "batch"
MAX_FILENAME = 255
LEAST_SECONDS, MOST_SECONDS = 3600, 2_592_000
UPLOAD_CONTENT: dict[str, Any] = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {
                "purpose": {"type": "string", "enum": [UPLOAD_PURPOSE]},
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
    store, owner = served.store, owner_of_files(request)
    _check_origin(request, served.service.config)
    if served.service.requests.draining:
        raise DrainingError("the server is shutting down", code="shutting_down")
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise MediaTypeError(
            "the file must be sent with Content-Type: multipart/form-data; boundary=..."
        )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit():
        store.check_fits(owner, max(0, int(declared[:19]) - _FORM_BYTES))
    upload = _Upload(store, owner, FormReader(boundary))
    try:
        async for data in request.stream():
            await upload.feed(data)
        return JSONResponse(file_body(await upload.finish()).model_dump())
    except ClientDisconnect:
        raise InvalidRequestError("the client went away before its form was complete") from None
    finally:
        upload.discard()


def _check_origin(request: Request, config: ServerConfig) -> None:
    """Refuse forms of other websites: browsers send them without asking the server first."""
    origin = request.headers.get("origin")
    allowed = config.allowed_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    try:
        sender = urlsplit(origin).netloc
    except ValueError:
        sender = ""
    if not sender or sender != request.headers.get("host"):
        raise PermissionDeniedError(
            "pages of other websites may not upload files; --allowed-origins names exceptions",
            code="origin_not_allowed",
        )


class _Upload:
    """A form that is being read.

    Args:
        store, owner: of its file.
        reader: splits the form.
    """

    def __init__(self, store: FileStore, owner: Owner, reader: FormReader) -> None:
        self._store = store
        self._owner = owner
        self._reader = reader
        self._draft: Draft | None = None
        self._filename = ""
        self._name = ""
        self._values: dict[str, bytes] = {}
        self._unwritten = bytearray()

    async def feed(self, data: bytes) -> None:
        """Take the form's next bytes; it raises as `create_file` does."""
        for each in self._reader.feed(data):
            if isinstance(each, Part):
                self._begin(each)
            elif self._name == "file":
                self._unwritten += each
                if len(self._unwritten) >= _WRITE_BYTES:
                    await self._write()
            else:
                self._values[self._name] += each
                if len(self._values[self._name]) > _MAX_VALUE:
                    raise InvalidRequestError(f"{self._name} is too long", param=self._name)

    async def finish(self) -> Any:
        """Return the stored file; it raises as `create_file` does."""
        if not self._reader.ended:
            raise InvalidRequestError("the form is cut off", code="invalid_form")
        purpose = self._values.get("purpose", b"").decode("utf-8", "replace")
        if purpose != UPLOAD_PURPOSE:
            raise InvalidRequestError(
                f"purpose must be {UPLOAD_PURPOSE}: this server keeps files for batches only",
                param="purpose",
            )
        seconds = self._seconds()
        if self._draft is None:
            raise InvalidRequestError("the form has no file", param="file")
        await self._write()
        return self._draft.finish(self._filename, purpose, seconds)

    def discard(self) -> None:
        """Drop what is not finished."""
        if self._draft is not None:
            self._draft.discard()

    def _begin(self, part: Part) -> None:
        self._name = part.name
        if part.name in self._values or (part.name == "file" and self._draft is not None):
            raise InvalidRequestError(f"{part.name} is given twice", param=part.name)
        if part.name == "file":
            self._draft = self._store.draft(self._owner)
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
