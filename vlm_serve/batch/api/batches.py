"""POST and GET /v1/batches, GET /v1/batches/{id}, POST /v1/batches/{id}/cancel."""

from __future__ import annotations

import re
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, get_args

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from vlm_serve.batch.api.files import LEAST_SECONDS, MOST_SECONDS, UPLOAD_PURPOSE
from vlm_serve.batch.api.served import ServedBatches, owner_of_files
from vlm_serve.batch.record import Batch, Status
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.reader import APIS
from vlm_serve.server.api.shared.listing import page_of
from vlm_serve.server.api.shared.request_body import read_json

BATCHES_PATH = "/v1/batches"
ENDPOINTS = tuple(APIS)
"""Routes that a batch may ask: those that answer prompts."""
MAX_WINDOW = 30 * 86_400
DEFAULT_LISTED, MAX_LISTED = 20, 100
MAX_METADATA = 16
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])", re.ASCII)


async def create_batch(served: ServedBatches, request: Request) -> Response:
    """Begin a batch.

    Raises:
        InvalidRequestError: a field is invalid, or there is no store.
        DrainingError: the server is shutting down.
        TooManyBatchesError: too many batches of this key have not ended.
    """
    batches, owner = served.batches, owner_of_files(request)
    body = await read_json(served.service, request, BatchRequest)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequestError(
            "endpoint must be one of " + ", ".join(ENDPOINTS), param="endpoint"
        )
    seconds = _seconds(body.completion_window)
    file = batches.store.find(owner, body.input_file_id, "input_file_id")
    if file.purpose != UPLOAD_PURPOSE:
        raise InvalidRequestError(
            f"the file's purpose is {file.purpose}; a batch needs one with the purpose "
            f"{UPLOAD_PURPOSE}",
            param="input_file_id",
        )
    expiry = body.output_expires_after
    batch = batches.create(
        owner,
        file,
        body.endpoint,
        body.completion_window,
        seconds,
        body.metadata,
        None if expiry is None else expiry.seconds,
    )
    return _answer(served, batch)


async def list_batches(served: ServedBatches, request: Request) -> Response:
    """Return a page of the client's batches, the newest first.

    Raises:
        InvalidRequestError: a parameter is invalid, or there is no store.
    """
    batches = served.batches.batches(owner_of_files(request))
    body_of = partial(batch_body, model=served.service.state.model_names[0])
    query = request.query_params
    return page_of(batches, query, body_of, default=DEFAULT_LISTED, most=MAX_LISTED)


async def get_batch(served: ServedBatches, request: Request) -> Response:
    """Describe a batch.

    Raises:
        InvalidRequestError: there is no such batch, or no store.
    """
    return _answer(served, _batch(served, request))


async def cancel_batch(served: ServedBatches, request: Request) -> Response:
    """Cancel a batch.

    Raises:
        InvalidRequestError: it has ended, there is no such batch, or no store.
    """
    batch = _batch(served, request)
    served.batches.cancel(batch)
    return _answer(served, batch)


def _batch(served: ServedBatches, request: Request) -> Batch:
    return served.batches.find(owner_of_files(request), request.path_params["batch_id"])


def _answer(served: ServedBatches, batch: Batch) -> Response:
    return JSONResponse(batch_body(batch, served.service.state.model_names[0]).model_dump())


def _seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW:
        raise InvalidRequestError(
            "completion_window must be a time such as 24h, 90m or 30s, of at most 30d",
            param="completion_window",
        )
    return seconds


class OutputExpiry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_SECONDS, le=MOST_SECONDS)


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(BaseModel):
    """Body of a request for a batch. An unknown field is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = (
        None
    )
    output_expires_after: OutputExpiry | None = None


class BatchProblem(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchProblems(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchProblem]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchBody(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


def batch_body(batch: Batch, model: str) -> BatchBody:
    """Describe a batch to its client.

    Args:
        model: the server's name of its model.
    """
    times: dict[str, Any] = {
        f"{status}_at": batch.times.get(status)
        for status in get_args(Status)
        if status != "validating"
    }
    problems = [BatchProblem(**asdict(problem)) for problem in batch.problems]
    usage = batch.usage
    return BatchBody(
        id=batch.id,
        endpoint=batch.endpoint,
        model=model,
        errors=BatchProblems(data=problems) if problems else None,
        input_file_id=batch.input.id,
        completion_window=batch.window,
        status=batch.status,
        output_file_id=batch.output_id,
        error_file_id=batch.error_id,
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        request_counts=RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        usage=BatchUsage(
            input_tokens=usage.prompt,
            input_tokens_details=InputDetails(cached_tokens=usage.cached),
            output_tokens=usage.generated,
            output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning),
            total_tokens=usage.prompt + usage.generated,
        ),
        metadata=batch.metadata,
        **times,
    )
