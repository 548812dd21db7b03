"""Which prompts share keys, and that preparing one is pure."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation import (
    FIELDS,
    WEIGHTS,
    build,
    clip,
    picture,
    say,
)
from PIL import Image

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import Owners, PromptKeys, Roots, WeightsIdentity
from vlm_serve.preprocess.media.media_processors import processor_fingerprint
from vlm_serve.preprocess.prepare import Preprocessor

OTHER = WeightsIdentity(b"y" * 32, b"z" * 32)


def test_keys_are_those_of_the_tokens_and_spans(
    preprocessor: Preprocessor, checkpoint: Path, cat: Image.Image
) -> None:
    prompt = preprocessor.prepare([say(picture(cat), "a")], cache_salt="tenant-1")
    owner = replace(
        FIELDS, cache_salt="tenant-1", processor_fingerprint=processor_fingerprint(checkpoint)
    ).key()
    root = Roots.of(Owners(owner, owner), WEIGHTS).prompt
    assert prompt.keys.root == root == preprocessor.root_key("tenant-1")
    assert prompt.keys.owners.prompt == owner == preprocessor.owner_key("tenant-1")
    expected = PromptKeys(
        root,
        prompt.token_ids,
        block_size=16,
        spans=prompt.spans,
        end_of_turn_ids=preprocessor.tokenizer.end_of_turn_ids,
    )
    assert prompt.keys.block_keys == expected.block_keys
    assert prompt.keys.tails == expected.tails


def test_what_makes_keys_differ(preprocessor: Preprocessor, cat: Image.Image) -> None:
    def keys(image: Image.Image, salt: str = "") -> list[bytes]:
        return preprocessor.prepare([say(picture(image), "a")], cache_salt=salt).keys.block_keys

    other = cat.copy()
    other.putpixel((75, 50), (255, 0, 255))
    assert keys(cat) == keys(cat.copy())
    assert keys(cat)[0] != keys(other)[0]
    assert len(keys(cat)) == len(keys(other))
    assert not set(keys(cat)) & set(keys(cat, "tenant"))


def test_other_weights_are_other_keys_of_the_same_owner(checkpoint: Path, cat: Image.Image) -> None:
    made = build(checkpoint)
    old = made.prepare([say(picture(cat), "a")]).keys
    for weights, same_tower in ((WEIGHTS._replace(whole=b"x" * 32), True), (OTHER, False)):
        made.renew(weights)
        new = made.prepare([say(picture(cat), "a")]).keys
        assert new.root == made.root_key() != old.root and new.owners == old.owners
        assert (new.vision_root == old.vision_root) == same_tower
        assert old.under(weights).block_keys == new.block_keys
        assert not set(old.block_keys) & set(new.block_keys)


def test_a_root_function_is_used_as_it_is(checkpoint: Path) -> None:
    made = Preprocessor(checkpoint, block_size=16, root_key=lambda salt: salt.encode().ljust(32))
    assert made.prepare([say("a")], cache_salt="x").keys.root == b"x".ljust(32)


@pytest.mark.parametrize("salt", ["a" * 129, "a b", "é", "a\n", "\0", 3, None])
def test_odd_salts_are_refused(preprocessor: Preprocessor, salt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.prepare([say("x")], cache_salt=salt)
    assert caught.value.param == "cache_salt"
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.prepare_tokens([1], cache_salt=salt)
    assert caught.value.param == "cache_salt"


def test_prepare_is_pure_and_thread_safe(
    preprocessor: Preprocessor, checkpoint: Path, cat: Image.Image, videos: Path
) -> None:
    messages = [say(picture(cat), clip(str(videos / "carphone_pristine.mp4")), "a")] * 2
    alone = build(checkpoint).prepare(messages)
    before = repr(messages)
    with ThreadPoolExecutor(6) as pool:
        prompts = list(pool.map(preprocessor.prepare, [messages] * 12))
    assert repr(messages) == before
    for prompt in prompts:
        assert prompt.token_ids == alone.token_ids
        assert prompt.keys.block_keys == alone.keys.block_keys
        assert torch.equal(prompt.positions, alone.positions)
        assert prompt.spans == alone.spans
        assert torch.equal(prompt.media[1].patches(1), alone.media[1].patches(1))
