"""Compare two runs of the same requests, bit by bit: `python examples/compare_runs.py`.

For training and evaluation, where a policy's log-probabilities must not depend on what else the
server computes. The first run asks one request at a time, each on an empty cache. The second asks
all of them at once, in another order, when the cache has been filled.
"""

from __future__ import annotations

import argparse
import random

from vlm_serve import EngineConfig, Output, Pipeline, SamplingParams

THINGS = ("stars", "hearts", "triangles", "circles")
QUESTIONS = tuple(
    f"I have {count} {thing} and find {more} more. How many {thing} do I have?"
    for thing in THINGS
    for count, more in ((2, 3), (5, 1), (4, 4))
)
SYSTEM = "Answer in one short sentence. Count carefully, and name the things that you count."


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def params(index: int) -> SamplingParams:
    """Half of the answers are drawn: a draw follows from seed and log-probabilities alone."""
    return SamplingParams(
        max_tokens=24, temperature=float(index % 2), seed=index, logprobs=5, ignore_eos=True
    )


def alone(pipe: Pipeline) -> list[Output]:
    found = []
    for index, question in enumerate(QUESTIONS):
        pipe.engine.flush()
        found.append(pipe.chat(messages(question), params(index)))
    return found


def together(pipe: Pipeline) -> list[Output]:
    order = list(range(len(QUESTIONS)))
    random.Random(1).shuffle(order)
    chats, own = [messages(QUESTIONS[i]) for i in order], [params(i) for i in order]
    pipe.chat_many(chats, own)  # fills the cache
    outputs = dict(zip(order, pipe.chat_many(chats, own), strict=True))
    return [outputs[index] for index in sorted(outputs)]


def largest_difference(one: Output, other: Output) -> float:
    """Return by how much the log-probabilities of equal tokens differ at most."""
    rows = zip(
        one.token_ids, other.token_ids, one.logprobs or (), other.logprobs or (), strict=True
    )
    return max((abs(a[token] - b[token]) for token, same, a, b in rows if token == same), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--without", action="store_true", help="without batch invariance")
    parser.add_argument("--torch", action="store_true", help="without compiled kernels")
    given = parser.parse_args()
    config = EngineConfig(
        deterministic=not given.without, compiled_kernels=False if given.torch else None
    )
    with Pipeline(given.model, config) as pipe:
        print("batch-invariant:", pipe.engine.arithmetic.promise)
        first, second = alone(pipe), together(pipe)
    hits = sum(each.usage.cached_tokens > 0 for each in second)
    tokens = sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True))
    bits = sum(a.logprobs == b.logprobs for a, b in zip(first, second, strict=True))
    worst = max(map(largest_difference, first, second))
    print(f"{len(first)} requests, {hits} of them hits in the second run")
    print(f"equal tokens: {tokens}, equal log-probabilities: {bits}, largest difference: {worst:g}")
    return 0 if bits == len(first) else 1


if __name__ == "__main__":
    raise SystemExit(main())
