"""Our engine, of any commit, in a child process that times it and is controlled over pipes.

A process of its own keeps two commits apart, and both away from transformers' worker threads. What
the pipes cost is not in the figures.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Child:
    """The parent's side of it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def complete(self, prompts: list[list[int]], count: int) -> float:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps([prompts, count]), file=self._process.stdin, flush=True)
        seconds: float = self.answer()
        return seconds

    def answer(self) -> Any:
        """The next line that the child says. Raises RuntimeError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"our engine ended: {' '.join(words) or 'it said nothing'}")
        return json.loads(line)


@contextmanager
def child(
    folder: Path, checkpoint: Path, dtype: str, threads: int, batched_tokens: int
) -> Iterator[Child]:
    """The engine of the checkout in `folder`, on the checkpoint."""
    with tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, checkpoint, dtype, str(threads), str(batched_tokens)],
            env=own_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            started = Child(process, Path(log.name))
            imported = started.answer()
            assert Path(imported).is_relative_to(folder), f"{imported} is not in {folder}"
            yield started
        finally:
            process.kill()
            process.communicate()


def own_environment(folder: Path) -> dict[str, str]:
    """In which `import vlm_serve` finds the checkout in `folder`, whichever is installed."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def main() -> None:
    """The child's side: answers every line of prompts with the seconds that they took."""
    # Whatever else prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vlm_serve
    from vlm_serve import EngineConfig, Pipeline, SamplingParams

    checkpoint, dtype, threads, batched_tokens = sys.argv[1:]
    # Commits before drafts have no such option, and none that is on by default.
    known = inspect.signature(EngineConfig).parameters
    drafts: dict[str, Any] = {"speculative": "off"} if "speculative" in known else {}
    config = EngineConfig(
        dtype=dtype,
        block_size=64,
        threads=int(threads),
        cache_memory="1GiB",
        max_num_batched_tokens=int(batched_tokens),
        **drafts,
    )
    with Pipeline(checkpoint, config) as pipe:
        print(json.dumps(vlm_serve.__file__), file=answers, flush=True)
        for line in sys.stdin:
            prompts, count = json.loads(line)
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            begin = time.perf_counter()
            pipe.generate_many(prompts, params)
            print(time.perf_counter() - begin, file=answers, flush=True)


if __name__ == "__main__":
    main()
