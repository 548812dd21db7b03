"""lmms-eval's tasks with and without prefix caching: asked of a server, and of a pipeline."""

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

from vlm_serve.config import EngineConfig
from vlm_serve.engine.engine import Engine
from vlm_serve.errors import EvaluationError
from vlm_serve.eval.choices import THROUGH
from vlm_serve.eval.comparing import Comparison, compare
from vlm_serve.eval.lmms_samples import read_samples, with_log
from vlm_serve.eval.replies import Reply, Run, Tokens
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.draining import listen, url_of
from vlm_serve.server.run import make_server

_NOTES = {
    "server": "lmms-eval's client of OpenAI's API asks a server on the loopback address. Its "
    "samples have the texts, so those are compared. Questions about a medium that was asked about "
    "before can reuse it.",
    "pipeline": "lmms-eval's process runs the engine itself; texts, finish reasons and tokens are "
    "compared. Questions about a medium that was asked about before can reuse it.",
}
_NAME = "eval"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LmmsOptions:
    """How lmms-eval is run.

    Attributes:
        command: what starts it, with the model `vlm_serve`: see `lmms_run`.
        tasks: as its `--tasks`.
        through: some of THROUGH.
        include_path: a folder of further tasks.
        limit: samples of each task.
        max_frames: of a video.
        timeout: seconds for each of its runs.
    """

    command: tuple[str, ...]
    tasks: str
    through: tuple[str, ...] = THROUGH
    include_path: Path | None = None
    limit: int | None = None
    max_frames: int = 8
    timeout: float = 3600.0


def compare_lmms(
    model: str, config: EngineConfig, changed: Mapping[str, Any], options: LmmsOptions
) -> Iterator[Comparison]:
    """Runs the tasks with and without caching, each way.

    Args:
        changed: the options of `config` that are not as they are by themselves.

    Raises:
        CheckpointError, ConfigError: an engine cannot be built.
        EvaluationError: lmms-eval has failed as a whole.
    """
    for through in options.through:
        runs = []
        for caching in (True, False):
            if through == "server":
                side = replace(config, enable_prefix_caching=caching)
                runs.append(_through_server(model, side, options))
            else:
                file = {**changed, "enable_prefix_caching": caching, "model": model}
                runs.append(_through_pipeline(file, options))
        yield compare(f"lmms-eval, {through}", _NOTES[through], *runs)


def _through_server(model: str, config: EngineConfig, options: LmmsOptions) -> Run:
    engine = Engine.from_checkpoint(model, config)
    with _serving(engine) as url, tempfile.TemporaryDirectory() as folder:
        arguments = {
            "model_version": _NAME,
            "base_url": f"{url}/v1",
            "api_key": "none",
            "httpx_trust_env": False,
            "max_retries": 1,
            "num_concurrent": 1,
            "prefix_aware_queue": False,  # The samples' own order has those of a medium together.
            "pass_video_url": True,
            "max_frames_num": options.max_frames,
        }
        replies, seconds = _run("openai", arguments, options, Path(folder))
        hits = int(engine.stats()["cache"]["hit_tokens"])
    tokens = Tokens.sum(reply.tokens for reply in replies)
    return Run(tuple(replies), seconds, replace(tokens, cached=hits))


@contextmanager
def _serving(engine: Engine) -> Iterator[str]:
    """A server's URL; it ends, and the engine with it, when that is left."""
    config = ServerConfig(port=0, page=False, idle_check=False)
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


def _through_pipeline(file: Mapping[str, Any], options: LmmsOptions) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "config.json"), Path(folder, "replies.jsonl")
        config.write_text(json.dumps(file), encoding="utf-8")
        arguments = {"config": config, "log": log, "max_frames_num": options.max_frames}
        replies, seconds = _run("vlm_serve", arguments, options, Path(folder))
        replies = with_log(replies, log)
    return Run(tuple(replies), seconds, Tokens.sum(reply.tokens for reply in replies))


def _run(
    model: str, arguments: Mapping[str, Any], options: LmmsOptions, folder: Path
) -> tuple[list[Reply], float]:
    """Runs lmms-eval once; its replies, and how many seconds it took."""
    samples = folder / "samples"
    command: list[str] = [*options.command, "--model", model, "--tasks", options.tasks]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--log_samples", "--output_path", str(samples)]
    if options.include_path is not None:
        command += ["--include_path", str(options.include_path)]
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    begin = time.perf_counter()
    status, said = _execute(command, options.timeout)
    seconds = time.perf_counter() - begin
    # A task that failed leaves no samples, and lmms-eval ends with status 0 all the same.
    if status or not samples.is_dir():
        raise EvaluationError(f"lmms-eval ended with status {status} and no answers: {_last(said)}")
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


def _last(said: str, lines: int = 15) -> str:
    """The end of what a process has printed."""
    return "\n".join(said.strip().splitlines()[-lines:])
