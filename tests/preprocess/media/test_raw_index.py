"""Repeated uploads are recognised by their bytes, and only by the same tenant's."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversation import build
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media import loading as media_items
from vlm_serve.preprocess.media.media_processors import Processor
from vlm_serve.preprocess.media.processing import MediaRecord, Processed
from vlm_serve.preprocess.media.raw_index import RawIndex, raw_digest, raw_key
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.system.stopping import Stop


@pytest.fixture
def preprocessor(checkpoint: Path) -> Iterator[Preprocessor]:
    made = build(checkpoint)
    yield made
    made.close()


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one entry for every medium that is really processed."""
    done: list[str] = []
    process = Processor.process

    def counting(self: Processor, *args: Any) -> Processed:
        done.append(self.run.__name__)
        return process(self, *args)

    monkeypatch.setattr(Processor, "process", counting)
    return done


def ask(preprocessor: Preprocessor, *parts: dict[str, Any], **options: Any) -> Prompt:
    return preprocessor.prepare([{"role": "user", "content": list(parts)}], **options)


def image(source: Any, **options: Any) -> dict[str, Any]:
    return {"type": "image", "image": source, **options}


def video(source: Any, **options: Any) -> dict[str, Any]:
    return {"type": "video", "video": source, **options}


def test_a_repeated_upload_is_not_decoded(
    preprocessor: Preprocessor, photographs: Path, videos: Path, decodes: list[str]
) -> None:
    picture = (photographs / "coffee.png").read_bytes()
    clip = (videos / "carphone_pristine.mp4").read_bytes()
    first = ask(preprocessor, image(picture), video(clip))
    assert sorted(decodes) == ["process_image", "process_video"]
    assert all(item.decoded and item.ready for item in first.media)
    url = {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}
    second = ask(preprocessor, {"type": "image_url", "image_url": url}, video(clip))
    assert len(decodes) == 2
    assert not any(item.decoded or item.ready for item in second.media)
    third = ask(preprocessor, {"type": "image_url", "image_url": url}, video(clip))
    assert not any(item.decoded for item in third.media)
    assert torch.equal(third.media[0].patches(0), first.media[0].patches(0))
    assert second.token_ids == first.token_ids
    assert second.spans == first.spans
    assert second.keys.block_keys == first.keys.block_keys
    assert torch.equal(second.positions, first.positions)


def test_pixels_are_made_when_they_are_needed_after_all(
    preprocessor: Preprocessor, videos: Path, decodes: list[str]
) -> None:
    clip = (videos / "carphone_pristine.mp4").read_bytes()
    first, second = ask(preprocessor, video(clip)).media[0], ask(preprocessor, video(clip)).media[0]
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(second.patches(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decodes) == 2  # once more, whoever asks first
    assert all(torch.equal(patches, first.patches(1)) for patches in found)
    assert second.decoded and second.ready


def test_the_text_of_a_data_url_is_enough(
    preprocessor: Preprocessor, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = base64.b64encode((photographs / "coffee.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": "data:image/png;base64," + data}
    first = ask(preprocessor, part)
    monkeypatch.setattr(media_items, "fetch", None)
    assert ask(preprocessor, part).spans == first.spans


def test_load_decodes(preprocessor: Preprocessor, photographs: Path, decodes: list[str]) -> None:
    path = photographs / "coffee.png"
    ask(preprocessor, image(path))
    item = ask(preprocessor, image(path)).media[0]
    assert not item.ready
    item.load(Stop())
    assert item.ready and len(decodes) == 2


def test_tenants_do_not_share_the_index(
    preprocessor: Preprocessor, photographs: Path, decodes: list[str]
) -> None:
    path = photographs / "coffee.png"
    for salt in ("", "a", "b"):
        assert ask(preprocessor, image(path), cache_salt=salt).media[0].decoded
    assert not ask(preprocessor, image(path), cache_salt="a").media[0].decoded
    assert len(decodes) == 3


def test_other_options_are_other_entries(
    preprocessor: Preprocessor, photographs: Path, videos: Path, decodes: list[str]
) -> None:
    path, clip = photographs / "coffee.png", videos / "carphone_pristine.mp4"
    parts = [
        image(path),
        image(path, detail="low"),
        image(path, max_pixels=9000),
        video(clip),
        video(clip, fps=10),
        video(clip, sample_fps=3),
        video(clip, max_frames=3),
        video(clip, sampling="fps_grid"),
        video(clip, sampling="fps_grid", max_frame_pixels=4096),
    ]
    for part in parts:
        assert ask(preprocessor, part).media[0].decoded
    assert len(preprocessor.raw_index) == len(decodes) == len(parts)
    for part in parts:
        assert not ask(preprocessor, part).media[0].decoded
    # An option that says what holds anyway changes nothing.
    assert not ask(preprocessor, image(path, detail="high")).media[0].decoded
    assert not ask(preprocessor, video(clip, sample_fps=2)).media[0].decoded


def test_frames_in_memory_are_recognised(preprocessor: Preprocessor, decodes: list[str]) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (12, 48, 64, 3), dtype=np.uint8)
    first = ask(preprocessor, video(frames))
    second = ask(preprocessor, video(frames.copy()))
    assert not second.media[0].decoded
    assert len(decodes) == 1
    assert torch.equal(second.media[0].patches(0), first.media[0].patches(0))
    assert ask(preprocessor, video(frames[:, :, ::-1])).media[0].decoded
    assert ask(preprocessor, video(frames.reshape(12, 64, 48, 3))).media[0].decoded


def test_content_that_changed_meanwhile_is_found_out(preprocessor: Preprocessor) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (12, 48, 64, 3), dtype=np.uint8)
    ask(preprocessor, video(frames))
    item = ask(preprocessor, video(frames)).media[0]
    frames[0] += 1
    with pytest.raises(MediaError, match="no longer"):
        item.patches(0)
    assert not item.ready
    assert len(preprocessor.raw_index) == 0  # nor is the record trusted any more


def test_failures_are_not_remembered(preprocessor: Preprocessor) -> None:
    for _ in range(2):
        with pytest.raises(MediaError):
            ask(preprocessor, image(b"broken"))
    assert len(preprocessor.raw_index) == 0


def test_without_memory_everything_is_decoded(checkpoint: Path, photographs: Path) -> None:
    made = build(checkpoint, raw_index_bytes=0)
    for _ in range(2):
        assert ask(made, image(photographs / "coffee.png")).media[0].decoded
    made.close()


def test_every_field_of_the_key_counts() -> None:
    base: dict[str, Any] = {
        "cache_salt": "s",
        "modality": "image",
        "options": b"o",
        "fingerprint": b"f",
    }
    array = np.frombuffer(b"data", dtype=np.uint8)
    contents = (b"data", b"Data", array, array.reshape(2, 2), "data")
    keys = {raw_key(raw_digest(content), **base) for content in contents}
    for name, value in base.items():
        keys.add(raw_key(raw_digest(b"data"), **(base | {name: value * 2})))
    assert len(keys) == 9


def record(size: int) -> MediaRecord:
    return MediaRecord("video", (size, 2, 2), (b"h" * 32,) * size, (0.0,) * size, 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60))
def test_least_recently_used_go_first(steps: list[tuple[int, int]]) -> None:
    """Against a plain list kept in order of use."""
    index, model = RawIndex(5000), list[tuple[bytes, MediaRecord]]()
    for name, size in steps:
        key, value = bytes([name]), record(size)
        known = dict(model).get(key)
        assert index.get(key) == known
        if known is not None:
            model = [entry for entry in model if entry[0] != key] + [(key, known)]
            continue
        index.put(key, value)
        model.append((key, value))
        while sum(RawIndex.cost(entry[1]) for entry in model) > 5000:
            model.pop(0)
        assert len(index) == len(model)
        assert index.num_bytes == sum(RawIndex.cost(entry[1]) for entry in model) <= 5000
    index.clear()
    assert (len(index), index.num_bytes) == (0, 0)


def test_an_entry_that_does_not_fit_is_left_out() -> None:
    index = RawIndex(1000)
    index.put(b"a", record(1))
    index.put(b"b", record(100))
    assert index.get(b"a") is not None
    assert index.get(b"b") is None
    index.put(b"a", replace(record(1), times=(1.0,)))
    assert index.get(b"a") == replace(record(1), times=(1.0,))
    index.remove(b"a")
    index.remove(b"a")
    assert index.num_bytes == 0
