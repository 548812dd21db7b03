"""Random pairs of a cold run and a hit on the same prompt, in random company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from parity import greedy, tapped
from parity_cases import random_ids

from vlm_serve.pipeline import Pipeline


@dataclass(frozen=True)
class Pair:
    """One comparison. `same_bits`: of the logits that the first token was chosen from."""

    cached_tokens: int
    same_bits: bool
    same_tokens: bool
    max_difference: float


def random_pairs(pipe: Pipeline, count: int, *, seed: int, num_tokens: int = 4) -> Iterator[Pair]:
    """Runs random prompts cold and alone, then again as hits in batches of one to four.

    Prompts share prefixes of random length, so that hits end at many kinds of boundary.
    """
    rng = random.Random(seed)
    engine = pipe.engine
    made = 0
    while made < count:
        base = random_ids(rng.randint(20, 220), rng.randrange(10**6))
        prompts = [
            base[: rng.randint(10, len(base))] + random_ids(rng.randint(1, 60), rng.getrandbits(20))
            for _ in range(rng.randint(1, 4))
        ]
        cold = []
        for prompt in prompts:
            engine.flush()
            with tapped(engine) as tap:
                answer = pipe.generate(prompt, greedy(num_tokens))
                cold.append((answer, tap.take()[0]))
        engine.flush()
        pipe.generate(base, greedy(1))
        if rng.random() < 0.5:
            pipe.generate_many(prompts, greedy(1))
        with tapped(engine) as tap:
            hits = pipe.generate_many(prompts, greedy(num_tokens))
            logits = tap.take()
        engine.check()
        for hit, rows, (answer, expected) in zip(hits, logits, cold, strict=True):
            if hit.usage.cached_tokens:
                made += 1
                yield Pair(
                    hit.usage.cached_tokens,
                    torch.equal(rows[0], expected[0]),
                    hit.token_ids == answer.token_ids,
                    float((rows[0] - expected[0]).abs().max()),
                )
