"""Random pairs of a cold run and a hit on the same prompt, in random company: of token ids, of
chats about pictures, and of next turns, which hit what decoding has written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from parity import greedy, tapped
from parity_cases import random_ids, user

from vlm_serve.pipeline import Output, Pipeline


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
                yield _pair(hit, rows, answer, expected)


def picture_pairs(pipe: Pipeline, count: int, *, seed: int, num_tokens: int = 4) -> Iterator[Pair]:
    """Chats that share some of their pictures, cold and alone, then as hits in batches of one to
    four. Some hits bring another picture, which is encoded in company."""
    rng = random.Random(seed)
    engine = pipe.engine
    made = 0
    while made < count:
        base: list[dict[str, Any] | str]
        base = [_words(rng, 10), _picture(rng), _words(rng, 20), _picture(rng), _words(rng, 5)]
        chats = []
        for _ in range(rng.randint(1, 4)):
            another = [_picture(rng)] if rng.random() < 0.4 else []
            chats.append([user(*base[: rng.randint(2, 5)], *another, _words(rng, 15))])
        cold = []
        for chat in chats:
            engine.flush()
            with tapped(engine) as tap:
                answer = pipe.chat(chat, greedy(num_tokens))
                cold.append((answer, tap.take()[0]))
        engine.flush()
        pipe.chat([user(*base)], greedy(1))
        with tapped(engine) as tap:
            hits = pipe.chat_many(chats, greedy(num_tokens))
            logits = tap.take()
        engine.check()
        for hit, rows, (answer, expected) in zip(hits, logits, cold, strict=True):
            if hit.usage.cached_tokens:
                made += 1
                yield _pair(hit, rows, answer, expected)


def _words(rng: random.Random, most: int) -> str:
    count = rng.randint(1, most)
    return " ".join(rng.choice(("red", "stars", "below", "a", "circle", "7")) for _ in range(count))


def _picture(rng: random.Random) -> dict[str, Any]:
    """Noise, of few sizes: pictures of one size are attended to together."""
    shape = (rng.choice((40, 64, 96)), rng.choice((40, 64)), 3)
    noise = np.random.default_rng(rng.getrandbits(30)).integers(0, 256, shape, dtype=np.uint8)
    return {"type": "image", "image": noise}


def _pair(hit: Output, rows: torch.Tensor, cold: Output, expected: torch.Tensor) -> Pair:
    return Pair(
        hit.usage.cached_tokens,
        torch.equal(rows[0], expected[0]),
        hit.token_ids == cold.token_ids,
        float((rows[0] - expected[0]).abs().max()),
    )


def next_turn_pairs(
    pipe: Pipeline, count: int, *, seed: int, num_tokens: int = 4
) -> Iterator[tuple[Pair, int]]:
    """Answers random prompts, several at a time, and asks on: a prompt of the first one, its answer
    and a few new tokens. Runs that as a hit, in company, and then cold and alone.

    Yields:
        The pair, and how many of the cached tokens had been an answer's.
    """
    rng = random.Random(seed)
    engine = pipe.engine
    made = 0
    while made < count:
        prompts = [random_ids(rng.randint(5, 150), rng.getrandbits(30)) for _ in range(3)]
        prompts = prompts[: rng.randint(1, 3)]
        engine.flush()
        answers = pipe.generate_many(prompts, greedy(rng.randint(30, 90)))
        turns = [
            [*prompt, *answer.token_ids, *random_ids(rng.randint(1, 40), rng.getrandbits(30))]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        with tapped(engine) as tap:
            hits = pipe.generate_many(turns, greedy(num_tokens))
            logits = tap.take()
        engine.check()
        for prompt, turn, hit, rows in zip(prompts, turns, hits, logits, strict=True):
            engine.flush()
            with tapped(engine) as tap:
                cold = pipe.generate(turn, greedy(num_tokens))
                expected = tap.take()[0]
            reused = hit.usage.cached_tokens - len(prompt)
            if reused > 0:
                made += 1
                yield _pair(hit, rows, cold, expected), reused
