"""How large requests are guessed to be."""

from __future__ import annotations

import random

import pytest

from vlm_serve.preprocess.identity.affinity import affinity_keys_of_body, place_of
from vlm_serve.routing.router import MAX_ANSWER_TOKENS, MAX_FACTOR, MIN_FACTOR, SizeEstimator


def key_of(kinds: str, text: str = "What is this?") -> bytes:
    """Of a message with these media: v(ideo) or i(mage)."""
    names = {"v": "video_url", "i": "image_url"}
    content = [
        {"type": names[kind], names[kind]: {"url": f"https://example.com/{number}"}}
        for number, kind in enumerate(kinds)
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    return affinity_keys_of_body("chat", {"messages": messages}, salt="", model="m")[0]


def test_they_begin_as_their_keys_say() -> None:
    sizes = SizeEstimator(100.0)
    for kinds in ("", "v", "i", "vi"):
        assert sizes.guess(key_of(kinds)) == place_of(key_of(kinds)).tokens
    assert sizes.answer == 100.0


def test_each_magnitude_has_a_factor_of_its_own() -> None:
    sizes = SizeEstimator(100.0)
    for _ in range(60):
        sizes.learn(key_of("v"), 400, 10)
        sizes.learn(key_of("ii"), 3000, 10)
    assert sizes.guess(key_of("v", "Why?")) == pytest.approx(400, rel=0.05)
    assert sizes.guess(key_of("i")) == pytest.approx(1500, rel=0.05)
    assert sizes.factor(key_of("", "text")) == 1.0
    assert sizes.answer == pytest.approx(10, rel=0.01)


def test_what_is_learned_is_bounded() -> None:
    sizes, rng = SizeEstimator(100.0), random.Random(0)
    for _ in range(200):
        sizes.learn(key_of("v"), 10**12, 10**12)
        sizes.learn(key_of("i"), -5, -5)
    assert sizes.factor(key_of("v")) == pytest.approx(MAX_FACTOR)
    assert sizes.factor(key_of("i")) == pytest.approx(MIN_FACTOR)
    assert 0.0 <= sizes.answer <= MAX_ANSWER_TOKENS
    for _ in range(2000):
        sizes.learn(rng.randbytes(16), 1000, 10)
    assert len(sizes._factors) <= 18
