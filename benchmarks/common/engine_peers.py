"""Servers in child processes: vLLM's CPU build, llama.cpp, and ours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.engine_child import own_environment
from common.engine_server import Server, Unavailable, free_port, running, words
from common.machine import emulated

VLLM_PLACES = ("venv-vllm", ".venv-vllm", "../venv-vllm", "~/venv-vllm", "~/.venvs/vllm")
"""Virtual environments looked at for a vLLM, from this project's root."""


class Completions:
    """A server of the OpenAI protocol, driven through /v1/completions with token ids."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self._name = server, name

    def complete(self, prompts: list[list[int]], count: int) -> float:
        answer, seconds = self.server.post(
            "/v1/completions",
            {
                "model": "model",
                "prompt": prompts,
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        _check(self._name, answer["usage"]["completion_tokens"], count * len(prompts))
        return seconds


class LlamaCpp:
    """llama.cpp, driven through /completion with token ids."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def complete(self, prompts: list[list[int]], count: int) -> float:
        answer, seconds = self.server.post(
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
    root = Path(__file__).resolve().parents[2]
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
    python: str,
    checkpoint: Path,
    dtype: str,
    *,
    length: int,
    threads: int,
    batched_tokens: int,
    block: int,
) -> Iterator[Completions]:
    """vLLM on the checkpoint, prefix cache on. Raises Unavailable."""
    port = free_port()
    flags: dict[str, object] = {
        "--model": checkpoint,
        "--served-model-name": "model",
        "--dtype": dtype,
        "--block-size": block,
        "--max-model-len": length,
        "--max-num-batched-tokens": batched_tokens,
        "--max-num-seqs": 8,
        "--host": "127.0.0.1",
        "--port": port,
    }
    # Without the details it does not say what came from its cache.
    switches = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    # `auto` would keep a core for vLLM itself; without OMP_NUM_THREADS it serves with one thread.
    environment = _environment(threads) | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores(threads))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent / "vllm_start"),
    }
    module = [python, "-m", "vllm.entrypoints.openai.api_server", *switches]
    with running([*module, *words(flags)], port, environment) as server:
        yield Completions(server, "vLLM")


def find_llama(source: str | None) -> tuple[Path, str]:
    """llama.cpp's source tree, which has the converter, and its `llama-server`. Raises Unavailable.

    Args:
        source: the tree; the server is looked for in its `build/bin`, then on PATH; where an
            instruction set is emulated, in `build-avx2/bin` alone.
    """
    named = source or os.environ.get("LLAMA_SOURCE")
    if named is None:
        raise Unavailable("not found (--llama-source, or LLAMA_SOURCE)")
    tree = Path(named).expanduser().resolve()
    if not (tree / "convert_hf_to_gguf.py").is_file():
        raise Unavailable(f"no convert_hf_to_gguf.py in {tree}")
    given = os.environ.get("LLAMA_SERVER")
    build = "build" if emulated() is None else f"build-{emulated()}"
    candidates = [given] if given else [str(tree / build / "bin/llama-server")]
    if given is None and emulated() is None:
        candidates.append("llama-server")
    found = next(filter(None, map(shutil.which, candidates)), None)
    if found is None:
        raise Unavailable(f"no server at {' or '.join(candidates)} (LLAMA_SERVER may name one)")
    return tree, found


@contextmanager
def llama(
    binary: str,
    model: Path,
    *,
    length: int,
    threads: int,
    tower: Path | None = None,
    more: Mapping[str, object] | None = None,
) -> Iterator[LlamaCpp]:
    """llama.cpp on a GGUF file, in the file's own precision. Raises Unavailable.

    Args:
        tower: GGUF file of the vision tower; without one it takes no pictures.
        more: flags.
    """
    port = free_port()
    flags: dict[str, object] = {
        "--model": model,
        "--ctx-size": 8 * length,  # Shared by its slots.
        "--parallel": 8,
        "--threads": threads,
        "--threads-batch": threads,
        "--host": "127.0.0.1",
        "--port": port,
    }
    if tower is None:
        # Its copies of whole contexts, made when a slot changes hands, would count as decoding.
        flags["--cache-ram"] = 0
    else:
        flags["--mmproj"] = tower
    flags.update(more or {})
    with running([binary, *words(flags)], port, _environment(threads)) as server:
        yield LlamaCpp(server)


@contextmanager
def ours(
    folder: Path, checkpoint: Path, dtype: str, *switches: str, threads: int, batched_tokens: int
) -> Iterator[Server]:
    """`vlm-serve serve` of the checkout in `folder`. Raises Unavailable."""
    port = free_port()
    flags: dict[str, object] = {
        "--served-model-name": "model",
        "--dtype": dtype,
        "--block-size": 64,
        "--threads": threads,
        "--cache-memory": "1GiB",
        "--max-num-batched-tokens": batched_tokens,
        "--speculative": "off",
        "--port": port,
    }
    module = [sys.executable, "-m", "vlm_serve.cli", "serve", str(checkpoint)]
    command = [*module, *switches, *words(flags)]
    # `-m` looks into the working directory first.
    with running(command, port, own_environment(folder), folder) as server:
        yield server


def _environment(threads: int) -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if name != "MKL_NUM_THREADS"}
    return outer | {"OMP_NUM_THREADS": str(threads)}


def _cores(threads: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))[:threads]
