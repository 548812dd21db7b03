"""lmms-eval's tasks with and without prefix caching, through a server and through a pipeline."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlm_serve.engine.engine import Engine
from vlm_serve.errors import EvaluationError
from vlm_serve.eval.comparing import Comparison, compare
from vlm_serve.eval.flags import THROUGH
from vlm_serve.eval.lmms_samples import read_samples, with_log
from vlm_serve.eval.replies import AnswerRun, Reply, TokenCounts
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import listen, url_of
from vlm_serve.server.main import make_server

_NOTES = {
    "server": "lmms-eval's OpenAI client asks a server on the loopback address. Its "
    "samples have only texts, so texts are compared. Later questions about the "
    "same medium can reuse it.",
    "pipeline": "lmms-eval's process runs the engine itself; texts, finish reasons and tokens are "
    "compared. Later questions about the same medium can reuse it.",
}
_NAME = "eval"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LmmsOptions:
    """Options for running lmms-eval.

    Attributes:
        command: starts lmms-eval with the model `vlm_serve`, see `lmms_run`.
        tasks: as for its `--tasks`.
        through: some of THROUGH.
        include_path: folder of additional tasks.
        limit: samples per task.
        max_frames: frames per video.
        timeout: time limit for each run, in seconds.
    """

    command: tuple[str, ...]
    tasks: str
    through: tuple[str, ...] = THROUGH
    include_path: Path | None = None
    limit: int | None = None
    max_frames: int = 8
    timeout: float = 3600.0
    reasoning_parser: str = "auto"


def compare_lmms(
    model: str, config: EngineConfig, changed: Mapping[str, Any], options: LmmsOptions
) -> Iterator[Comparison]:
    """Run the tasks with and without caching, through each interface.

    Args:
        changed: the options of `config` that differ from their defaults.

    Raises:
        CheckpointError, ConfigError: an engine cannot be built.
        EvaluationError: lmms-eval failed as a whole.
    """
    for through in options.through:
        runs = []
        for caching in (True, False):
            if through == "server":
                side = replace(config, enable_prefix_caching=caching)
                runs.append(_through_server(model, side, options))
            else:
                file = {**changed, "enable_prefix_caching": caching, "model": model}
                file["reasoning_parser"] = options.reasoning_parser
                runs.append(_through_pipeline(file, options))
        yield compare(f"lmms-eval, {through}", _NOTES[through], *runs)


def _through_server(model: str, config: EngineConfig, options: LmmsOptions) -> AnswerRun:
    engine = Engine.from_checkpoint(model, config)
    with _serving(engine, options.reasoning_parser) as url, tempfile.TemporaryDirectory() as folder:
        arguments = {
            "model_version": _NAME,
            "base_url": f"{url}/v1",
            "api_key": "none",
            "httpx_trust_env": False,
            "max_retries": 1,
            "num_concurrent": 1,
            "prefix_aware_queue": False,  # The samples' order already groups those of a medium.
            "pass_video_url": True,
            "max_frames_num": options.max_frames,
        }
        replies, seconds = _run("openai", arguments, options, Path(folder))
        hits = int(engine.stats()["cache"]["hit_tokens"])
    tokens = TokenCounts.sum(reply.tokens for reply in replies)
    return AnswerRun(tuple(replies), seconds, replace(tokens, cached=hits))


@contextmanager
def _serving(engine: Engine, reasoning_parser: str) -> Iterator[str]:
    """Serve an engine, yield the URL, and stop server and engine on exit."""
    config = ServerConfig(port=0, page=False, idle_check=False, reasoning_parser=reasoning_parser)
    bound = listen(config)
    server = make_server(engine, config, (_NAME,))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise EvaluationError("the server did not start")
            time.sleep(0.01)
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
        engine.close()


def _through_pipeline(file: Mapping[str, Any], options: LmmsOptions) -> AnswerRun:
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "config.json"), Path(folder, "replies.jsonl")
        config.write_text(json.dumps(file), encoding="utf-8")
        arguments = {"config": config, "log": log, "max_frames_num": options.max_frames}
        replies, seconds = _run("vlm_serve", arguments, options, Path(folder))
        replies = with_log(replies, log)
    return AnswerRun(tuple(replies), seconds, TokenCounts.sum(reply.tokens for reply in replies))


def _run(
    model: str, arguments: Mapping[str, Any], options: LmmsOptions, folder: Path
) -> tuple[list[Reply], float]:
    """Run lmms-eval once and return its replies and the seconds it took."""
    samples = folder / "samples"
    command: list[str] = [*options.command, "--model", model, "--tasks", options.tasks]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--log_samples", "--output_path", str(samples)]
    if options.include_path is not None:
        command += ["--include_path", str(options.include_path)]
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    begin = time.perf_counter()
    status, output = _execute(command, options.timeout)
    seconds = time.perf_counter() - begin
    # lmms-eval exits with 0 even if a task failed, which then leaves no samples.
    if status or not samples.is_dir():
        raise EvaluationError(
            f"lmms-eval ended with status {status} and no answers: {_last(output)}"
        )
    return read_samples(samples), seconds


def _execute(command: Sequence[str], timeout: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except OSError as error:
        raise EvaluationError(f"lmms-eval: {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EvaluationError(f"lmms-eval took more than {timeout:g} seconds") from None
    return done.returncode, done.stdout.decode(errors="replace")


def _last(output: str, lines: int = 15) -> str:
    """Return the last lines of a process's output."""
    return "\n".join(output.strip().splitlines()[-lines:])
