"""`vlm-serve video-qa`: answers questions about many videos with the server's own routes."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_serve.batch.asgi import HttpReply, reply_json, usage_of
from vlm_serve.batch.journal import Journal, Row, partial_of, replace_file
from vlm_serve.batch.order import reuse_key_of
from vlm_serve.batch.progress import Progress, percent, verdict
from vlm_serve.batch.runner import BatchJob, run_jobs
from vlm_serve.batch.video_questions import VideoQuestion, read_questions
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.reading.decisions import MAX_OPTIONS
from vlm_serve.server.config import ServerConfig

COLUMNS = (
    "id",
    "video",
    "question",
    "answer",
    "finish_reason",
    "reasoning",
    "prompt_tokens",
    "cached_tokens",
    "hit_rate",
    "completion_tokens",
    "cache_reason",
    "error",
    "confidence",
    "probabilities",
)
_LATER = ("finish_reason", "reasoning", "confidence", "probabilities")
"""Columns that outputs of earlier versions lack."""
_CHAT, _DECISIONS = "/v1/chat/completions", "/v1/decisions"
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of every answer: of sampling, or the texts of which it is one.

    Raises ConfigError for choices that no question can have, and for both kinds.
    """

    max_tokens: int = 256
    temperature: float | None = 0.0
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.choices:
            return
        if not 2 <= len(set(self.choices)) == len(self.choices) <= MAX_OPTIONS:
            raise ConfigError(
                f"--choices must be 2 to {MAX_OPTIONS} different texts", param="choices"
            )
        if (self.max_tokens, self.temperature) != (256, 0.0):
            raise ConfigError(
                "--choices are not sampled: leave out --max-tokens and --temperature",
                param="choices",
            )

    @property
    def path(self) -> str:
        """The route that answers."""
        return _DECISIONS if self.choices else _CHAT


@dataclass(slots=True)
class VideoTally:
    """Cache reuse of one video's questions."""

    questions: int = 0
    failed: int = 0
    cut: int = 0
    prompt: int = 0
    cached: int = 0


@dataclass(slots=True)
class Tally:
    """Cache reuse by video."""

    videos: dict[str, VideoTally] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        video = self.videos.setdefault(row["video"], VideoTally())
        video.questions += 1
        video.failed += row["error"] is not None
        video.cut += row.get("finish_reason") == "length"
        video.prompt += row["prompt_tokens"]
        video.cached += row["cached_tokens"]

    def lines(self) -> Iterator[str]:
        """Yield a line per video: its questions, failures and hit rate."""
        width = max(map(len, self.videos), default=0)
        for name, video in sorted(self.videos.items()):
            failed = f", {video.failed} failed" if video.failed else ""
            failed += f", {video.cut} cut at --max-tokens" if video.cut else ""
            rate = percent(video.cached, video.prompt)
            yield f"  {name:<{width}}  {video.questions} questions{failed}, {rate} cached"


def body_of(question: VideoQuestion, options: AnswerOptions) -> bytes:
    """Build the request of a question: the video first, for its questions to share."""
    video = {"type": "video_url", "video_url": {"url": question.url}}
    body: dict[str, Any] = {"cache_report": True}
    if options.choices:
        choices = [{"value": choice} for choice in options.choices]
        asked = {"type": "choice", "instructions": question.text, "choices": choices}
        body |= {"input": [{"role": "user", "content": [video]}], "questions": [asked]}
    else:
        content = [video, {"type": "text", "text": question.text}]
        body["messages"] = [{"role": "user", "content": content}]
        body |= {
            "max_completion_tokens": options.max_tokens,
            "temperature": options.temperature,
        }
    return json.dumps(body, ensure_ascii=False).encode()


def row_of(question: VideoQuestion, reply: HttpReply) -> Row:
    """Build the output row of a question: its answer, or the error's message.

    The answer is "" if `--max-tokens` cut the thought before it, and null with an error alone.
    """
    body = reply_json(reply)
    row: Row = {"id": question.id, "video": question.video, "question": question.text}
    prompt, cached, generated, _ = usage_of(body)
    answered = reply.status == 200
    told: Row = dict.fromkeys(("answer", *_LATER))
    told |= _told(body) if answered else {}
    return row | {
        **told,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": round(cached / prompt, 4) if prompt else 0.0,
        "completion_tokens": generated if answered else 0,
        "cache_reason": _reason(body["cache_report"]) if answered else None,
        "error": None if answered else body["error"]["message"],
    }


def _told(body: Any) -> Row:
    """Return what an answer tells: a text, or a choice with probabilities."""
    if "answers" in body:
        (answer,) = body["answers"]
        pairs = answer["probabilities"]
        probabilities = {each["value"]: each["probability"] for each in pairs}
        told = {"answer": answer["choice"], "confidence": answer["confidence"]}
        return told | {"probabilities": probabilities}
    choice = body["choices"][0]
    message = choice["message"]
    told = {"answer": message["content"] or "", "finish_reason": choice["finish_reason"]}
    return told | {"reasoning": message.get("reasoning")}


def _reason(report: Any) -> Any:
    """Return why no more was reused: for the first prompt, if there are several."""
    return (report[0] if isinstance(report, list) else report)["reason"]


def run(
    source: Path,
    output: Path,
    model: str,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    questions: Sequence[str] = (),
    options: AnswerOptions | None = None,
    concurrency: int | None = None,
) -> int:
    """Answer every question without a row in `output`.

    Args:
        source: a folder of videos, or a .csv or .jsonl file with `video` and `question`.
        output: a .csv or .jsonl file. Rows of a CSV file are collected in `OUTPUT.partial`.
        questions: asked about every video; required for a folder.

    Returns the exit status: 0, or SOME_FAILED if any question failed, now or in an earlier run over
    the same files. Failures are printed.

    Raises:
        ConfigError: there are no questions, or files cannot be read or written.
        CheckpointError, EngineClosedError: see `run_jobs`.
    """
    if output.suffix not in (".csv", ".jsonl"):
        raise ConfigError("the output's name must end with .csv or .jsonl", param="output")
    options = options or AnswerOptions()
    wanted = {question.id: question for question in read_questions(source, questions)}
    tally, failures = Tally(), dict[str, str]()

    def note(row: Row) -> None:
        tally.add(row)
        if row["error"] is not None:
            failures[row["id"]] = f"{row['video']}, {row['question']!r}: {row['error']}"

    with Journal(partial_of(output, _from_csv) if output.suffix == ".csv" else output) as journal:
        for row in journal.rows():
            if row["id"] not in wanted:
                raise ConfigError(
                    f"{output} has rows of other questions; give another output file or remove it",
                    param="output",
                )
            if row["error"] is None and tuple(row.get("probabilities") or ()) != options.choices:
                raise ConfigError(
                    f"{output} has answers with other --choices; give another output file or "
                    "remove it",
                    param="output",
                )
            note(row)
        progress = Progress(len(wanted), len(journal.done), len(failures))

        def on_reply(job: BatchJob, reply: HttpReply) -> None:
            row = row_of(wanted[job.id], reply)
            journal.append(row)
            note(row)
            progress.add(
                failed=row["error"] is not None,
                prompt_tokens=row["prompt_tokens"],
                cached_tokens=row["cached_tokens"],
            )

        jobs = _jobs(
            [question for question in wanted.values() if question.id not in journal.done], options
        )
        config = _with_root(engine_config, wanted.values())
        try:
            run_jobs(model, config, server_config, jobs, on_reply, concurrency)
        finally:
            progress.close()
        if output.suffix == ".csv":
            replace_file(output, _as_csv(journal.rows(list(wanted))))
            journal.path.unlink()
    for line in tally.lines():
        print(line, file=sys.stderr)
    return verdict([failures[name] for name in wanted if name in failures], output)


def _jobs(questions: Sequence[VideoQuestion], options: AnswerOptions) -> list[BatchJob]:
    jobs = []
    for question in questions:
        body, path = partial(body_of, question, options), options.path
        jobs.append(BatchJob(question.id, path, body, reuse_key_of(path, json.loads(body()))))
    return jobs


def _with_root(config: EngineConfig, questions: Iterable[VideoQuestion]) -> EngineConfig:
    """Allow the engine to read the common folder of all videos, unless a folder was given."""
    files = [str(question.file.parent) for question in questions if question.file is not None]
    if config.allowed_local_media_path is not None or not files:
        return config
    return replace(config, allowed_local_media_path=os.path.commonpath(files))


def _from_csv(path: Path) -> Iterator[Row]:
    """Read the output of an earlier run."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for entry in csv.DictReader(file):
                given = entry | {name: entry.get(name) for name in _LATER}
                row: Row = {name: given[name] or None for name in COLUMNS}
                row |= {name: int(entry[name]) for name in _COUNTS}
                row["hit_rate"] = float(entry["hit_rate"])
                if row["probabilities"] is not None:
                    row["probabilities"] = json.loads(row["probabilities"])
                    row["confidence"] = float(row["confidence"])
                if row["error"] is None:
                    row["answer"] = entry["answer"]
                yield row
    except (KeyError, TypeError, ValueError, csv.Error):
        raise ConfigError(
            f"{path} is not the output of an earlier run; give another output file or remove it",
            param="output",
        ) from None


def _as_csv(rows: Iterable[Row]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    for row in rows:
        told = row.get("probabilities")
        shown = None if told is None else json.dumps(told, ensure_ascii=False)
        writer.writerow(row | {"probabilities": shown})
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()
