"""All exceptions of the public API, in one small tree.

The HTTP server puts `type` and `param` into `{"error": {...}}` and answers with `status`; in Python
the exceptions are raised unchanged. Messages name the offending argument and its bound. They never
contain addresses, paths of the server or tracebacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class VlmServeError(Exception):
    """Root of the tree.

    Args:
        message: the problem, addressed to the sender.
        param: the request field or option at fault, if any.
        code: machine-readable code of the case.
    """

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have other arguments, with which pickle would call them.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[VlmServeError], arguments: tuple[Any, ...], state: Mapping[str, Any]
) -> VlmServeError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class InvalidRequestError(VlmServeError, ValueError):
    """The request is malformed or out of bounds: HTTP 400."""

    status = 400
    type = "invalid_request_error"


class FieldError(InvalidRequestError):
    """One field of a request is invalid. `under` renames it, for an API with another name for it.

    Args:
        place: the field, or a place inside it, such as `structured_outputs.json`.
        problem: continues the sentence that begins with the field.
    """

    def __init__(self, place: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(f"{place} {problem}", param=place.split(".")[0], code=code)
        self.problem = problem

    def under(self, place: str) -> FieldError:
        """Return the same error about a field of another name."""
        return FieldError(place, self.problem, code=self.code)


class UnsupportedFieldError(InvalidRequestError):
    """A known field that would change the answer is not implemented."""


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens exceed the model's context: HTTP 400."""

    prompt = ""
    room = 0

    @classmethod
    def beyond(cls, context: int, prompt: str, need: str, param: str) -> ContextLengthError:
        """Return the error in the words by which clients recognise it.

        Args:
            context: tokens of the model's context.
            prompt: the prompt's tokens in words, such as "70000".
            need: what the request needs, as the second half of the sentence.
            param: the request's field that is too long.
        """
        message = f"this model's maximum context length is {context} tokens, but {need}"
        error = cls(message, param=param, code="context_length_exceeded")
        error.prompt, error.room = prompt, context - 1
        return error


class MediaError(InvalidRequestError):
    """An image or a video cannot be decoded or exceeds a limit: HTTP 400."""


class MediaFetchError(InvalidRequestError):
    """A URL or file could not be fetched: HTTP 422."""

    status = 422


class MediaNotHeldError(InvalidRequestError):
    """A request names a medium that the server does not have, or no longer: HTTP 409, or 404 for a
    file."""

    status = 409

    def __init__(self, name: object, param: str | None = None, status: int = 409) -> None:
        super().__init__(
            f"there is no medium {str(name)[:160]!r}, or no longer: send it again",
            param=param,
            code="file_not_found" if status == 404 else "media_not_held",
        )
        self.status = status


class ConfigError(VlmServeError, ValueError):
    """An engine option is invalid; the message names the option."""

    status = 400
    type = "config_error"


class CheckpointError(VlmServeError):
    """The checkpoint directory is incomplete or its kind is not supported."""

    type = "checkpoint_error"


class ModelNotFoundError(InvalidRequestError):
    """The server does not serve the named model: HTTP 404."""

    status = 404


class OverloadedError(VlmServeError):
    """The queue is full: HTTP 503 with Retry-After."""

    status = 503
    type = "overloaded_error"


class EngineError(VlmServeError):
    """The model's step failed twice, the second time with this request alone: HTTP 500."""


class NotANumberError(EngineError):
    """The model has computed NaN or infinity where numbers are sampled or returned: HTTP 500."""

    @classmethod
    def of(cls, what: str) -> NotANumberError:
        """Return the error about the model, or an adapter by its name."""
        return cls(
            f"{what} has computed what is no finite number: its weights are damaged, or too large "
            "for its type",
            code="not_a_number",
        )


class EngineClosedError(VlmServeError):
    """The engine was closed or died and accepts no more requests: HTTP 503."""

    status = 503
    type = "engine_closed_error"


class FailedItemsError(InvalidRequestError):
    """Some prompts of a Python call with many have failed, and the others have results. Nearly all
    failures are those of invalid input, so who catches that catches this.

    Args:
        outputs: results in the order of the prompts; None for a prompt that failed.
        errors: exception of each such prompt by its index; not empty.
    """

    type = "failed_items_error"

    def __init__(self, outputs: Sequence[Any], errors: Mapping[int, Exception]) -> None:
        first = min(errors)
        others = len(outputs) - len(errors)
        super().__init__(
            f"{len(errors)} of {len(outputs)} prompts failed, at first that of index {first}: "
            f"{errors[first]} ({others} have results, in `outputs` of this error; "
            'errors="return" returns them with the errors)'
        )
        self.outputs = list(outputs)
        self.errors = dict(errors)


class EvaluationError(VlmServeError):
    """An evaluation harness failed as a whole."""

    type = "evaluation_error"
