"""Another sampling of a known video file decodes only what is new, and shows the same frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from conversation import build, clip, frames, recorded, say
from hypothesis import given
from hypothesis import strategies as st
from make_checkpoint import make_checkpoint
from mutated_media import mutated, whole

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.identity.keys import embedding_key
from vlm_serve.preprocess.identity.prompt import MediaItem, Prompt, UnconfirmedError
from vlm_serve.preprocess.media.known_frames import FrameIndex
from vlm_serve.preprocess.media.video_times import FrameTimes
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.system.stopping import Stop


@pytest.fixture(scope="module")
def source() -> bytes:
    """49 frames of a size that no sampling changes."""
    return recorded(frames(49))


class Embeddings:
    """What an engine has encoded."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def encode(self, prompt: Prompt) -> None:
        self.keys |= keys_of(prompt)

    def __call__(self, key: bytes) -> bool:
        return key in self.keys


def keys_of(prompt: Prompt) -> set[bytes]:
    root = prompt.keys.vision_root
    return {embedding_key(root, span.content_hash, span.merge_size) for span in prompt.spans}


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose spans are single frames."""
    spec = CheckpointSpec(family="minicpmv4_6", num_layers=4)
    return make_checkpoint(tmp_path_factory.mktemp("sliced"), spec)


@pytest.fixture(params=["pairs", "frames"])
def path(request: pytest.FixtureRequest, checkpoint: Path, sliced: Path) -> Path:
    return checkpoint if request.param == "pairs" else sliced


@pytest.fixture
def known(path: Path) -> Iterator[tuple[Preprocessor, Embeddings]]:
    made, embeddings = build(path), Embeddings()
    made.know_embeddings(embeddings)
    yield made, embeddings
    made.close()


def ask(preprocessor: Preprocessor, source: Any, salt: str = "", **options: Any) -> Prompt:
    return preprocessor.prepare([say(clip(source, **options), "?")], cache_salt=salt)


def fresh(path: Path, source: Any, **options: Any) -> Prompt:
    made = build(path)
    try:
        return ask(made, source, **options)
    finally:
        made.close()


def counts(preprocessor: Preprocessor) -> dict[str, int]:
    return dict(preprocessor.raw_index.frames.counts)


def assert_same(found: Prompt, expected: Prompt) -> None:
    assert found.token_ids == expected.token_ids and found.spans == expected.spans
    assert found.keys.block_keys == expected.keys.block_keys
    for span in found.spans:
        pixels = found.media[0].patches(span.patch)
        assert torch.equal(pixels, expected.media[0].patches(span.patch)), span


def missing(item: MediaItem, spans: int) -> list[int]:
    return [patch for patch in range(spans) if not item.has(patch)]


GRID: dict[str, Any] = {"sampling": "fps_grid", "sample_fps": 4}


def test_a_longer_sampling_decodes_the_new_frames(
    path: Path, known: tuple[Preprocessor, Embeddings], source: bytes
) -> None:
    preprocessor, embeddings = known
    embeddings.encode(ask(preprocessor, source, num_frames=5))
    before = counts(preprocessor)
    assert before["shown"] == 5 and before["known"] == 0
    # Every second frame of nine is one of the five.
    prompt = ask(preprocessor, source, num_frames=9)
    expected = fresh(path, source, num_frames=9)
    item, spans = prompt.media[0], len(prompt.spans)
    after = counts(preprocessor)
    assert item.decoded and after["shown"] == 14
    if len(prompt.spans) == 5:  # of two frames each: of these the last, which stands alone
        assert after["known"] == 1 and missing(item, spans) == [4]
    else:
        # Frame 0, 2, 4, 6 and 8, each a picture with its slices.
        assert after["known"] == 5 and not item.ready
        parts = spans // 9
        assert missing(item, spans) == [n for n in range(spans) if n // parts % 2 == 0]
        assert prompt.corrected is not None
    assert_same(prompt, expected)
    assert item.ready
    # Another length, and all of its frames are known: nothing is decoded.
    embeddings.encode(prompt)
    decoded = counts(preprocessor)["decoded"]
    third = ask(preprocessor, source, num_frames=3)
    assert not third.media[0].decoded and counts(preprocessor)["decoded"] == decoded
    assert preprocessor.media_counts["frames"] == 1
    assert_same(third, fresh(path, source, num_frames=3))


def test_frames_without_their_embeddings_are_decoded_with_the_new_ones(
    path: Path, known: tuple[Preprocessor, Embeddings], source: bytes
) -> None:
    """Otherwise a video would be decoded twice for one prompt."""
    preprocessor, _ = known
    ask(preprocessor, source, num_frames=5)
    prompt = ask(preprocessor, source, num_frames=9)
    assert prompt.media[0].ready and counts(preprocessor)["known"] == 0
    assert_same(prompt, fresh(path, source, num_frames=9))


def test_the_same_pictures_at_other_times_are_known_as_pairs(
    known: tuple[Preprocessor, Embeddings],
) -> None:
    """A slide that does not change: pairs that were never sampled have embeddings at hand."""
    preprocessor, embeddings = known
    source = recorded(np.repeat(frames(2), 20, axis=0))  # two slides, without loss
    embeddings.encode(ask(preprocessor, source, sampling="fps_grid", sample_fps=3))
    decoded = counts(preprocessor)["decoded"]
    prompt = ask(preprocessor, source, sampling="fps_grid", sample_fps=1)
    assert counts(preprocessor)["decoded"] == decoded
    assert keys_of(prompt) <= embeddings.keys


def test_another_rate_keeps_the_frames(
    path: Path, known: tuple[Preprocessor, Embeddings], source: bytes
) -> None:
    """`fps` changes times, not pictures."""
    preprocessor, embeddings = known
    embeddings.encode(ask(preprocessor, source, num_frames=5))
    prompt = ask(preprocessor, source, num_frames=5, fps=10)
    assert not prompt.media[0].decoded
    assert_same(prompt, fresh(path, source, num_frames=5, fps=10))


def test_another_size_is_decoded(checkpoint: Path, source: bytes) -> None:
    preprocessor = build(checkpoint)
    preprocessor.know_embeddings(lambda key: True)
    first = ask(preprocessor, source, **GRID)
    second = ask(preprocessor, source, **GRID, max_frame_pixels=4096)
    assert second.spans[0].grid != first.spans[0].grid and second.media[0].ready
    assert_same(second, fresh(checkpoint, source, **GRID, max_frame_pixels=4096))
    preprocessor.close()


def test_tenants_do_not_share_frames(known: tuple[Preprocessor, Embeddings], source: bytes) -> None:
    preprocessor, _ = known
    for salt in ("", "a", "b"):
        assert ask(preprocessor, source, salt, num_frames=5).media[0].decoded
        assert not ask(preprocessor, source, salt, num_frames=3).media[0].decoded


def test_other_decoders_find_nothing(known: tuple[Preprocessor, Embeddings], source: bytes) -> None:
    preprocessor, _ = known
    ask(preprocessor, source, num_frames=5)
    preprocessor._loader._path = b"another version"
    assert ask(preprocessor, source, num_frames=3).media[0].decoded


def test_a_file_that_ends_early_is_not_remembered(
    path: Path, known: tuple[Preprocessor, Embeddings]
) -> None:
    preprocessor, _ = known
    source = whole("fragmented MP4")[:-300]
    for count in (4, 2):
        prompt = ask(preprocessor, source, num_frames=count)
        assert prompt.media[0].cut_short and prompt.media[0].ready
        assert_same(prompt, fresh(path, source, num_frames=count))
    assert len(preprocessor.raw_index.frames) == 0


@pytest.mark.parametrize("patches", [None, [0]])
def test_wrong_hashes_are_found_out(
    patches: list[int] | None, known: tuple[Preprocessor, Embeddings], source: bytes
) -> None:
    preprocessor, _ = known
    ask(preprocessor, source, num_frames=5)
    ((file, _),) = preprocessor.raw_index.frames._entries.values()
    (hashes,) = file.layouts.values()
    right, wrong = hashes[0], tuple(b"?" * 32 for _ in hashes[0])
    hashes[0] = wrong
    prompt = ask(preprocessor, source, num_frames=3)
    assert not prompt.media[0].decoded
    with pytest.raises(UnconfirmedError):
        prompt.media[0].load(Stop(), patches)
    assert prompt.corrected is not None
    corrected = prompt.corrected()
    assert corrected.media[0].ready and corrected.spans != prompt.spans
    # From now on they are right.
    assert hashes[0] == right
    assert ask(preprocessor, source, num_frames=3).spans == corrected.spans


def test_only_the_pixels_that_are_needed_are_decoded(
    path: Path, known: tuple[Preprocessor, Embeddings], source: bytes
) -> None:
    preprocessor, _ = known
    ask(preprocessor, source, num_frames=9)
    prompt = ask(preprocessor, source, num_frames=5)
    item, spans = prompt.media[0], len(prompt.spans)
    assert missing(item, spans) == list(range(spans))
    before = counts(preprocessor)["decoded"]
    item.load(Stop(), [0])
    assert item.has(0) and not item.has(spans - 1) and not item.ready
    assert counts(preprocessor)["decoded"] - before < 20
    expected = fresh(path, source, num_frames=5)
    assert torch.equal(item.patches(0), expected.media[0].patches(0))
    item.load(Stop(), [0])
    assert not item.ready
    # Who asks again gets everything, so that nothing is decoded patch by patch.
    item.load(Stop(), [spans - 1])
    assert item.ready and not missing(item, spans)
    assert_same(prompt, expected)


def test_damaged_files_give_the_same_answers_again(checkpoint: Path) -> None:
    """One preprocessor that remembers, and one that does not."""
    remembering, forgetful = build(checkpoint), build(checkpoint, raw_index_bytes=0)
    remembering.know_embeddings(lambda key: True)
    outcomes: list[Any] = []
    for seed in range(60):
        file = mutated(seed)
        if file.modality != "video":
            continue
        for count in (3, 5, 2):
            found, expected = (answer(each, file.data, count) for each in (remembering, forgetful))
            assert found == expected, (seed, file.kind, count)
            outcomes.append(type(found))
    assert set(outcomes) == {str, tuple}
    assert counts(remembering)["known"] > 20
    remembering.close()
    forgetful.close()


def answer(preprocessor: Preprocessor, data: bytes, count: int) -> Any:
    try:
        return ask(preprocessor, data, num_frames=count).spans
    except MediaError as error:
        return error.message


def test_without_memory_everything_is_decoded(checkpoint: Path, source: bytes) -> None:
    made = build(checkpoint, raw_index_bytes=0)
    for count in (5, 3):
        assert ask(made, source, num_frames=count).media[0].decoded
    assert len(made.raw_index.frames) == 0
    made.close()


TIMES = FrameTimes([0.0, 0.1, 0.2], 10.0, True)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 20)), max_size=60))
def test_the_index_stays_within_its_bytes(steps: list[tuple[int, int, int]]) -> None:
    index = FrameIndex(20_000)
    for name, layout, count in steps:
        key, hashes = bytes([name]), {frame: (bytes(32),) for frame in range(count)}
        index.learn(key, None, TIMES, (0, (48, 64)), str(layout), hashes)
        assert index.num_bytes <= 20_000
        if index.timeline(key, None) is not None:
            assert index.hashes(key, str(layout)).keys() >= hashes.keys()
            assert index.size(key, 0) == (48, 64)
    assert index.num_bytes == sum(cost for _, cost in index._entries.values())
    index.clear()
    assert not index.num_bytes and index.timeline(b"\0", None) is None


def test_a_file_beyond_the_index_is_dropped() -> None:
    index = FrameIndex(4000)
    index.learn(b"a", None, TIMES, (0, (1, 1)), "", {0: (bytes(32),)})
    index.learn(b"a", None, TIMES, (0, (1, 1)), "", {frame: (bytes(32),) for frame in range(99)})
    assert len(index) == 0 and not index.num_bytes
