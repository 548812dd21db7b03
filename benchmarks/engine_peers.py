"""Peers that serve over HTTP, each in its own process: vLLM's CPU build and llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VLLM_PLACES = ("venv-vllm", ".venv-vllm", "../venv-vllm", "~/venv-vllm", "~/.venvs/vllm")
"""Virtual environments that are looked at for a vLLM, from this project's root."""

START_SECONDS, ANSWER_SECONDS = 600, 600


class Unavailable(Exception):
    """A peer that cannot take part; the message says why, in one line."""


class Server:
    """A running server of a peer."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str]) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(prefix="peer-", suffix=".log")  # noqa: SIM115
        # A session of its own: its workers end with it.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Returns when it is healthy. Raises Unavailable if it ends or takes too long."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise Unavailable(f"it ended at start-up: {self._last_words()}")
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise Unavailable(f"not ready after {START_SECONDS} s: {self._last_words()}")

    def post(self, path: str, body: dict[str, Any]) -> tuple[Any, float]:
        """The answer to a request, and the seconds from sending it to having read it all."""
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} answered {error.code}: {error.read()[:500]!r}") from error
        return json.loads(text), time.perf_counter() - begin

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)  # Workers that outlived their parent, too.
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it printed nothing"


class Vllm:
    """vLLM, driven through /v1/completions with token ids."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def complete(self, prompts: list[list[int]], count: int) -> float:
        answer, seconds = self._server.post(
            "/v1/completions",
            {
                "model": "model",
                "prompt": prompts,
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        _check("vLLM", answer["usage"]["completion_tokens"], count * len(prompts))
        return seconds


class LlamaCpp:
    """llama.cpp, driven through /completion with token ids."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def complete(self, prompts: list[list[int]], count: int) -> float:
        answer, seconds = self._server.post(
            "/completion",
            {
                "prompt": prompts if len(prompts) > 1 else prompts[0],
                "n_predict": count,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,
            },
        )
        answers = answer if isinstance(answer, list) else [answer]
        made = sum(one["tokens_predicted"] for one in answers)
        _check("llama.cpp", made, count * len(prompts))
        return seconds


def _check(peer: str, made: int, wanted: int) -> None:
    if made != wanted:
        raise RuntimeError(f"{peer} made {made} tokens where {wanted} were asked for")


def find_vllm(given: str | None) -> str:
    """The Python of an environment with vLLM. Raises Unavailable."""
    root = Path(__file__).resolve().parents[1]
    named = given or os.environ.get("VLLM_PYTHON")
    folders = [(root / Path(place).expanduser()) for place in VLLM_PLACES]
    candidates = [named] if named else [str(folder / "bin" / "python") for folder in folders]
    for python in candidates:
        if Path(python).is_file():
            return python
    raise Unavailable(
        f"no Python at {named}" if named else "not found (--vllm-python, or VLLM_PYTHON)"
    )


@contextmanager
def vllm(
    python: str, checkpoint: Path, *, length: int, threads: int, batched_tokens: int, block: int
) -> Iterator[Vllm]:
    """vLLM on the checkpoint in bfloat16, prefix cache on. Raises Unavailable."""
    port = _free_port()
    flags: dict[str, object] = {
        "--model": checkpoint,
        "--served-model-name": "model",
        "--dtype": "bfloat16",
        "--block-size": block,
        "--max-model-len": length,
        "--max-num-batched-tokens": batched_tokens,
        "--max-num-seqs": 8,
        "--host": "127.0.0.1",
        "--port": port,
    }
    # `auto` would keep a core for vLLM itself; without OMP_NUM_THREADS it serves with one thread.
    environment = _environment(threads) | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores(threads))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent / "vllm_start"),
    }
    module = [python, "-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching"]
    with _running([*module, *_words(flags)], port, environment) as server:
        yield Vllm(server)


def find_llama(source: str | None) -> tuple[Path, str]:
    """llama.cpp's source tree, which has the converter, and its `llama-server`. Raises Unavailable.

    Args:
        source: the tree; the server is looked for in its `build/bin`, then on PATH.
    """
    named = source or os.environ.get("LLAMA_SOURCE")
    if named is None:
        raise Unavailable("not found (--llama-source, or LLAMA_SOURCE)")
    tree = Path(named).expanduser().resolve()
    if not (tree / "convert_hf_to_gguf.py").is_file():
        raise Unavailable(f"no convert_hf_to_gguf.py in {tree}")
    given = os.environ.get("LLAMA_SERVER")
    candidates = [given] if given else [str(tree / "build/bin/llama-server"), "llama-server"]
    found = next(filter(None, map(shutil.which, candidates)), None)
    if found is None:
        raise Unavailable(f"no server at {' or '.join(candidates)} (LLAMA_SERVER may name one)")
    return tree, found


@contextmanager
def llama(binary: str, model: Path, *, length: int, threads: int) -> Iterator[LlamaCpp]:
    """llama.cpp on a GGUF file, in the file's own precision. Raises Unavailable."""
    port = _free_port()
    flags = {
        "--model": model,
        "--ctx-size": 8 * length,  # Shared by its slots.
        "--parallel": 8,
        "--threads": threads,
        "--threads-batch": threads,
        # Its copies of whole contexts, made when a slot changes hands, would count as decoding.
        "--cache-ram": 0,
        "--host": "127.0.0.1",
        "--port": port,
    }
    with _running([binary, *_words(flags)], port, _environment(threads)) as server:
        yield LlamaCpp(server)


@contextmanager
def _running(command: list[str], port: int, environment: dict[str, str]) -> Iterator[Server]:
    server = Server(command, port, environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _words(flags: dict[str, Any]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]


def _environment(threads: int) -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if name != "MKL_NUM_THREADS"}
    return outer | {"OMP_NUM_THREADS": str(threads)}


def _cores(threads: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))[:threads]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
