"""Bodies of /v1/files."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from vlm_serve.batch.file_store import StoredFile


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
