"""Every exception a user can meet, in one small tree.

`status`, `type` and `param` are what the HTTP server puts into `{"error": {...}}`; in Python the
same exceptions are raised as they are. Messages name the offending argument and its bound and never
contain addresses, paths of the server or traces.
"""

from __future__ import annotations


class VlmServeError(Exception):
    """Root of the tree.

    Args:
        message: what is wrong, for the person who sent it.
        param: the request field or option at fault, if one is.
        code: a machine-readable word for the case.
    """

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(VlmServeError, ValueError):
    """The request is malformed or out of bounds: HTTP 400."""

    status = 400
    type = "invalid_request_error"


class FieldError(InvalidRequestError):
    """One field is at fault. Whoever knows it under another name can tell it `under` that one.

    Args:
        place: the field, or a place inside it, such as `structured_outputs.json`.
        problem: what is wrong; the message is both in one sentence.
    """

    def __init__(self, place: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(f"{place} {problem}", param=place.split(".")[0], code=code)
        self.problem = problem

    def under(self, place: str) -> FieldError:
        """The same error about a field of another name."""
        return FieldError(place, self.problem, code=self.code)


class ContextLengthError(InvalidRequestError):
    """The prompt (plus what was asked for) is longer than the model's context: HTTP 400."""


class MediaError(InvalidRequestError):
    """An image or a video that cannot be decoded or is over a limit: HTTP 400."""


class MediaFetchError(InvalidRequestError):
    """A URL or file that could not be fetched: HTTP 422."""

    status = 422


class ConfigError(VlmServeError, ValueError):
    """An engine option is invalid; the message names the option."""

    status = 400
    type = "config_error"


class CheckpointError(VlmServeError):
    """The checkpoint directory is missing something or is of an unsupported kind."""

    type = "checkpoint_error"


class ModelNotFoundError(InvalidRequestError):
    """The server does not serve the model that was named: HTTP 404."""

    status = 404


class OverloadedError(VlmServeError):
    """The queue is full: HTTP 503 with Retry-After."""

    status = 503
    type = "overloaded_error"


class EngineError(VlmServeError):
    """A request made the model's step raise, twice, the second time alone: HTTP 500."""


class EngineClosedError(VlmServeError):
    """The engine has been closed or died; nothing can be submitted any more: HTTP 503."""

    status = 503
    type = "engine_closed_error"


class EvaluationError(VlmServeError):
    """A harness that was to ask questions has failed as a whole."""

    type = "evaluation_error"
