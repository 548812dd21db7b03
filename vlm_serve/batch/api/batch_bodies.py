"""Bodies of /v1/batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vlm_serve.batch.record import Batch, Status

MAX_METADATA = 16
LEAST_SECONDS, MOST_SECONDS = 3600, 2_592_000


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
        for status in (
            "in_progress",
            "finalizing",
            "completed",
            "failed",
            "expired",
            "cancelling",
            "cancelled",
        )
    }
    problems = [
        BatchProblem(code=each.code, line=each.line, message=each.message, param=each.param)
        for each in batch.problems
    ]
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
