"""POST and GET /v1/batches, GET /v1/batches/{id}, POST /v1/batches/{id}/cancel."""

from __future__ import annotations

import re
from functools import partial

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vlm_serve.batch.api.batch_bodies import BatchRequest, batch_body
from vlm_serve.batch.api.served import ServedBatches, owner_of_files
from vlm_serve.batch.api.upload import UPLOAD_PURPOSE
from vlm_serve.batch.record import Batch
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.reader import APIS
from vlm_serve.server.api.listing import page_of
from vlm_serve.server.api.request_body import read_json

BATCHES_PATH = "/v1/batches"
ENDPOINTS = tuple(APIS)
"""Routes that a batch may ask: those that answer prompts."""
MAX_WINDOW = 30 * 86_400
DEFAULT_LISTED, MAX_LISTED = 20, 100
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
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW:
        raise InvalidRequestError(
            "completion_window must be a time such as 24h, 90m or 30s, of at most 30d",
            param="completion_window",
        )
    return seconds
