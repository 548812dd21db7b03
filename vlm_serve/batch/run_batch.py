"""`vlm-serve run-batch`: answers OpenAI batch files with the server's own routes."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vlm_serve.batch.asgi import Reply
from vlm_serve.batch.journal import Journal, Row, partial_of, replace_file
from vlm_serve.batch.order import ReuseKey, reuse_key_of
from vlm_serve.batch.progress import Progress, verdict
from vlm_serve.batch.runner import BatchJob, reply_json, run_jobs, usage_of
from vlm_serve.config import EngineConfig
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.server.config import ServerConfig

_PATH = re.compile(r"/[A-Za-z0-9_./-]{1,127}", re.ASCII)
MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input.

    Attributes:
        id: of its output line; a digest of the line's number and bytes, so a later run recognises
            answered lines, and changed lines are new.
        offset, size: position of its bytes in the file.
        path: the route; empty for an invalid line.
        problem: the error of an invalid line, else None.
    """

    id: str
    number: int
    offset: int
    size: int
    custom_id: str | None
    path: str
    reuse_key: ReuseKey
    problem: InvalidRequestError | None


def read_lines(path: Path, max_bytes: int) -> list[Line]:
    """Read the input's lines, keeping in memory only what their order needs.

    Raises ConfigError for a file that cannot be read and for a `custom_id` that appears twice.
    """
    lines: list[Line] = []
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    line = _line(raw, number, offset, max_bytes)
                    if line.custom_id is not None:
                        first = seen.setdefault(line.custom_id, number)
                        if first != number:
                            raise ConfigError(
                                f"{path}: lines {first} and {number} have the same custom_id "
                                f"{line.custom_id[:128]!r}",
                                param="input",
                            )
                    lines.append(line)
                offset += len(raw)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="input") from None
    return lines


def _line(raw: bytes, number: int, offset: int, max_bytes: int) -> Line:
    raw = raw.rstrip(b"\r\n")
    digest = hashlib.blake2b(str(number).encode() + b":" + raw, digest_size=12)
    name = f"batch_req_{digest.hexdigest()}"
    custom_id: str | None = None
    path, reuse_key, problem = "", ReuseKey(), None
    try:
        if len(raw) > max_bytes:
            raise InvalidRequestError(
                f"the line is larger than {max_bytes} bytes", code="body_too_large"
            )
        value = _parsed(raw)
        given = value.get("custom_id")
        if not isinstance(given, str) or not 0 < len(given) <= MAX_CUSTOM_ID:
            raise InvalidRequestError(
                f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", param="custom_id"
            )
        custom_id = given
        path = _checked_path(value)
        reuse_key = reuse_key_of(path, value["body"])
    except InvalidRequestError as error:
        problem = error
    return Line(name, number, offset, len(raw), custom_id, path, reuse_key, problem)


def _parsed(raw: bytes) -> dict[str, Any]:
    from vlm_serve.server.http.json_body import parse_json

    value = parse_json(raw)
    if not isinstance(value, dict):
        raise InvalidRequestError("the line must be a JSON object", code="invalid_json")
    return value


def _checked_path(value: dict[str, Any]) -> str:
    """Return the line's route. Raises InvalidRequestError for a bad field."""
    if value.get("method") != "POST":
        raise InvalidRequestError('method must be "POST"', param="method")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or not _PATH.fullmatch(url):
        raise InvalidRequestError("url must be a route such as /v1/chat/completions", param="url")
    if not isinstance(body, dict):
        raise InvalidRequestError("body must be a JSON object", param="body")
    if body.get("stream"):
        raise InvalidRequestError(
            "streaming is not supported in a batch; remove stream", param="stream"
        )
    return url


def _body(path: Path, line: Line) -> bytes:
    """Read the bytes of a line's `body` again."""
    with path.open("rb") as file:
        file.seek(line.offset)
        value = json.loads(file.read(line.size))
    return json.dumps(value["body"], ensure_ascii=False).encode()


def _row(line: Line, reply: Reply) -> Row:
    request_id = reply.headers.get("x-request-id", "")
    response = {
        "status_code": reply.status,
        "request_id": request_id,
        "body": reply_json(reply),
    }
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def _bad_row(line: Line, problem: InvalidRequestError) -> Row:
    error = {
        "code": problem.code or "invalid_request",
        "message": f"line {line.number}: {problem.message}",
        "param": problem.param,
    }
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def run(
    source: Path,
    output: Path,
    model: str,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    in_order: bool = False,
    concurrency: int | None = None,
) -> int:
    """Answer every line of `source` without a line in `output`.

    Args:
        in_order: write the output in the input's order at the end, from `OUTPUT.partial`.
            Otherwise each line is appended as it is answered.
        concurrency: most open requests.

    Returns the exit status: 0, or SOME_FAILED if any line failed, now or in an earlier run over the
    same files. Failures are printed.

    Raises:
        ConfigError: the input has duplicates, the output belongs to another input, or a file cannot
            be opened.
        CheckpointError, EngineClosedError: see `run_jobs`.
    """
    if source.exists() and output.exists() and source.samefile(output):
        raise ConfigError("input and output are the same file", param="output")
    lines = read_lines(source, server_config.max_body_bytes)
    with Journal(_seeded(output) if in_order else output) as journal:
        foreign = len(journal.done - {line.id for line in lines})
        if foreign:
            raise ConfigError(
                f"{output}: {foreign} of its lines answer no line of {source}; "
                "give another output file or remove it",
                param="output",
            )
        failures = {
            row["id"]: complaint for row in journal.rows() if (complaint := _complaint(row))
        }
        progress = Progress(len(lines), len(journal.done), len(failures))
        left = {line.id: line for line in lines if line.id not in journal.done}
        for line in left.values():
            if line.problem is not None:
                row = _bad_row(line, line.problem)
                journal.append(row)
                failures[line.id] = _complaint(row)
                progress.add(failed=True, prompt_tokens=0, cached_tokens=0)

        def on_reply(job: BatchJob, reply: Reply) -> None:
            row = _row(left[job.id], reply)
            journal.append(row)
            if complaint := _complaint(row):
                failures[job.id] = complaint
            prompt, cached = usage_of(row["response"]["body"])
            progress.add(failed=reply.status >= 400, prompt_tokens=prompt, cached_tokens=cached)

        jobs = [
            BatchJob(line.id, line.path, partial(_body, source, line), line.reuse_key)
            for line in left.values()
            if line.problem is None
        ]
        try:
            run_jobs(model, engine_config, server_config, jobs, on_reply, concurrency)
        finally:
            progress.close()
        if in_order:
            replace_file(output, _encoded(journal, [line.id for line in lines]))
            journal.path.unlink()
    print(f"{len(lines)} lines in {output}", file=sys.stderr)
    named = [_name(line) + ": " + failures[line.id] for line in lines if line.id in failures]
    return verdict(named, output)


def _complaint(row: Row) -> str:
    """Return a row's error; empty for an answer."""
    if row["error"] is not None:
        return str(row["error"]["message"]).partition(": ")[2]
    status, body = row["response"]["status_code"], row["response"]["body"]
    if status < 400:
        return ""
    error = body.get("error") if isinstance(body, dict) else None
    return f"{status} {error.get('message') if isinstance(error, dict) else ''}".strip()


def _name(line: Line) -> str:
    named = "" if line.custom_id is None else f" ({line.custom_id[:128]})"
    return f"line {line.number}{named}"


def _seeded(output: Path) -> Path:
    """Return the partial file of an output, restored from the output if it is missing."""
    path = partial_of(output)
    if output.exists() and not path.exists():
        with Journal(output) as earlier:
            replace_file(path, _encoded(earlier, None))
    return path


def _encoded(journal: Journal, ids: list[str] | None) -> Iterator[bytes]:
    for row in journal.rows(ids):
        yield json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
