"""Random pairs of a cold run and a hit on the same prompt, in random company: of token ids, of
chats about pictures, and of next turns, which hit what decoding has written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from parity import greedy, tapped
from parity_cases import random_ids, user

from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams


@dataclass(frozen=True)
class Pair:
    """One comparison. `same_bits`: of the logits that the first token was chosen from."""

    cached_tokens: int
    same_bits: bool
    same_tokens: bool
    max_difference: float


Loras = Sequence[str | None]
"""Names of adapters to choose among, None for none of them."""
Ask = Callable[..., Any]
"""A method of a pipeline that answers one prompt, or many."""


def random_pairs(
    pipe: Pipeline, count: int, *, seed: int, num_tokens: int = 4, loras: Loras = (None,)
) -> Iterator[Pair]:
    """Runs random prompts cold and alone, then again as hits in batches of one to four.

    Prompts share prefixes of random length, so that hits end at many kinds of boundary.
    """
    rng = random.Random(seed)
    made = 0
    while made < count:
        base = random_ids(rng.randint(20, 220), rng.randrange(10**6))
        prompts = [
            base[: rng.randint(10, len(base))] + random_ids(rng.randint(1, 60), rng.getrandbits(20))
            for _ in range(rng.randint(1, 4))
        ]
        own = [rng.choice(loras) for _ in prompts]
        cold = _cold(pipe, pipe.generate, prompts, num_tokens, own)
        for lora in dict.fromkeys(own):
            pipe.generate(base, greedy(1), lora=lora)
        if rng.random() < 0.5:
            pipe.generate_many(prompts, greedy(1), lora=own)
        hits, logits = _together(pipe, pipe.generate_many, prompts, num_tokens, own)
        for hit, rows, (answer, expected) in zip(hits, logits, cold, strict=True):
            if hit.usage.cached_tokens:
                made += 1
                yield _pair(hit, rows, answer, expected)


def picture_pairs(
    pipe: Pipeline, count: int, *, seed: int, num_tokens: int = 4, loras: Loras = (None,)
) -> Iterator[Pair]:
    """Chats that share some of their pictures, cold and alone, then as hits in batches of one to
    four. Some hits bring another picture, which is encoded in company."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        base: list[dict[str, Any] | str]
        base = [_words(rng, 10), _picture(rng), _words(rng, 20), _picture(rng), _words(rng, 5)]
        chats = []
        for _ in range(rng.randint(1, 4)):
            another = [_picture(rng)] if rng.random() < 0.4 else []
            chats.append([user(*base[: rng.randint(2, 5)], *another, _words(rng, 15))])
        own = [rng.choice(loras) for _ in chats]
        cold = _cold(pipe, pipe.chat, chats, num_tokens, own)
        for lora in dict.fromkeys(own):
            pipe.chat([user(*base)], greedy(1), lora=lora)
        hits, logits = _together(pipe, pipe.chat_many, chats, num_tokens, own)
        for hit, rows, (answer, expected) in zip(hits, logits, cold, strict=True):
            if hit.usage.cached_tokens:
                made += 1
                yield _pair(hit, rows, answer, expected)


def joined_pairs(
    pipe: Pipeline,
    count: int,
    *,
    seed: int,
    num_tokens: int = 4,
    most: int = 6,
    loras: Loras = (None,),
) -> Iterator[Pair]:
    """Prompts that share a beginning, and in groups some more, cold and alone; then all at once to
    an empty cache, so that some wait for what others compute. Only those count.

    Args:
        most: prompts at once.
    """
    rng = random.Random(seed)
    made = 0
    while made < count:
        base = random_ids(rng.randint(70, 200), rng.getrandbits(30))
        branches = [random_ids(rng.randint(1, 90), rng.getrandbits(30)) for _ in range(2)]
        prompts = [
            base + rng.choice([[], *branches]) + random_ids(rng.randint(1, 40), rng.getrandbits(30))
            for _ in range(rng.randint(2, most))
        ]
        own = [rng.choice(loras) for _ in prompts]
        cold = _cold(pipe, pipe.generate, prompts, num_tokens, own)
        hits, logits = _together(pipe, pipe.generate_many, prompts, num_tokens, own)
        for hit, rows, (answer, expected) in zip(hits, logits, cold, strict=True):
            if hit.cache_report.joined_tokens:
                made += 1
                yield _pair(hit, rows, answer, expected)


def _cold(
    pipe: Pipeline, ask: Ask, prompts: Sequence[Any], num_tokens: int, loras: Loras
) -> list[tuple[Output, torch.Tensor]]:
    """Run each prompt alone on an empty cache; return the answers with their logits, and leave the
    cache empty."""
    found = []
    for prompt, lora in zip(prompts, loras, strict=True):
        pipe.engine.flush()
        with tapped(pipe.engine) as tap:
            answer = ask(prompt, greedy(num_tokens), lora=lora)
            found.append((answer, tap.take()[0]))
    pipe.engine.flush()
    return found


def _together(
    pipe: Pipeline, ask: Ask, prompts: Sequence[Any], num_tokens: int, loras: Loras
) -> tuple[list[Output], list[torch.Tensor]]:
    """Run all prompts at once; return the answers and their logits, and check the engine."""
    with tapped(pipe.engine) as tap:
        hits = ask(prompts, greedy(num_tokens), lora=loras)
        logits = tap.take()
    pipe.engine.check()
    return hits, logits


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
    pipe: Pipeline,
    count: int,
    *,
    seed: int,
    num_tokens: int = 4,
    between: int = 0,
    loras: Loras = (None,),
) -> Iterator[tuple[Pair, int]]:
    """Answers random prompts, several at a time, and asks on: a prompt of the first one, its answer
    and a few new tokens. Runs that as a hit, in company, and then cold and alone. Half of the
    answers end with an end-of-turn token, the others are cut.

    Args:
        between: tokens of another prompt that is run before the hits, to evict what was there.

    Yields:
        The pair, and how many of the cached tokens had been an answer's.
    """
    rng = random.Random(seed)
    engine = pipe.engine
    made = 0
    while made < count:
        prompts = [random_ids(rng.randint(5, 150), rng.getrandbits(30)) for _ in range(3)]
        prompts = prompts[: rng.randint(1, 3)]
        own = [rng.choice(loras) for _ in prompts]
        engine.flush()
        answers = pipe.generate_many(prompts, [_answer(pipe, rng) for _ in prompts], lora=own)
        if between:
            pipe.generate(random_ids(between, rng.getrandbits(30)), greedy(1))
        turns = [
            [*prompt, *answer.token_ids, *random_ids(rng.randint(1, 40), rng.getrandbits(30))]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        hits, logits = _together(pipe, pipe.generate_many, turns, num_tokens, own)
        cold = _cold(pipe, pipe.generate, turns, num_tokens, own)
        found = zip(prompts, hits, logits, cold, strict=True)
        for prompt, hit, rows, (answer, expected) in found:
            reused = hit.usage.cached_tokens - len(prompt)
            if reused > 0:
                made += 1
                yield _pair(hit, rows, answer, expected), reused


def _answer(pipe: Pipeline, rng: random.Random) -> SamplingParams:
    """Options of an answer of some length, which ends by itself or is cut."""
    length = rng.randint(30, 90)
    if rng.random() < 0.5:
        return greedy(length)
    end = pipe.engine.preprocessor.tokenizer.special_tokens["<|im_end|>"]
    return SamplingParams(
        max_tokens=length + 1, min_tokens=length, temperature=0.0, logit_bias={end: 100.0}
    )
