"""Another sampling of a video: what is known and encoded needs no pixels, whatever is evicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation import recorded
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import greedy

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline

NAMES = {"pairs": "dense, equal heads, one kv head", "frames": "minicpm, 4x, tied"}


@pytest.fixture(scope="module", params=list(NAMES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("known"), SPECS[NAMES[request.param]])


@pytest.fixture
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    with opened(checkpoint) as made:
        yield made


def opened(checkpoint: Path) -> Pipeline:
    config = EngineConfig(block_size=16, cache_memory="64MiB", max_model_len=4096)
    return Pipeline(str(checkpoint), config)


def pictures(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 64, 96, 3), dtype=np.uint8)


def chat(video: bytes, frames: int, before: str = "") -> list[dict[str, Any]]:
    part = {"type": "video", "video": video, "num_frames": frames}
    return [{"role": "user", "content": [{"type": "text", "text": before}, part]}]


def answer(pipe: Pipeline, *asked: Any) -> Output:
    output = pipe.chat(chat(*asked), greedy(6))
    pipe.engine.check()
    return output


def counts(pipe: Pipeline) -> tuple[int, int, int]:
    """Frames known, frames decoded, and spans encoded since the start."""
    stats = pipe.engine.stats()
    frames = stats["video_frames"]
    return frames["known"], frames["decoded"], stats["num_encoded_spans"]


def test_slides_are_decoded_and_encoded_once(checkpoint: Path, pipe: Pipeline) -> None:
    first, second = pictures(2)
    slides = recorded([first] * 22 + [second] * 21)
    answer(pipe, slides, 15)
    before = counts(pipe)
    # Every second of these frames, in pairs that were not seen before.
    moved = answer(pipe, slides, 8, "Something else comes first. ")
    assert np.subtract(counts(pipe), before).tolist() == [8, 0, 0]
    assert not moved.cache_report.media_decoded and not moved.cache_report.media_encoded
    with opened(checkpoint) as cold:
        expected = answer(cold, slides, 8, "Something else comes first. ")
        assert moved.token_ids == expected.token_ids


def test_new_frames_are_decoded_beside_known_ones(checkpoint: Path, pipe: Pipeline) -> None:
    video = recorded(pictures(33))
    answer(pipe, video, 5)
    before = counts(pipe)
    longer = answer(pipe, video, 9, "Something else comes first. ")
    known, _, encoded = np.subtract(counts(pipe), before).tolist()
    with opened(checkpoint) as cold:
        expected = answer(cold, video, 9, "Something else comes first. ")
        assert longer.token_ids == expected.token_ids
        spared = cold.engine.stats()["num_encoded_spans"] - encoded
    # Of pairs the last one, which is a single frame.
    assert known in (1, 5) and spared % known == 0 and spared > 0


def test_embeddings_that_are_evicted_meanwhile_are_made_again(
    checkpoint: Path, pipe: Pipeline
) -> None:
    video = recorded(pictures(33))
    answer(pipe, video, 5)
    prompt = pipe.engine.preprocessor.prepare(chat(video, 9, "Something else. "))
    assert not prompt.media[0].ready
    pipe.engine.flush()
    deltas: list[Delta] = []
    pipe.engine.submit(prompt, greedy(6), deltas.append)
    deadline = time.monotonic() + 60
    while not any(delta.finish_reason for delta in deltas):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert deltas[-1].error is None and prompt.media[0].ready
    tokens = [token for delta in deltas for token in delta.token_ids]
    with opened(checkpoint) as cold:
        assert tokens == answer(cold, video, 9, "Something else. ").token_ids
