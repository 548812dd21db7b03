"""What is known of uploads, kept elsewhere: as bytes, under keys, believed until it is decoded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation import build, frames
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.preprocess.identity.prompt import Prompt, UnconfirmedError
from vlm_serve.preprocess.media import raw_index
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.processing import MediaRecord, Slices
from vlm_serve.preprocess.media.raw_index import (
    decoding_path,
    pack_record,
    unpack_record,
    upload_key,
)
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.system.stopping import Stop


class Shelf:
    """Records of all that any preprocessor has put here."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.asked = 0
        self.replaced = 0

    def get(self, key: bytes) -> MediaRecord | None:
        self.asked += 1
        return unpack_record(self.records[key]) if key in self.records else None

    def put(self, key: bytes, record: MediaRecord) -> None:
        self.records[key] = pack_record(record)

    def replace(self, key: bytes, record: MediaRecord) -> None:
        self.replaced += 1
        self.put(key, record)


@pytest.fixture
def two(checkpoint: Path) -> Iterator[tuple[Shelf, Preprocessor, Preprocessor]]:
    """Two preprocessors that share one shelf."""
    shelf, made = Shelf(), [build(checkpoint), build(checkpoint)]
    for each in made:
        each.keep_records(shelf)
    yield shelf, made[0], made[1]
    for each in made:
        each.close()


def ask(preprocessor: Preprocessor, *parts: dict[str, Any], **options: Any) -> Prompt:
    return preprocessor.prepare([{"role": "user", "content": list(parts)}], **options)


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def video(source: Any) -> dict[str, Any]:
    return {"type": "video", "video": source}


RECORDS = [
    MediaRecord("image", (1, 4, 6), (b"a" * 32,), (), 2),
    MediaRecord("video", (3, 4, 6), (b"a" * 32, b"b" * 32, b"c" * 32), (0.25, 1.25, 2.0), 2),
    MediaRecord("video", (2, 8, 4), (b"d" * 32,) * 14, (), 4, Slices(2, 3, (8, 12))),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back_as_it_was(record: MediaRecord) -> None:
    assert unpack_record(pack_record(record)) == record


@pytest.mark.parametrize("record", RECORDS)
def test_bytes_of_another_length_are_no_record(record: MediaRecord) -> None:
    data = pack_record(record)
    for length in range(len(data)):
        assert unpack_record(data[:length]) is None
    assert unpack_record(data + b"\0") is None


@given(st.binary(max_size=400), st.integers(0, 2**32))
def test_damage_is_refused_or_another_possible_record(noise: bytes, seed: int) -> None:
    """It never raises, and never takes more memory than it was given bytes."""
    assert unpack_record(noise) is None or len(noise) > 32
    rng = random.Random(seed)
    data = bytearray(pack_record(rng.choice(RECORDS)))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    found = unpack_record(bytes(data))
    assert found is None or pack_record(found) == bytes(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"grid": (0, 4, 6)},
        {"grid": (1, 3, 6)},
        {"grid": (1, 1 << 13, 1 << 13)},
        {"merge_size": 0},
        {"times": (float("nan"), 1.0, 2.0)},
        {"times": (-1.0, 1.0, 2.0)},
        {"times": (1.0,)},
        {"modality": "image"},
        {"slices": Slices(0, 1, (2, 2))},
        {"slices": Slices(1, 1, (1, 2))},
    ],
)
def test_a_medium_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    assert unpack_record(pack_record(replace(RECORDS[1], **wrong))) is None


def test_the_key_names_decoders_resize_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MediaLimits()
    found = {decoding_path(limits), decoding_path(replace(limits, max_image_pixels=1000))}
    assert decoding_path(replace(limits, max_redirects=1)) in found
    known = raw_index.libraries()
    assert {"PyAV", "Pillow", "torch", "torch CPU capability", "FFmpeg libavcodec"} <= set(known)
    for name in known:
        monkeypatch.setattr(raw_index, "libraries", lambda name=name: known | {name: "another"})
        found.add(decoding_path(limits))
    assert len(found) == 2 + len(known)
    assert len({upload_key(b"raw", path) for path in found}) == len(found)
    assert upload_key(b"raw", b"p") != upload_key(b"Raw", b"p")


def test_what_one_has_decoded_another_knows(
    two: tuple[Shelf, Preprocessor, Preprocessor], photographs: Path, videos: Path
) -> None:
    shelf, first, second = two
    parts = [
        image(photographs / "coffee.png"),
        image(photographs / "rocket.jpg"),
        video((videos / "carphone_pristine.mp4").read_bytes()),
    ]
    cold = ask(first, *parts)
    assert len(shelf.records) == 3 and first.media_counts == {"decoded": 3}
    known = ask(second, *parts)
    assert second.media_counts == {"tiers": 3}
    assert not any(item.decoded or item.ready for item in known.media)
    assert known.token_ids == cold.token_ids and known.spans == cold.spans
    assert known.keys.block_keys == cold.keys.block_keys
    asked = shelf.asked
    ask(second, *parts)
    assert second.media_counts == {"tiers": 3, "index": 3} and shelf.asked == asked
    ask(second, parts[0], cache_salt="tenant")
    assert second.media_counts["decoded"] == 1 and len(shelf.records) == 4


def test_arrays_are_kept_here_alone(two: tuple[Shelf, Preprocessor, Preprocessor]) -> None:
    """Whoever has an array may change it while it is being hashed."""
    shelf, first, _ = two
    ask(first, video(frames(4)), image(np.zeros((64, 64, 3), np.uint8)))
    assert not shelf.records and not shelf.asked


@pytest.mark.parametrize("other", ["another picture", "another size"])
def test_a_record_that_lies_is_found_out_and_replaced(
    two: tuple[Shelf, Preprocessor, Preprocessor], photographs: Path, other: str
) -> None:
    shelf, first, second = two
    part = image((photographs / "coffee.png").read_bytes())
    cold = ask(first, part)
    (key,) = shelf.records
    truth = unpack_record(shelf.records[key])
    assert truth is not None
    lie = replace(truth, hashes=(b"?" * 32,))
    if other == "another size":
        lie = replace(lie, grid=(1, 2, 2))
    shelf.put(key, lie)
    prompt = ask(second, part)
    assert prompt.spans != cold.spans
    for _ in range(2):
        with pytest.raises(UnconfirmedError):
            prompt.media[0].load(Stop())
    assert prompt.corrected is not None
    right = prompt.corrected()
    assert right.token_ids == cold.token_ids and right.spans == cold.spans
    assert right.media[0].ready and right.corrected is None
    assert second.media_counts == {"tiers": 1, "unconfirmed": 1, "decoded": 1}
    assert shelf.replaced == 1 and unpack_record(shelf.records[key]) == truth
    assert ask(second, part).spans == cold.spans
