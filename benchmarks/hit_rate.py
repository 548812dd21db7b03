"""Measure how much of the reusable part of prompts is reused, by workload.

    python benchmarks/hit_rate.py [CHECKPOINT] [--block-size 64]

For every workload: cached tokens divided by the deepest cut point of the longest prefix shared with
anything computed before, from the second request on. Beside it the same for a trie of a model
without recurrent state, where KV alone decides: the price of needing a state snapshot too.
Without a checkpoint a small random one is made: what is reused does not depend on the weights.
Longer workloads, with rows short, are those of `reuse.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import benchmarks.common  # noqa: F401, I001  # First: it adds examples/ and tests/ to the path.
from make_checkpoint import make_checkpoint
from parity_cases import assistant, photograph, random_ids, user

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.pipeline.inputs import only
from vlm_serve.pipeline.requests import Job
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import Prompt

ANSWER = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
QUESTIONS = [
    "What is this?",
    "Which colours do you see, and where in the picture are they?",
    "Is there a person?",
    "Describe the background in one sentence.",
]
Request = dict[str, Any] | list[int] | list[dict[str, Any]]


class AttentionOnly:
    """The trie of a model without recurrent state, fed with the same prompts."""

    def __init__(self, block_size: int) -> None:
        config = CacheConfig(num_blocks=20_000, block_size=block_size, has_state=False)
        self._cache = PrefixCache(config)

    def run(self, keys: PromptKeys, prompt_length: int) -> int:
        """Cached tokens of the prompt; publishes the whole sequence."""
        match = self._cache.match(keys, limit=prompt_length - 1)
        lease = self._cache.open(match)
        assert self._cache.take_row(lease) and self._cache.grow(lease, len(keys))
        self._cache.commit(lease, keys, len(keys), exact_until=prompt_length)
        self._cache.close(lease)
        return match.boundary


class Meter:
    """Runs requests and compares what was cached with what could have been."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._seen: set[bytes] = set()
        self._attention = AttentionOnly(pipe.engine.preprocessor.block_size)
        self.possible: list[int] = []
        self.cached: list[int] = []
        self.attention: list[int] = []

    def run(self, request: Any, params: SamplingParams = ANSWER) -> str:
        """Answers a conversation (messages) or token ids; returns the answer's text."""
        preprocessor = self._pipe.engine.preprocessor
        if isinstance(request[0], int):
            prompt = preprocessor.prepare_tokens(request)
        else:
            prompt = preprocessor.prepare(request)
        output = only(self._pipe._requests.answers([Job(lambda: prompt, params)]))
        self.possible.append(self._deepest(prompt))
        self.cached.append(output.usage.cached_tokens)
        keys = prompt.keys.fork()
        keys.extend(output.token_ids[:-1])
        self.attention.append(self._attention.run(keys, len(prompt)))
        self._seen.update(keys.block_keys, keys.tails.values())
        return output.text

    def _deepest(self, prompt: Prompt) -> int:
        keys = prompt.keys
        for cut in reversed(keys.cuts):
            key = keys.tails.get(cut) or keys.block_keys[cut // keys.block_size - 1]
            if cut < len(prompt) and not keys.inside_span(cut) and key in self._seen:
                return cut
        return 0


def identical(meter: Meter) -> None:
    for _ in range(3):
        meter.run([user(photograph("rocket.jpg"), QUESTIONS[1])])


def same_image(meter: Meter) -> None:
    for question in QUESTIONS:
        meter.run([user(photograph("coffee.png"), question)])


def text_chat(meter: Meter) -> None:
    _chat(meter, [{"role": "system", "content": " ".join(["Be brief and precise."] * 30)}])


def media_chat(meter: Meter) -> None:
    _chat(meter, [user(photograph("chelsea.png"), "Look at this animal."), assistant("A cat.")])


def _chat(meter: Meter, history: list[dict[str, Any]]) -> None:
    for turn in range(6):
        history = [*history, user(QUESTIONS[turn % 4] + " Explain how you know that. " * 4)]
        answer = meter.run(history)
        history = [*history, assistant(answer)]


def shared_prefix(meter: Meter) -> None:
    shared = random_ids(4000, 1)
    for index in range(4):
        meter.run(shared + random_ids(512, 10 + index))


def growing_video(meter: Meter) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (24, 64, 96, 3), dtype=np.uint8)
    for count in (8, 12, 16, 20, 24):
        part = {"type": "video", "video": frames[:count], "fps": 2.0, "sampling": "fps_grid"}
        meter.run([user(part, "What happens?")])


WORKLOADS: dict[str, Callable[[Meter], None]] = {
    "identical prompt": identical,
    "same image, new question": same_image,
    "chat, text": text_chat,
    "chat with an image": media_chat,
    "4k prefix + 512 new tokens": shared_prefix,
    "growing video, fps grid": growing_video,
}


def measure(pipe: Pipeline) -> Iterator[tuple[str, Meter]]:
    """Runs every workload on an empty cache."""
    for name, runs in WORKLOADS.items():
        pipe.engine.flush()
        meter = Meter(pipe)
        runs(meter)
        yield name, meter


def share(cached: list[int], possible: list[int]) -> float:
    """Percent; 100 if nothing could have been cached."""
    return 100.0 * sum(cached) / sum(possible) if sum(possible) else 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="default: a small random one")
    parser.add_argument("--block-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or make_checkpoint(folder)
        config = EngineConfig(dtype="float32", block_size=options.block_size, cache_memory="512MiB")
        with Pipeline(checkpoint, config) as pipe:
            print(
                f"block size {options.block_size}; percent of the reusable prefix that was reused"
            )
            header = f"{'workload':<28}{'2nd':>8}{'3rd on':>8}{'all':>8}   KV alone: "
            print(header + f"{'2nd':>8}{'3rd on':>8}")
            for name, meter in measure(pipe):
                second = share(meter.cached[1:2], meter.possible[1:2])
                later = share(meter.cached[2:], meter.possible[2:])
                every = share(meter.cached[1:], meter.possible[1:])
                kv_second = share(meter.attention[1:2], meter.possible[1:2])
                kv_later = share(meter.attention[2:], meter.possible[2:])
                row = f"{name:<28}{second:>8.1f}{later:>8.1f}{every:>8.1f}{'':>13}"
                print(row + f"{kv_second:>8.1f}{kv_later:>8.1f}")
            pipe.engine.check()


if __name__ == "__main__":
    main()
