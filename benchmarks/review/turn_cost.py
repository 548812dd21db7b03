"""What a known conversation costs before and in the engine, by its length.

    python benchmarks/review/turn_cost.py [--turns 3 15 32] [--times 15]

`prepare` beside one plain encoding, and whole hits by tokens and by messages: milliseconds, the
best and the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import checkout  # noqa: F401

from vlm_serve import EngineConfig, Pipeline, SamplingParams

SENTENCE = "The river bends twice before it meets the old mill, and nobody remembers why. "


def conversation(turns: int) -> list[dict[str, str]]:
    """Return messages of so many turns and a last question."""
    turn = [
        {"role": "user", "content": SENTENCE * 20},
        {"role": "assistant", "content": SENTENCE * 4},
    ]
    return [*turn * turns, {"role": "user", "content": "Well?"}]


def spent(call: Callable[[], object], times: int) -> str:
    """Return the milliseconds of a call: the best, and the median."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - begin))
    return f"{min(found):.1f} ({statistics.median(found):.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[3, 15, 32])
    parser.add_argument("--times", type=int, default=15)
    given = parser.parse_args(arguments)
    params = SamplingParams(max_tokens=1, temperature=0)
    with Pipeline("demo", EngineConfig(cache_memory="512MiB")) as pipe:
        preprocessor = pipe.engine.preprocessor
        for turns in given.turns:
            messages = conversation(turns)
            for _ in range(3):
                output = pipe.chat(messages, params)
            ids = list(output.prompt_token_ids)
            text = "".join(message["content"] for message in messages)
            calls: dict[str, Callable[[], object]] = {
                "one encoding": lambda text=text: preprocessor.tokenizer.encode_plain(text),
                "prepare": lambda messages=messages: preprocessor.prepare(messages),
                "hit by ids": lambda ids=ids: pipe.generate_many([ids], params),
                "hit by messages": lambda messages=messages: pipe.chat(messages, params),
            }
            calls["hit by ids"]()
            usage = output.usage
            print(f"{usage.prompt_tokens} tokens, {usage.cached_tokens} cached; ms:")
            for name, call in calls.items():
                print(f"  {name:16} {spent(call, given.times)}")


if __name__ == "__main__":
    main()
