"""`vlm-serve run-batch`: answers OpenAI batch files with the server's own routes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vlm_serve.batch.asgi import HttpReply, usage_of
from vlm_serve.batch.journal import Journal, Row, encode_row, partial_of, replace_file
from vlm_serve.batch.lines import (
    Line,
    answer_row,
    error_row,
    line_of,
    raw_lines,
    read_request,
)
from vlm_serve.batch.progress import Progress, verdict
from vlm_serve.batch.runner import BatchJob, run_jobs
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig


def read_lines(path: Path, max_bytes: int) -> list[Line]:
    """Read the input's lines, keeping in memory only what their order needs.

    Raises ConfigError for a file that cannot be read and for a `custom_id` that appears twice.
    """
    lines: list[Line] = []
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for raw in raw_lines(file, max_bytes):
                line = line_of(raw, max_bytes)
                if line.custom_id is not None:
                    first = seen.setdefault(line.custom_id, line.number)
                    if first != line.number:
                        raise ConfigError(
                            f"{path}: lines {first} and {line.number} have the same custom_id "
                            f"{line.custom_id[:128]!r}",
                            param="input",
                        )
                lines.append(line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="input") from None
    return lines


def _row(line: Line, reply: HttpReply) -> Row:
    request_id = reply.headers.get("x-request-id", "")
    return answer_row(line.id, line.custom_id, request_id, reply)


def _bad_row(line: Line, problem: InvalidRequestError) -> Row:
    code, message = problem.code or "invalid_request", f"line {line.number}: {problem.message}"
    return error_row(line.id, line.custom_id, code, message, problem.param)


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
    with Journal(partial_of(output, _earlier_rows) if in_order else output) as journal:
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

        def on_reply(job: BatchJob, reply: HttpReply) -> None:
            row = _row(left[job.id], reply)
            journal.append(row)
            if complaint := _complaint(row):
                failures[job.id] = complaint
            usage = usage_of(row["response"]["body"])
            progress.add(
                failed=reply.status >= 400, prompt_tokens=usage.prompt, cached_tokens=usage.cached
            )

        jobs = [
            BatchJob(
                line.id,
                line.path,
                partial(read_request, source, line.offset, line.size),
                line.reuse_key,
            )
            for line in left.values()
            if line.problem is None
        ]
        try:
            run_jobs(model, engine_config, server_config, jobs, on_reply, concurrency)
        finally:
            progress.close()
        if in_order:
            replace_file(output, map(encode_row, journal.rows([line.id for line in lines])))
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


def _earlier_rows(output: Path) -> Iterator[Row]:
    with Journal(output) as earlier:
        yield from earlier.rows()
